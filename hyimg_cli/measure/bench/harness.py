"""One comparison from scenario to verdict.

    1 decide the text     A writes once; its tokens are forced into every run of both variants
    2 look through        A and B once each, branches and steps recorded: where do they part?
    3 time                per step count: warm-up, then A B A B ..; pictures kept
    4 controls            other seed, other text, other source image, the same seed in a new session
    5 judge

Videos have no text stage and no source images: they take steps 3 to 5, frame by frame.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hyimg_cli.engine import runner
from hyimg_cli.errors import JobError, UsageError
from hyimg_cli.journal.past_run import output_files
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.measure.bench.budget import DistanceRow, Metrics, row
from hyimg_cli.measure.bench.controls import (
    LookedThrough,
    looked_through,
    same_work,
    texts_of_others,
    with_negatives,
)
from hyimg_cli.measure.bench.runs import Run, RunResult, runs_of, shared_models
from hyimg_cli.measure.bench.scenario import Scenario, Variant
from hyimg_cli.measure.bench.verdict import FEWEST_RUNS, Comparison, Timed
from hyimg_cli.measure.pairs import VARIANTS
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.pipeline import LoadModel
from hyimg_cli.settings.config import configured
from hyimg_cli.settings.precedence import Setting, settle
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.run import RunConfig

Tell = Callable[[str], None]


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
    bench = _Bench(scenario, manifest, flags, folder / "runs", metrics, tell)
    try:
        return bench.carry_out()
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

    def carry_out(self) -> Comparison:
        scenario = self.scenario
        # They differ in what a job says of itself, where that sets the variants apart.
        both = self._jobs(scenario.a), self._jobs(scenario.b)
        jobs, plain = (_with_steps(own, scenario.main_steps) for own in both)
        configs = self._config(scenario.a), self._config(scenario.b)
        looked = self._looked_through(configs, (_pictures(jobs), _pictures(plain)))
        with (
            runs_of(scenario.a.lifetime, configs[0], looked.texts, self.load) as a,
            runs_of(scenario.b.lifetime, configs[1], looked.texts, self.load) as b,
        ):
            timed = [self._timed(a, b, both, steps) for steps in scenario.steps]
            main = next((t for t in timed if t.steps == scenario.main_steps), timed[-1])
            swaps = self._swaps((a, b), (jobs, plain), main)
            rivals = self._rivals(b, plain, timed) if scenario.least_psnr is not None else {}
        pairs, floors = self._rows_of(timed, main)
        controls = self._controls(configs[0], jobs, looked, main.a[0])
        self._keep(main)
        return Comparison(
            scenario=scenario,
            pairs=pairs,
            floors=floors,
            controls=controls,
            swaps=swaps,
            rivals=rivals,
            timed=timed,
            divergences=looked.divergences,
            failures=list(dict.fromkeys([*looked.failures, *self.failures])),
            same_work=() if scenario.same_work else same_work(main),
            jobs=jobs,
            notes=self.notes,
            kept=self.scratch.parent,
        )

    @property
    def _labels(self) -> tuple[str, str]:
        return self.scenario.a.label, self.scenario.b.label

    def _jobs(self, variant: Variant) -> list[Job]:
        settings = self._settings(variant)
        jobs = list(runner.accept(self.manifest, settings).jobs)
        told = [note for note in without_effect(settings, jobs) if note not in self.notes]
        self.notes += told
        models = sorted({job.model for job in jobs})
        if len(models) != 1:
            what = f"the manifest's jobs are of {len(models)} models: {', '.join(models)}"
            hint = "compare one model at a time"
            raise UsageError(what, where=self.manifest.title, hint=hint, code="bench.models")
        self._refuse_steps(jobs, settings)
        return jobs

    def _refuse_steps(self, jobs: Sequence[Job], settings: Mapping[str, Setting]) -> None:
        """Passes numbers of steps that the jobs' model can take. Raises UsageError."""
        for steps in self.scenario.steps:
            for job in _with_steps(jobs, steps):
                try:
                    registry.check(
                        job, settings["revision"].value, settings["video_components"].value
                    )
                except JobError as error:
                    hint = f"--steps {jobs[0].num_inference_steps} is the model's own"
                    raise UsageError(error.what, hint=hint, code="bench.steps") from None

    def _settings(self, variant: Variant) -> dict[str, Setting]:
        # Of the environment only what the flags carry: anything else could undo a variant.
        written = {**self.scenario.common, **variant.settings}
        typed = {name: SETTINGS[name].kind.read(value) for name, value in written.items()}
        return settle(self.flags, {}, typed)

    def _config(self, variant: Variant) -> RunConfig:
        # Without a disk cache: what an earlier bench left there would be a third variant.
        config = configured(self._settings(variant), self.scratch, None)
        # An MP4 loses what a comparison is about.
        return replace(config, output=replace(config.output, frames="png"))

    def _looked_through(
        self, configs: tuple[RunConfig, RunConfig], pictures: Sequence[Sequence[ImageJob]]
    ) -> LookedThrough:
        if not pictures[0]:
            self.notes.append("videos: compared by frames; what is before them is not looked at")
            return LookedThrough({})
        self.tell(f"{len(pictures[0])} jobs; {self._labels[0]} writes the text for both")
        is_lossy = self.scenario.least_psnr is not None
        return looked_through(
            configs, self._labels, pictures, self._place, self.load, is_lossy=is_lossy
        )

    def _timed(self, a: Run, b: Run, jobs: Sequence[Sequence[Job]], steps: int) -> Timed:
        """Warm-up apart, then A and B in turn. `jobs`: of each."""
        turn = [(run, _with_steps(own, steps)) for run, own in zip((a, b), jobs, strict=True)]
        for run, own in turn:
            self._run(run, own)
        turns = []
        for repeat in range(self.scenario.repeats):
            self.tell(f"{steps} steps: run {repeat + 1} of {self.scenario.repeats}")
            turns.append([self._run(run, own) for run, own in turn])
        return Timed(steps, *zip(*turns, strict=True))

    def _rivals(
        self, b: Run, jobs: Sequence[Job], timed: Sequence[Timed]
    ) -> dict[int, DistanceRow]:
        """By step count, B with as many steps as A evaluates its model in, against all of them."""
        found = {}
        for one in timed:
            full = max(
                outcome.step_cache.full for outcome in one.a[0].outcomes if outcome.step_cache
            )
            self.tell(f"controls: {self._labels[1]} in {full} steps")
            fewer = self._run(b, _with_steps(jobs, full))
            name = f"{self._labels[1]} in {full} steps, against {one.steps}"
            found[one.steps] = self._row(name, one.b[0], fewer, "as many full steps as A has")
        return found

    def _run(self, run: Run, jobs: Sequence[Job]) -> RunResult:
        """One run in a place of its own; what fails in any run is told in the verdict."""
        result = run(jobs, self._place())
        self.failures += result.failures
        return result

    def _row(self, name: str, one: RunResult, other: RunResult, note: str = "") -> DistanceRow:
        return row(name, one, other, self.metrics, note)

    def _rows_of(
        self, timed: Sequence[Timed], main: Timed
    ) -> tuple[dict[int, DistanceRow], tuple[DistanceRow, DistanceRow]]:
        """By step count A against B; at the main one each variant against itself."""
        self.tell("measuring distances")
        name = " vs ".join(self._labels)
        pairs = {t.steps: self._row(f"{name}, {t.steps} steps", t.a[0], t.b[0]) for t in timed}
        if self.scenario.repeats < 2:
            self.notes.append("one run of each variant: their floors are not measured")
        if self.scenario.repeats < FEWEST_RUNS:
            self.notes.append(f"fewer than {FEWEST_RUNS} runs: the clock was not judged")
        return pairs, (self._floor(self._labels[0], main.a), self._floor(self._labels[1], main.b))

    def _floor(self, label: str, runs: Sequence[RunResult]) -> DistanceRow:
        """The worst of all repetitions against the first; one run has nothing but itself."""
        rows = [self._row(f"{label} twice", runs[0], other) for other in runs[1:] or runs]
        return min(rows, key=lambda one: one.psnr)

    def _controls(
        self, config: RunConfig, jobs: Sequence[Job], looked: LookedThrough, base: RunResult
    ) -> dict[str, DistanceRow]:
        """A with the same seed in a new session, another seed, and another text, against its own
        timed run `base`.
        """
        self.tell("controls: same seed, other seed, other text")
        label, texts = self._labels[0], looked.texts
        reseeded = [replace(job, seed=(job.seed + 1) % 2**32) for job in jobs]
        with runs_of("session", config, texts, self.load) as again:
            same, differing = self._run(again, jobs), self._run(again, reseeded)
        rows = {
            "same seed": self._row(f"{label}, same seed twice, new session", base, same),
            "other seed": self._row(f"{label}, other seed", base, differing),
        }
        swapped = texts_of_others(_pictures(jobs), texts)
        if not swapped:
            self.notes.append("different AR ids: no two jobs of one kind wrote different text")
            return rows
        with runs_of("session", config, {**texts, **swapped}, self.load) as swapping:
            other = self._run(swapping, [job for job in jobs if job.custom_id in swapped])
        note = "each job with the text of another of its kind"
        return {**rows, "other text": self._row(f"{label}, different AR ids", base, other, note)}

    def _swaps(
        self, both: tuple[Run, Run], jobs: Sequence[Sequence[Job]], main: Timed
    ) -> dict[str, DistanceRow]:
        """Each variant with every source image turned into its negative, same text, same noise."""
        edits = [[job for job in _pictures(own) if job.images] for own in jobs]
        if not edits[0]:
            self.notes.append("no job has a source image: nothing to swap")
            return {}
        self.tell("controls: other source images")
        folder, bases = self.scratch / "negatives", (main.a[0], main.b[0])
        changed = [_with_steps(with_negatives(own, folder), main.steps) for own in edits]
        return {
            label: self._row(f"{label}, other source image", base, self._run(run, own))
            for label, run, base, own in zip(self._labels, both, bases, changed, strict=True)
        }

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

    def _place(self) -> Path:
        self._count += 1
        return self.scratch / f"{self._count:04}"


def _pictures(jobs: Sequence[Job]) -> list[ImageJob]:
    return [job for job in jobs if isinstance(job, ImageJob)]


def _with_steps(jobs: Sequence[Job], steps: int) -> list[Job]:
    return [replace(job, num_inference_steps=steps) for job in jobs]
