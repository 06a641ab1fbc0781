"""One comparison from scenario to verdict.

1 decide the text     A writes once; its tokens are forced into every run of both variants
2 look through        A and B once each, branches and steps recorded: where do they part?
3 time                per step count: warm-up, then A B A B ..; pictures kept
4 controls            other seed, other text, other source image, the same seed in a new session
5 judge
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from hyimg_cli.batch.configured import configured
from hyimg_cli.batch.manifest import Manifest
from hyimg_cli.batch.recipe import Setting, settle
from hyimg_cli.bench.budget import Measure, Row, row
from hyimg_cli.bench.divergence import Divergence, divergences
from hyimg_cli.bench.observe import Observed
from hyimg_cli.bench.runs import Runs, SessionRuns, Texts, observed_run, runs_of
from hyimg_cli.bench.scenario import Scenario, Variant
from hyimg_cli.bench.verdict import Compared, Timed, Verdict, judge
from hyimg_cli.engine import runner
from hyimg_cli.errors import UsageError
from hyimg_cli.media.images import read_image
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import CacheConfig, RunConfig

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """What was found. `timed` holds the runs themselves; `kept` is where their pictures lie."""

    scenario: Scenario
    jobs: tuple[ImageJob, ...]
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
        found = bench.carry_out()
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    return found


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
    _count: int = 0

    def carry_out(self) -> Comparison:
        scenario = self.scenario
        jobs = self._with_steps(self._jobs(), scenario.main_steps)
        config_a, config_b = self._config(scenario.a), self._config(scenario.b)
        self.tell(f"{len(jobs)} jobs; {scenario.a.label} writes the text for both")
        first, seen = observed_run(config_a, {}, jobs, self._place(), tries_tokens=False)
        texts = seen.texts()
        parted, failures = self._parted(config_a, config_b, texts, jobs)
        runs_a = runs_of(scenario.a.lifetime, config_a, texts)
        runs_b = runs_of(scenario.b.lifetime, config_b, texts)
        timed = [self._timed(runs_a, runs_b, jobs, steps) for steps in scenario.steps]
        pairs, floors = self._rows_of(timed)
        own = self._controls(config_a, jobs, texts, seen)
        swaps = self._swaps(runs_a, runs_b, jobs, timed)
        failures += [f for t in timed for run in (*t.a, *t.b) for f in run.failures]
        failures += first.failures
        compared = Compared(
            pairs=pairs,
            floors=floors,
            other_seed=own.get("other seed"),
            swaps=swaps,
            divergences=parted,
            failures=list(dict.fromkeys(failures)),
            timed=timed,
        )
        rows = (*floors, *pairs.values(), *own.values(), *swaps.values())
        self._keep(timed)
        return Comparison(
            scenario=scenario,
            jobs=tuple(jobs),
            verdict=judge(compared, scenario),
            compared=compared,
            rows=rows,
            notes=tuple(self.notes),
            kept=self.scratch.parent,
        )

    def _jobs(self) -> list[ImageJob]:
        jobs = list(runner.accept(self.manifest, self._settings(self.scenario.a)).jobs)
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
        return configured(self._settings(variant), self.scratch, CacheConfig())

    def _parted(
        self, config_a: RunConfig, config_b: RunConfig, texts: Texts, jobs: Sequence[ImageJob]
    ) -> tuple[list[Divergence], list[str]]:
        """Where the variants part in runs that are looked through, and jobs that failed in them."""
        self.tell("looking through one run of each")
        run_a, seen_a = observed_run(config_a, texts, jobs, self._place())
        run_b, seen_b = observed_run(config_b, texts, jobs, self._place())
        labels = self.scenario.a.label, self.scenario.b.label
        found = [
            one
            for name, job in seen_a.jobs.items()
            if name in seen_b.jobs
            for one in divergences(job, seen_b.jobs[name], labels)
        ]
        by_label = zip(labels, (run_a, run_b), strict=True)
        return found, [f"{label} fails: {text}" for label, run in by_label for text in run.failures]

    def _timed(self, a: Runs, b: Runs, jobs: Sequence[ImageJob], steps: int) -> Timed:
        """Warm-up apart, then A and B in turn."""
        of_steps = self._with_steps(jobs, steps)
        for runs in (a, b):
            runs.run(of_steps, self._place())
        ours, theirs = [], []
        for repeat in range(self.scenario.repeats):
            self.tell(f"{steps} steps: run {repeat + 1} of {self.scenario.repeats}")
            ours.append(a.run(of_steps, self._place()))
            theirs.append(b.run(of_steps, self._place()))
        return Timed(steps, tuple(ours), tuple(theirs))

    def _rows_of(self, timed: Sequence[Timed]) -> tuple[dict[int, Row], list[Row]]:
        """By step count A against B; at the main one each variant against itself."""
        a, b = self.scenario.a.label, self.scenario.b.label
        self.tell("measuring distances")
        pairs = {
            t.steps: row(f"{a} vs {b}, {t.steps} steps", t.a[0], t.b[0], self.measure)
            for t in timed
        }
        main = self._main(timed)
        floors = []
        for label, runs in ((a, main.a), (b, main.b)):
            if len(runs) < 2:
                self.notes.append(f"one run of {label}: its floor is not measured")
                continue
            # The worst of all repetitions against the first.
            rows = [row(f"{label} twice", runs[0], other, self.measure) for other in runs[1:]]
            floors.append(min(rows, key=lambda one: one.psnr))
        return pairs, floors

    def _controls(
        self, config: RunConfig, jobs: Sequence[ImageJob], texts: Texts, seen: Observed
    ) -> dict[str, Row]:
        """What A does with the same seed in a new session, another seed, and another text."""
        self.tell("controls: same seed, other seed, other text")
        label = self.scenario.a.label
        base = SessionRuns(config, texts).run(jobs, self._place())
        rows = {}
        again = SessionRuns(config, texts)
        name = f"{label}, same seed twice, new session"
        rows["same seed"] = row(name, base, again.run(jobs, self._place()), self.measure)
        other = [replace(job, seed=(job.seed + 1) % 2**32) for job in jobs]
        run = again.run(other, self._place())
        rows["other seed"] = row(f"{label}, other seed", base, run, self.measure)
        swapped = _texts_swapped(jobs, texts)
        if swapped:
            those = [job for job in jobs if job.custom_id in swapped]
            run = SessionRuns(config, {**texts, **swapped}).run(those, self._place())
            note = "each job with the text of another of its kind"
            rows["other text"] = row(f"{label}, different AR ids", base, run, self.measure, note)
        else:
            self.notes.append("different AR ids: no two jobs of one kind wrote different text")
        return rows

    def _swaps(
        self, a: Runs, b: Runs, jobs: Sequence[ImageJob], timed: Sequence[Timed]
    ) -> dict[str, Row]:
        """Each variant with every source image turned into its negative, same text, same noise."""
        edits = [job for job in jobs if job.images]
        if not edits:
            self.notes.append("no job has a source image: nothing to swap")
            return {}
        self.tell("controls: other source images")
        changed = [replace(job, images=tuple(self._negatives(job))) for job in edits]
        main = self._main(timed)
        rows = {}
        for label, runs, own in (
            (self.scenario.a.label, a, main.a[0]),
            (self.scenario.b.label, b, main.b[0]),
        ):
            run = runs.run(self._with_steps(changed, main.steps), self._place())
            rows[label] = row(f"{label}, other source image", own, run, self.measure)
        return rows

    def _negatives(self, job: ImageJob) -> list[str]:
        paths = []
        for number, path in enumerate(job.images):
            pixels = 255 - read_image(Path(path)).pixels
            target = self.scratch / "negatives" / f"{job.custom_id}-{number}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(pixels)).save(target)
            paths.append(str(target))
        return paths

    def _main(self, timed: Sequence[Timed]) -> Timed:
        return next((t for t in timed if t.steps == self.scenario.main_steps), timed[-1])

    def _with_steps(self, jobs: Sequence[ImageJob], steps: int) -> list[ImageJob]:
        return [replace(job, num_inference_steps=steps) for job in jobs]

    def _keep(self, timed: Sequence[Timed]) -> None:
        """The first timed pictures of both variants, under equal names in `A` and `B`."""
        main = self._main(timed)
        for side, run in (("A", main.a[0]), ("B", main.b[0])):
            target = self.scratch.parent / side
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for outcome in run.outcomes:
                for output in outcome.outputs:
                    file = run.folder / output.path
                    shutil.copyfile(file, target / file.name)

    def _place(self) -> Path:
        self._count += 1
        return self.scratch / f"{self._count:04}"


def _texts_swapped(jobs: Sequence[ImageJob], texts: Texts) -> dict[str, Sequence[int]]:
    """For each job the text of another of the same kind that wrote something else."""
    swapped: dict[str, Sequence[int]] = {}
    for job in jobs:
        for other in jobs:
            is_kin = (job.task, job.bot_task, job.size) == (other.task, other.bot_task, other.size)
            own, theirs = texts.get(job.custom_id), texts.get(other.custom_id)
            if is_kin and own and theirs and own != theirs:
                swapped[job.custom_id] = theirs
                break
    return swapped
