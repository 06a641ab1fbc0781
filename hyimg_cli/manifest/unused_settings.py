"""Find settings that the manifest's jobs do not read, because of their kind or format."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hyimg_cli.manifest.fields import OF_MODELS
from hyimg_cli.settings.config import Setting, as_given
from hyimg_cli.settings.table import READERS, SETTINGS, TABLES
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest, VideoJob
from hyimg_cli.spec.model_name import names_file
from hyimg_cli.spec.units import counted, names_text


def without_effect(
    settings: Mapping[str, Setting],
    jobs: Sequence[Job],
    card_of: Callable[[str], ModelCard],
    video_card_of: Callable[[str], VideoCard],
) -> Iterator[str]:
    """Yield a sentence for each kind of job or model that settings are for and `jobs` lacks.

    Also yields sizes that the jobs ask for and their models do not make.
    """
    of_pictures = [job for job in jobs if isinstance(job, ImageJob)]
    pictures = [job for job in of_pictures if job.draws]
    films = [job for job in jobs if isinstance(job, VideoJob)]
    cards: list[ModelCard | VideoCard] = [
        card_of(model) for model in {j.model for j in of_pictures}
    ]
    cards += [video_card_of(model) for model in {job.model for job in films}]
    followed = frozenset[str]().union(*(card.follows for card in cards))
    kinds = frozenset[str]().union(*(card.kinds for card in cards))
    of_models = {field.name for field in OF_MODELS}
    for name, reader in READERS.items() if jobs else ():
        names = [
            row.name
            for row in SETTINGS.values()
            if row.only == name
            and not (row.name in followed if row.name in of_models else name in kinds)
        ]
        yield from _concern(settings, names, f"{reader.words} only; this manifest has none")
    yield from _fitted(pictures, card_of)
    if pictures and all(job.encoding.quality is None for job in pictures):
        formats = "JPEG and lossy WebP only; no result has these formats"
        yield from _concern(settings, ["quality"], formats)
    if pictures and all(job.encoding.format != "webp" for job in pictures):
        yield from _concern(settings, ["lossless"], "WebP only; no result has this format")
    if pictures and not any(names_file(job.model) for job in pictures):
        yield from _concern(settings, ["components"], "models as one file; no job has one")
    kept = [job.outside for job in pictures if job.outside is not None]
    if pictures and not any(outside.region for outside in kept):
        names = ["region_mode", "region_keeps", "max_spill", "region_context", "region_pixels"]
        names = names if kept else [name for name in TABLES["outside"] if name != "keep_outside"]
        kind = "a region" if kept else "keep_outside"
        yield from _concern(settings, names, f"edits with {kind} only; no job is one")
    elif kept and not any(job.inpaints for job in pictures):
        yield from _concern(settings, ["strength"], "inpainting only; no job does it")
    if pictures and settings["batch_invariant"].value and "text" not in kinds:
        what = "diffusers image models with --no-batch-invariant only"
        yield from _concern(settings, ["batching_max_size"], what)
    is_taken = "negative_prompt" in followed and not films
    if is_taken and not any(job.negative_prompt for job in pictures):
        yield from _concern(settings, ["negative_prompt"], "jobs with guidance only; none has it")
    named = sum("name" in job.user_fields for job in jobs)
    if named and _is_given(settings["name"]):
        flag, jobs_named = as_given(settings["name"]), f"{named} of {len(jobs)} jobs"
        yield f"{flag} has no effect for {jobs_named}: their lines set a name"


def _fitted(jobs: Iterable[ImageJob], card_of: Callable[[str], ModelCard]) -> Iterator[str]:
    """Yield a sentence for each model on jobs that get another size than they ask for."""
    counts = Counter((job.model, size) for job in jobs if (size := job.asked_size) is not None)
    changes: dict[str, dict[str, int]] = {}
    for (model, asked), count in counts.items():
        bucket = card_of(model).bucket_of(SizeRequest(asked.height, asked.width))
        if bucket is not None and bucket.size != asked:
            own = changes.setdefault(card_of(model).name, {})
            own[f"{asked} is fitted to {bucket.size}"] = count
    for name, found in changes.items():
        of = counted(sum(found.values()), "job")
        yield f"{name} does not make the size of {of}: {names_text([*found], 3)}"


def _concern(settings: Mapping[str, Setting], names: Iterable[str], what: str) -> Iterator[str]:
    """Yield a sentence on the settings in question that were given."""
    found = [as_given(settings[name]) for name in names if _is_given(settings[name])]
    if found:
        yield f"{', '.join(found)} {'applies' if len(found) == 1 else 'apply'} to {what}"


def _is_given(setting: Setting) -> bool:
    return setting.origin not in ("default", "model", "record")
