"""Controls that keep a comparison of pictures honest: the same text for both, eyes on every stage,
and inputs that must or must not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hyimg_cli.measure.bench.divergence import Divergence, divergences
from hyimg_cli.measure.bench.runs import Texts, observed_run
from hyimg_cli.measure.bench.verdict import Timed
from hyimg_cli.media.images import read_image, write_png
from hyimg_cli.pipelines.image.pipeline import LoadModel
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import RunConfig

Place = Callable[[], Path]


@dataclass(frozen=True)
class LookedThrough:
    """The text that A wrote, by job; where the variants part when it is forced into both; what
    failed on the way.
    """

    texts: Texts
    divergences: tuple[Divergence, ...] = ()
    failures: tuple[str, ...] = ()


def looked_through(
    configs: tuple[RunConfig, RunConfig],
    labels: tuple[str, str],
    jobs: Sequence[Sequence[ImageJob]],
    place: Place,
    load: LoadModel,
    *,
    is_lossy: bool = False,
) -> LookedThrough:
    """A writes freely; then both run with its text, looked through from ids to latents, where
    variants declare a loss up to the noise. `jobs`: of each variant.

    Every run is given a folder of its own by `place`.
    """
    first, seen = observed_run(configs[0], {}, jobs[0], place(), load, tries_tokens=False)
    texts = seen.texts()
    runs, seen_by = zip(
        *(
            observed_run(config, texts, own, place(), load)
            for config, own in zip(configs, jobs, strict=True)
        ),
        strict=True,
    )
    ours, theirs = (one.jobs for one in seen_by)
    parted = [
        found
        for name in ours
        if name in theirs
        for found in divergences(ours[name], theirs[name], labels, is_lossy=is_lossy)
    ]
    by_label = zip((labels[0], *labels), (first, *runs), strict=True)
    failures = [f"{label} fails: {text}" for label, run in by_label for text in run.failures]
    return LookedThrough(texts, tuple(parted), tuple(dict.fromkeys(failures)))


def texts_of_others(jobs: Sequence[ImageJob], texts: Texts) -> dict[str, Sequence[int]]:
    """For each job the text of another of its kind that wrote something else."""
    found: dict[str, Sequence[int]] = {}
    for job in jobs:
        own = texts.get(job.custom_id)
        kin = (texts.get(one.custom_id) for one in jobs if _kind(one) == _kind(job))
        other = next((text for text in kin if own and text and text != own), None)
        if other is not None:
            found[job.custom_id] = other
    return found


def with_negatives(jobs: Sequence[ImageJob], folder: Path) -> list[ImageJob]:
    """The jobs with every source image turned into its negative, written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for job in jobs:
        targets = [folder / f"{job.custom_id}-{number}.png" for number in range(len(job.images))]
        for path, target in zip(job.images, targets, strict=True):
            write_png(target, 255 - read_image(Path(path)).pixels, {})
        changed.append(replace(job, images=tuple(map(str, targets))))
    return changed


def same_work(timed: Timed) -> tuple[str, ...]:
    """The jobs for which both variants report the same counts: nothing sets them apart there."""
    ours, theirs = (
        {one.custom_id: _counts(one) for one in runs[-1].outcomes} for runs in (timed.a, timed.b)
    )
    same = [name for name in ours if ours[name] == theirs.get(name)]
    # Some jobs may have nothing to share; a variant that shares nowhere is none.
    return tuple(same) if len(same) == len(ours) else ()


def _counts(outcome: Outcome) -> tuple[object, ...]:
    """The counts of work in a job's line, without its seconds."""
    reuse, spread = outcome.kv_reuse, outcome.parallel
    tokens = None if reuse is None else (reuse.ar_shared_tokens, reuse.branches)
    ranks = 0
    if spread is not None:
        decoding = len(spread.decode.ranks) if spread.decode else 1
        branches = spread.branch_ranks * spread.tensor_ranks
        ranks = max(branches, spread.context_ranks, decoding)
    embedded, cache = outcome.cache.get("prompt_embeddings"), outcome.step_cache
    full = None if cache is None else (cache.full, cache.estimated)
    return tokens, outcome.batch, embedded, ranks, full


def _kind(job: ImageJob) -> tuple[object, ...]:
    return job.task, job.bot_task, job.size
