"""One comparison from scenario to verdict.

    1 decide the text     A writes once; its tokens are forced into every run of both variants
    2 time                per step count: warm-up, then A B A B ..; pictures kept
    3 control             other seed
    4 judge

Videos have no text stage: they take steps 2 to 4, frame by frame.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hyimg_cli.engine import runner
from hyimg_cli.errors import JobError, UsageError
from hyimg_cli.files import refuse_links
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.past_run import output_files
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.measure.bench.budget import DistanceRow, Metrics, row
from hyimg_cli.measure.bench.runs import Run, RunResult, Texts, runs_of, shared_models
from hyimg_cli.measure.bench.scenario import Scenario, Variant
from hyimg_cli.measure.bench.verdict import FEWEST_RUNS, Comparison, Timed
from hyimg_cli.measure.pairs import VARIANTS
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.pipeline import LoadModel
from hyimg_cli.settings.config import Setting, build_run_config, settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import ImageJob, Job

Tell = Callable[[str], object]


def compare(
    scenario: Scenario,
    manifest: Manifest,
    flags: Mapping[str, object],
    *,
    folder: Path,
    metrics: Metrics,
    tell: Tell,
) -> Comparison:
    """Run both variants over the manifest's jobs and judge them.

    `flags` choose the model and the device for both. Pictures of the first timed runs stay in
    `folder/A` and `folder/B`. Raises ManifestError for a faulty manifest, UsageError for one whose
    jobs are of several models, and for a flag that a variant sets itself.
    """
    for name in flags:
        if name in scenario.a.settings or name in scenario.b.settings:
            what = f"{name} is what sets the variants of {scenario.name} apart"
            raise UsageError(what, hint=f"leave --{name} and HYIMG_{name.upper()} out")
    for name in ("runs", *VARIANTS):
        with disk_errors(folder):
            refuse_links(folder / name, folder)
    bench = _Bench(scenario, manifest, flags, folder / "runs", metrics, tell)
    try:
        return bench.run()
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)


@dataclass
class _Bench:
    """The state of one comparison while it runs."""

    scenario: Scenario
    manifest: Manifest
    flags: Mapping[str, object]
    scratch: Path
    metrics: Metrics
    tell: Tell
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    load: LoadModel = field(default_factory=shared_models)
    _count: int = 0

    def run(self) -> Comparison:
        scenario = self.scenario
        # They differ in what a job says of itself, where that sets the variants apart.
        both = self._jobs(scenario.a), self._jobs(scenario.b)
        jobs, plain = (_with_steps(own, scenario.main_steps) for own in both)
        configs = self._config(scenario.a), self._config(scenario.b)
        texts = self._decide_texts(configs[0], [job for job in jobs if isinstance(job, ImageJob)])
        with (
            runs_of(scenario.a.lifetime, configs[0], texts, self.load) as a,
            runs_of(scenario.b.lifetime, configs[1], texts, self.load) as b,
        ):
            timed = [self._time_in_turn(a, b, both, steps) for steps in scenario.steps]
            main = next((t for t in timed if t.steps == scenario.main_steps), timed[-1])
            rivals = self._rivals(b, plain, timed) if scenario.least_psnr is not None else {}
        self.tell("measuring distances")
        name, (label, plain_label) = " vs ".join(scenario.labels), scenario.labels
        pairs = {
            t.steps: row(f"{name}, {t.steps} steps", t.a[0], t.b[0], self.metrics) for t in timed
        }
        if scenario.repeats < 2:
            self.notes.append("one run of each variant: their floors are not measured")
        if scenario.repeats < FEWEST_RUNS:
            self.notes.append(f"fewer than {FEWEST_RUNS} runs: the clock was not judged")
        floors = self._floor(label, main.a), self._floor(plain_label, main.b)
        self.tell("control: other seed")
        reseeded = [replace(job, seed=(job.seed + 1) % 2**32) for job in jobs]
        with runs_of("session", configs[0], texts, self.load) as run:
            other = self._run(label, run, reseeded)
        self._keep(main)
        return Comparison(
            scenario=scenario,
            pairs=pairs,
            floors=floors,
            other_seed=row(f"{label}, other seed", main.a[0], other, self.metrics),
            rivals=rivals,
            timed=timed,
            failures=list(dict.fromkeys(self.failures)),
            same_work=() if scenario.same_work else _same_work(main),
            jobs=jobs,
            notes=self.notes,
            kept=self.scratch.parent,
        )

    def _jobs(self, variant: Variant) -> list[Job]:
        settings = self._settings(variant)
        jobs = list(runner.accept(self.manifest, settings)[0])
        notes = without_effect(settings, jobs, runner.cards(settings["revision"].value))
        self.notes += [note for note in notes if note not in self.notes]
        models = sorted({job.model for job in jobs})
        if len(models) != 1:
            what = f"the manifest's jobs are of {len(models)} models: {', '.join(models)}"
            hint = "compare one model at a time"
            raise UsageError(what, where=self.manifest.title, hint=hint, code="bench.models")
        revision, components = settings["revision"].value, settings["video_components"].value
        try:
            for job in (job for steps in self.scenario.steps for job in _with_steps(jobs, steps)):
                registry.check(job, revision, components)
        except JobError as error:
            hint = f"--steps {jobs[0].num_inference_steps} is the model's own"
            raise UsageError(error.what, hint=hint, code="bench.steps") from None
        return jobs

    def _settings(self, variant: Variant) -> dict[str, Setting]:
        # Of the environment only what the flags carry: anything else could undo a variant.
        written = {**self.scenario.common, **variant.settings}
        typed = {name: SETTINGS[name].kind.read(value) for name, value in written.items()}
        return settle(self.flags, {}, typed)

    def _config(self, variant: Variant) -> RunConfig:
        # Without a disk cache: what an earlier bench left there would be a third variant.
        config = build_run_config(self._settings(variant), self.scratch, None)
        # An MP4 loses what a comparison is about.
        return replace(config, output=replace(config.output, frames="png"))

    def _decide_texts(self, config: RunConfig, pictures: Sequence[ImageJob]) -> Texts:
        """The ids that A writes by itself, by job."""
        if not pictures:
            self.notes.append("videos: compared by frames")
            return {}
        label = self.scenario.labels[0]
        self.tell(f"{len(pictures)} jobs; {label} writes the text for both")
        with runs_of("session", config, {}, self.load) as run:
            outcomes = self._run(label, run, pictures).outcomes
        writers = {job.custom_id for job in pictures if job.writes_text}
        return {
            one.custom_id: one.cot_token_ids
            for one in outcomes
            if one.cot_token_ids and one.custom_id in writers
        }

    def _time_in_turn(self, a: Run, b: Run, jobs: Sequence[Sequence[Job]], steps: int) -> Timed:
        """Warm-up apart, then A and B in turn. `jobs`: of each."""
        own = [_with_steps(of_one, steps) for of_one in jobs]
        turn = list(zip(self.scenario.labels, (a, b), own, strict=True))
        for one in turn:
            self._run(*one)
        turns = []
        for repeat in range(self.scenario.repeats):
            self.tell(f"{steps} steps: run {repeat + 1} of {self.scenario.repeats}")
            turns.append([self._run(*one) for one in turn])
        return Timed(steps, *zip(*turns, strict=True))

    def _rivals(
        self, b: Run, jobs: Sequence[Job], timed: Sequence[Timed]
    ) -> dict[int, DistanceRow]:
        """By step count, B with as many steps as A evaluates its model in, against all of them."""
        found, label = {}, self.scenario.labels[1]
        for one in timed:
            full = max(done.step_cache.full for done in one.a[0].outcomes if done.step_cache)
            self.tell(f"controls: {label} in {full} steps")
            fewer = self._run(label, b, _with_steps(jobs, full))
            name = f"{label} in {full} steps, against {one.steps}"
            found[one.steps] = row(name, one.b[0], fewer, self.metrics)
        return found

    def _run(self, label: str, run: Run, jobs: Sequence[Job]) -> RunResult:
        """One run in a folder of its own; what fails in any run is told in the verdict."""
        self._count += 1
        result = run(jobs, self.scratch / f"{self._count:04}")
        self.failures += [f"{label} fails: {text}" for text in result.failures]
        return result

    def _floor(self, label: str, runs: Sequence[RunResult]) -> DistanceRow:
        """The worst of all repetitions against the first; one run has nothing but itself."""
        rows = [row(f"{label} twice", runs[0], other, self.metrics) for other in runs[1:] or runs]
        return min(rows, key=lambda one: one.psnr)

    def _keep(self, main: Timed) -> None:
        """The first timed pictures of both variants, under equal names in `A` and `B`."""
        for side, run in zip(VARIANTS, (main.a[0], main.b[0]), strict=True):
            target = self.scratch.parent / side
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for name, file in output_files(run.folder, by_frame=True).items():
                copy = target / f"{name}{file.suffix}"
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _with_steps(jobs: Sequence[Job], steps: int) -> list[Job]:
    return [replace(job, num_inference_steps=steps) for job in jobs]


def _same_work(timed: Timed) -> tuple[str, ...]:
    """The jobs for which both variants report the same counts: nothing sets them apart there."""
    ours, theirs = (
        {one.custom_id: _counts(one) for one in runs[-1].outcomes} for runs in (timed.a, timed.b)
    )
    same = [name for name in ours if ours[name] == theirs.get(name)]
    # A line's are those until it was written, and the next job may have begun: a run's last ones.
    embedded = [
        [one.cache.get("prompt_embeddings") for one in runs[-1].outcomes[-1:]]
        for runs in (timed.a, timed.b)
    ]
    # Some jobs may have nothing to share; a variant that shares nowhere is none.
    return tuple(same) if len(same) == len(ours) and embedded[0] == embedded[1] else ()


def _counts(outcome: Outcome) -> tuple[object, ...]:
    """The counts of work in a job's line, without its seconds."""
    reuse, spread = outcome.kv_reuse, outcome.parallel
    tokens = None if reuse is None else (reuse.ar_shared_tokens, reuse.branches)
    ranks = 0
    if spread is not None:
        decoding = len(spread.decode.ranks) if spread.decode else 1
        branches = spread.branch_ranks * spread.tensor_ranks
        ranks = max(branches, spread.context_ranks, decoding)
    cache = outcome.step_cache
    full = None if cache is None else (cache.full, cache.estimated)
    return tokens, outcome.batch, ranks, full
