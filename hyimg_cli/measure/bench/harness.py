"""One comparison from scenario to verdict.

    1 decide the text     A writes once; its tokens are forced into every run of all variants
    2 time                per step count: warm-up, then A B A B ..; pictures kept
    3 control             other seed
    4 judge

Videos have no text stage: they take steps 2 to 4, frame by frame.
"""

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from hyimg_cli.engine import runner
from hyimg_cli.errors import JobError, UsageError
from hyimg_cli.files import refuse_links
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.past_run import output_files
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.measure.bench.budget import DistanceRow, Metrics, row
from hyimg_cli.measure.bench.duration import TimeLeft, of_bench, of_plan
from hyimg_cli.measure.bench.runs import Run, RunResult, Texts, load_model, runs_of
from hyimg_cli.measure.bench.scenario import Scenario, Variant
from hyimg_cli.measure.bench.verdict import FEWEST_RUNS, Comparison, Findings, Timed
from hyimg_cli.measure.pairs import VARIANTS
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.pipeline import LoadModel
from hyimg_cli.settings.config import Setting, build_run_config, settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.units import counted

Tell = Callable[[str], object]
# The folder of the runs during the comparison.
_RUNS = "runs"


@dataclass
class Bench:
    """A comparison of all variants over the manifest's jobs, every two of them.

    `flags` choose the model and the device for all. Pictures of the first timed runs stay in
    `folder/A`, `folder/B` and so on. The time it takes is estimated from `earlier` contents of
    bench.json, else from the rates kept in the disk cache `cache`.
    """

    scenario: Scenario
    manifest: Manifest
    flags: Mapping[str, object]
    folder: Path
    metrics: Metrics
    tell: Tell
    earlier: Sequence[Mapping[str, Any]] = ()
    cache: Path | None = None
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    # Each model is loaded once for all sessions, one of which works at a time. At the real size,
    # loading takes minutes, and two copies do not fit.
    load: LoadModel = field(default_factory=functools.partial(functools.cache, load_model))
    left: TimeLeft = field(default_factory=lambda: TimeLeft([], {}))
    _numbers: Iterator[int] = field(default_factory=functools.partial(count, 1))

    def run(self) -> Findings:
        """Run all variants and judge every two of them.

        Raises ManifestError for a faulty manifest, UsageError for one whose jobs are of several
        models, and for a flag that a variant sets itself.
        """
        for name in self.flags:
            if any(name in one.settings for one in self.scenario.variants):
                what = f"{name} cannot be set: the variants of {self.scenario.name} differ in it"
                raise UsageError(what, hint=f"remove --{name} and HYIMG_{name.upper()}")
        for name in (_RUNS, *VARIANTS):
            with disk_errors(self.folder):
                refuse_links(self.folder / name, self.folder)
        try:
            return self._found()
        finally:
            shutil.rmtree(self.folder / _RUNS, ignore_errors=True)

    def _found(self) -> Findings:
        scenario = self.scenario
        # Variants may differ in settings of a job.
        jobs = [self._jobs(variant) for variant in scenario.variants]
        at_main = [self._with_steps(own, scenario.main_steps) for own in jobs]
        configs = [self._config(variant) for variant in scenario.variants]
        pictures = [job for job in at_main[0] if isinstance(job, ImageJob)]
        self.left = self._estimate(at_main)
        # A variant that skips steps must be nearer than as many full steps alone.
        skips = "step_cache" in scenario.variants[0].settings
        every, control = scenario.labels, (scenario.labels[0], scenario.main_steps)
        in_turn = [(one, n) for n in scenario.steps for one in every * (scenario.repeats + 1)]
        fewer_steps = [(every[-1], n) for n in scenario.steps] if skips else []
        self.left.ahead = [*([control] if pictures else ()), *in_turn, *fewer_steps, control]
        what = f"{len(configs)} variants, {counted(len(jobs[0]), 'job')}, "
        what += f"{', '.join(map(str, scenario.steps))} steps"
        self.tell(f"{what}: {len(self.left.ahead)} runs, {self.left}")
        texts = self._decide_texts(configs[0], pictures)
        with ExitStack() as opened:
            runs = []
            for one, config in zip(scenario.variants, configs, strict=True):
                run = runs_of(one.lifetime, config, texts, self.load, keeps_kv=one.keeps_kv)
                runs.append(opened.enter_context(run))
            timed = {steps: self._time_in_turn(runs, jobs, steps) for steps in scenario.steps}
            rivals = self._rivals(runs[-1], jobs[-1], timed) if skips else {}
        main = timed.get(scenario.main_steps, timed[scenario.steps[-1]])
        self.tell(f"control: other seed; {self.left}")
        reseeded = [replace(job, seed=(job.seed + 1) % 2**32) for job in at_main[0]]
        with runs_of("session", configs[0], texts, self.load) as first:
            other = self._run(0, first, reseeded)
        self.tell("measuring distances")
        if scenario.repeats < 2:
            self.notes.append("one run of each variant: their floors are not measured")
        if scenario.repeats < FEWEST_RUNS:
            self.notes.append(f"fewer than {FEWEST_RUNS} runs: times were not judged")
        floors = [*map(self._floor, scenario.labels, main)]
        other_seed = row(f"{scenario.labels[0]}, other seed", main[0][0], other, self.metrics)
        self._keep(main)
        comparisons = []
        for pair in scenario.pairs:
            a, b = map(scenario.labels.index, pair.labels)
            # With one step it does not matter whether K/V are kept.
            is_judged = not scenario.same_work and (a == 0 or scenario.main_steps > 1)
            found = Comparison(
                scenario=pair,
                pairs={
                    n: row(f"{pair.title}, {n} steps", turns[a][0], turns[b][0], self.metrics)
                    for n, turns in timed.items()
                },
                floors=(floors[a], floors[b]),
                other_seed=other_seed,
                rivals=rivals,
                timed=[Timed(n, turns[a], turns[b]) for n, turns in timed.items()],
                failures=list(dict.fromkeys(self.failures)),
                same_work=_same_work(main[a][-1], main[b][-1]) if is_judged else (),
            )
            comparisons.append(found)
        return Findings(scenario, comparisons, jobs[0], self.notes, self.folder)

    def _estimate(self, at_main: Sequence[Sequence[Job]]) -> TimeLeft:
        """Estimate the time of each run before the first: by an earlier bench, else by the plan."""
        found = (of_bench(one, self.scenario, at_main[0]) for one in self.earlier)
        config = build_run_config(settle(self.flags, {}, {}), self.folder / _RUNS, self.cache)
        return next(filter(None, found), None) or of_plan(self.scenario, at_main, config)

    def _jobs(self, variant: Variant) -> list[Job]:
        settings = self._settings(variant)
        jobs = list(runner.accept(self.manifest, settings)[0])
        notes = runner.remarks(settings, jobs)
        self.notes += [note for note in notes if note not in self.notes]
        models = sorted({job.model for job in jobs})
        if len(models) != 1:
            what = f"the manifest has jobs for {len(models)} models: {', '.join(models)}"
            hint = "compare one model at a time"
            raise UsageError(what, where=self.manifest.title, hint=hint, code="bench.models")
        revision, components = settings["revision"].value, settings["video_components"].value
        try:
            for job in (job for n in self.scenario.steps for job in self._with_steps(jobs, n)):
                registry.check(job, revision, components)
        except JobError as error:
            hint = f"--steps {jobs[0].num_inference_steps} is the model's own"
            raise UsageError(error.what, hint=hint, code="bench.steps") from None
        return jobs

    def _settings(self, variant: Variant) -> dict[str, Setting]:
        # Environment variables count only as far as `flags` contains them: others could undo a
        # variant.
        written = {**self.scenario.common, **variant.settings}
        typed = {name: SETTINGS[name].kind.read(value) for name, value in written.items()}
        return settle(self.flags, {}, typed)

    def _config(self, variant: Variant) -> RunConfig:
        # Without a disk cache: entries from an earlier bench would act as a third variant.
        config = build_run_config(self._settings(variant), self.folder / _RUNS, None)
        # An MP4 loses detail that the comparison needs.
        return replace(config, output=replace(config.output, frames="png"))

    def _decide_texts(self, config: RunConfig, pictures: Sequence[ImageJob]) -> Texts:
        """Return the token ids that A writes without forcing, by job."""
        if not pictures:
            self.notes.append("videos: compared by frames")
            return {}
        self.tell(f"{self.scenario.labels[0]} writes the text for all")
        with runs_of("session", config, {}, self.load) as run:
            outcomes = self._run(0, run, pictures).outcomes
        ids = {one.custom_id: one.cot_token_ids or () for one in outcomes}
        return {job.custom_id: ids[job.custom_id] for job in pictures if job.writes_text}

    def _time_in_turn(
        self, runs: Sequence[Run], jobs: Sequence[Sequence[Job]], steps: int
    ) -> tuple[tuple[RunResult, ...], ...]:
        """Run all variants in turn after a warm-up; return the timed runs by variant."""
        turns = []
        for repeat in range(self.scenario.repeats + 1):
            at = f"run {repeat} of {self.scenario.repeats}" if repeat else "warm-up"
            self.tell(f"{steps} steps: {at}; {self.left}")
            turn = enumerate(zip(runs, jobs, strict=True))
            turns.append(
                [self._run(n, run, self._with_steps(own, steps)) for n, (run, own) in turn]
            )
        return tuple(zip(*turns[1:], strict=True))

    def _rivals(
        self, b: Run, jobs: Sequence[Job], timed: Mapping[int, Sequence[Sequence[RunResult]]]
    ) -> dict[int, DistanceRow]:
        """Compare B in as few steps as A evaluates with B in all steps, by step count."""
        found, label = {}, self.scenario.labels[-1]
        for steps, (a, plain) in timed.items():
            full = max(done.step_cache.full for done in a[0].outcomes if done.step_cache)
            self.tell(f"control: {label} in {full} steps; {self.left}")
            fewer = self._run(len(self.scenario.labels) - 1, b, self._with_steps(jobs, full))
            name = f"{label} in {full} steps, against {steps}"
            found[steps] = row(name, plain[0], fewer, self.metrics)
        return found

    def _run(self, number: int, run: Run, jobs: Sequence[Job]) -> RunResult:
        """Run once, in a folder of its own; the verdict reports jobs that fail in any run."""
        result = run(jobs, self.folder / _RUNS / f"{next(self._numbers):04}")
        variant = self.scenario.variants[number]
        self.left.end_run(variant.lifetime, result)
        self.failures += [f"{variant.label} fails: {one}" for one in result.failures]
        return result

    def _with_steps(self, jobs: Sequence[Job], steps: int) -> list[Job]:
        less = self.scenario.uneven_steps and steps > 1
        return [
            replace(job, num_inference_steps=steps - less * (n % 2)) for n, job in enumerate(jobs)
        ]

    def _floor(self, label: str, runs: Sequence[RunResult]) -> DistanceRow:
        """Compare all repetitions with the first and return the worst; a single run with itself."""
        rows = [row(f"{label} twice", runs[0], other, self.metrics) for other in runs[1:] or runs]
        return min(rows, key=lambda one: one.psnr)

    def _keep(self, main: Sequence[Sequence[RunResult]]) -> None:
        """Keep the first timed pictures of each variant, under equal names in `A`, `B`, …."""
        for side in VARIANTS:
            shutil.rmtree(self.folder / side, ignore_errors=True)
        for side, (first, *_) in zip(VARIANTS, main, strict=False):
            target = self.folder / side
            target.mkdir(parents=True)
            for name, file in output_files(first.folder, by_frame=True).items():
                copy = target / f"{name}{file.suffix}"
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _same_work(a: RunResult, b: RunResult) -> tuple[str, ...]:
    """Return the jobs if both runs report the same counts of work for all of them.

    Some jobs may have nothing to share, but not all.
    """
    ours, theirs = ({one.custom_id: _counts(one) for one in run.outcomes} for run in (a, b))
    # A line counts only until it was written, so the run's last counts are used.
    embedded, other = (run.outcomes[-1].cache.get("prompt_embeddings") for run in (a, b))
    return tuple(ours) if (ours, embedded, a.rows) == (theirs, other, b.rows) else ()


def _counts(outcome: Outcome) -> tuple[object, ...]:
    """Return the counts of work in a job's line."""
    reuse, spread, cache = outcome.kv_reuse, outcome.parallel, outcome.step_cache
    decoding = spread and spread.decode and len(spread.decode.ranks)
    return (
        reuse and (reuse.ar_shared_tokens, reuse.branches),
        outcome.batch,
        spread and (spread.branch_ranks * spread.tensor_ranks, spread.context_ranks, decoding),
        cache and (cache.full, cache.estimated),
    )
