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
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.measure.bench.budget import Measure, Row, picture_files, row
from hyimg_cli.measure.bench.controls import (
    LookedThrough,
    looked_through,
    same_work,
    texts_of_others,
    with_negatives,
)
from hyimg_cli.measure.bench.runs import RunResult, Runs, SessionRuns, runs_of
from hyimg_cli.measure.bench.scenario import Scenario, Variant
from hyimg_cli.measure.bench.shared import SharedModels
from hyimg_cli.measure.bench.verdict import FEWEST_RUNS, Compared, Timed, Verdict, judge
from hyimg_cli.settings.config import configured
from hyimg_cli.settings.precedence import Setting, settle
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.run import RunConfig

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """What was found. `timed` holds the runs themselves; `kept` is where their pictures lie."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    verdict: Verdict
    compared: Compared
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    kept: Path

    @property
    def timed(self) -> Sequence[Timed]:
        return self.compared.timed


def compare(
    scenario: Scenario,
    manifest: Manifest,
    flags: Mapping[str, object],
    *,
    folder: Path,
    measure: Measure,
    tell: Tell,
) -> Comparison:
    """Run both variants over the manifest's jobs and judge them.

    `flags` choose the model and the device for both. Pictures of the first timed runs stay in
    `folder/A` and `folder/B`. Raises ManifestError for a faulty manifest, UsageError for one whose
    jobs are of several models, and for a flag that a variant sets itself.
    """
    _refuse_to_undo(scenario, flags)
    bench = _Bench(scenario, manifest, flags, folder / "runs", measure, tell)
    try:
        return bench.carry_out()
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)


def _refuse_to_undo(scenario: Scenario, flags: Mapping[str, object]) -> None:
    for name in flags:
        if name in scenario.a.settings or name in scenario.b.settings:
            what = f"{name} is what sets the variants of {scenario.name} apart"
            raise UsageError(what, hint=f"leave --{name} and HYIMG_{name.upper()} out")


@dataclass
class _Bench:
    """The state of one comparison while it runs."""

    scenario: Scenario
    manifest: Manifest
    flags: Mapping[str, object]
    scratch: Path
    measure: Measure
    tell: Tell
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    models: SharedModels = field(default_factory=SharedModels)
    _count: int = 0

    def carry_out(self) -> Comparison:
        scenario = self.scenario
        jobs = _with_steps(self._jobs(), scenario.main_steps)
        configs = self._config(scenario.a), self._config(scenario.b)
        looked = self._looked_through(configs, [job for job in jobs if isinstance(job, ImageJob)])
        with (
            runs_of(scenario.a.lifetime, configs[0], looked.texts, self.models) as a,
            runs_of(scenario.b.lifetime, configs[1], looked.texts, self.models) as b,
        ):
            timed = [self._timed(a, b, jobs, steps) for steps in scenario.steps]
            main = self._main(timed)
            swaps = self._swaps(a, b, jobs, main)
        pairs, floors = self._rows_of(timed, main)
        own = self._controls(configs[0], jobs, looked, main.a[0])
        compared = Compared(
            pairs=pairs,
            floors=floors,
            other_seed=own.get("other seed"),
            swaps=swaps,
            divergences=looked.divergences,
            failures=list(dict.fromkeys([*looked.failures, *self.failures])),
            timed=timed,
            same_work=() if scenario.same_work else same_work(main),
        )
        self._keep(main)
        return Comparison(
            scenario=scenario,
            jobs=tuple(jobs),
            verdict=judge(compared, scenario),
            compared=compared,
            rows=(*floors, *pairs.values(), *own.values(), *swaps.values()),
            notes=tuple(self.notes),
            kept=self.scratch.parent,
        )

    @property
    def _labels(self) -> tuple[str, str]:
        return self.scenario.a.label, self.scenario.b.label

    def _jobs(self) -> list[Job]:
        settings = self._settings(self.scenario.a)
        jobs = list(runner.accept(self.manifest, settings).jobs)
        self.notes += without_effect(settings, jobs)
        models = sorted({job.model for job in jobs})
        if len(models) != 1:
            what = f"the manifest's jobs are of {len(models)} models: {', '.join(models)}"
            hint = "compare one model at a time"
            raise UsageError(what, where=self.manifest.title, hint=hint, code="bench.models")
        return jobs

    def _settings(self, variant: Variant) -> dict[str, Setting]:
        # Of the environment only what the flags carry: anything else could undo a variant.
        return settle(self.flags, {}, {**self.scenario.common, **variant.settings})

    def _config(self, variant: Variant) -> RunConfig:
        # Without a disk cache: what an earlier bench left there would be a third variant.
        config = configured(self._settings(variant), self.scratch, None)
        # A film loses what a comparison is about.
        return replace(config, output=replace(config.output, frames="png"))

    def _looked_through(
        self, configs: tuple[RunConfig, RunConfig], pictures: Sequence[ImageJob]
    ) -> LookedThrough:
        if not pictures:
            self.notes.append("videos: compared by frames; what is before them is not looked at")
            return LookedThrough({})
        self.tell(f"{len(pictures)} jobs; {self._labels[0]} writes the text for both")
        return looked_through(configs, self._labels, pictures, self._place, self.models)

    def _timed(self, a: Runs, b: Runs, jobs: Sequence[Job], steps: int) -> Timed:
        """Warm-up apart, then A and B in turn."""
        of_steps = _with_steps(jobs, steps)
        for runs in (a, b):
            self._run(runs, of_steps)
        ours, theirs = [], []
        for repeat in range(self.scenario.repeats):
            self.tell(f"{steps} steps: run {repeat + 1} of {self.scenario.repeats}")
            ours.append(self._run(a, of_steps))
            theirs.append(self._run(b, of_steps))
        return Timed(steps, tuple(ours), tuple(theirs))

    def _run(self, runs: Runs, jobs: Sequence[Job]) -> RunResult:
        """One run in a place of its own; what fails in any run is told in the verdict."""
        result = runs.run(jobs, self._place())
        self.failures += result.failures
        return result

    def _rows_of(
        self, timed: Sequence[Timed], main: Timed
    ) -> tuple[dict[int, Row], tuple[Row, Row]]:
        """By step count A against B; at the main one each variant against itself."""
        self.tell("measuring distances")
        name = " vs ".join(self._labels)
        pairs = {
            t.steps: row(f"{name}, {t.steps} steps", t.a[0], t.b[0], self.measure) for t in timed
        }
        floors = []
        for label, runs in zip(self._labels, (main.a, main.b), strict=True):
            # One run has nothing but itself; else the worst of all repetitions against the first.
            others = runs[1:] or runs
            rows = [row(f"{label} twice", runs[0], other, self.measure) for other in others]
            floors.append(min(rows, key=lambda one: one.psnr))
        if self.scenario.repeats < 2:
            self.notes.append("one run of each variant: their floors are not measured")
        if self.scenario.repeats < FEWEST_RUNS:
            self.notes.append(f"fewer than {FEWEST_RUNS} runs: the clock was not judged")
        return pairs, (floors[0], floors[1])

    def _controls(
        self, config: RunConfig, jobs: Sequence[Job], looked: LookedThrough, base: RunResult
    ) -> dict[str, Row]:
        """What A does with the same seed in a new session, another seed, and another text, against
        its own timed run `base`.
        """
        self.tell("controls: same seed, other seed, other text")
        label, texts = self._labels[0], looked.texts
        other = [replace(job, seed=(job.seed + 1) % 2**32) for job in jobs]
        with SessionRuns(config, texts, self.models) as again:
            same, differing = self._run(again, jobs), self._run(again, other)
        name = f"{label}, same seed twice, new session"
        rows = {
            "same seed": row(name, base, same, self.measure),
            "other seed": row(f"{label}, other seed", base, differing, self.measure),
        }
        swapped = texts_of_others([job for job in jobs if isinstance(job, ImageJob)], texts)
        if swapped:
            those = [job for job in jobs if job.custom_id in swapped]
            with SessionRuns(config, {**texts, **swapped}, self.models) as runs:
                run = self._run(runs, those)
            note = "each job with the text of another of its kind"
            rows["other text"] = row(f"{label}, different AR ids", base, run, self.measure, note)
        else:
            self.notes.append("different AR ids: no two jobs of one kind wrote different text")
        return rows

    def _swaps(self, a: Runs, b: Runs, jobs: Sequence[Job], main: Timed) -> dict[str, Row]:
        """Each variant with every source image turned into its negative, same text, same noise."""
        edits = [job for job in jobs if isinstance(job, ImageJob) and job.images]
        if not edits:
            self.notes.append("no job has a source image: nothing to swap")
            return {}
        self.tell("controls: other source images")
        changed = _with_steps(with_negatives(edits, self.scratch / "negatives"), main.steps)
        rows = {}
        for label, runs, own in zip(self._labels, (a, b), (main.a[0], main.b[0]), strict=True):
            run = self._run(runs, changed)
            rows[label] = row(f"{label}, other source image", own, run, self.measure)
        return rows

    def _main(self, timed: Sequence[Timed]) -> Timed:
        return next((t for t in timed if t.steps == self.scenario.main_steps), timed[-1])

    def _keep(self, main: Timed) -> None:
        """The first timed pictures of both variants, under equal names in `A` and `B`."""
        for side, run in (("A", main.a[0]), ("B", main.b[0])):
            target = self.scratch.parent / side
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for name, file in picture_files(run).items():
                shutil.copyfile(file, target / f"{name}.png")

    def _place(self) -> Path:
        self._count += 1
        return self.scratch / f"{self._count:04}"


def _with_steps(jobs: Sequence[Job], steps: int) -> list[Job]:
    return [replace(job, num_inference_steps=steps) for job in jobs]
