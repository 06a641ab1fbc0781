"""Run a manifest around a session: choose its jobs, and leave out what is done.

No model is loaded here; `Session` does that with the plan that `prepare` returns.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from hyimg_cli.engine.failures import FailureLimit, failed_job, failed_line
from hyimg_cli.engine.sources import SourcesSeen
from hyimg_cli.errors import HyimgError, JobError, ManifestError, UsageError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.resume import ResumePolicy, resume
from hyimg_cli.manifest import planner
from hyimg_cli.manifest.file_names import name_files
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.manifest import Manifest, failed_lines, in_line_order
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.memory.refusals import refuse_full_disk, refuse_settings
from hyimg_cli.models import registry
from hyimg_cli.settings.config import Setting, build_run_config, settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Outcome
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import counted


@dataclass(frozen=True)
class Selection:
    """Which jobs are meant: ids that match, then one shard (counted from 1), then the first few."""

    pattern: str | None = None
    limit: int | None = None
    shard: tuple[int, int] | None = None

    def of(
        self, jobs: Sequence[Job], revision: str | None = None
    ) -> tuple[list[Job], planner.Shard | None]:
        """The chosen jobs in manifest order, and the shard that they are of, where one was asked
        for. Raises UsageError where a pattern matches none.
        """
        chosen = [j for j in jobs if self.pattern is None or fnmatchcase(j.custom_id, self.pattern)]
        if jobs and not chosen:
            hint = f"the first id is {jobs[0].custom_id!r}; * matches anything"
            raise UsageError(
                f"--select {self.pattern!r} matches none of {counted(len(jobs), 'job')}", hint=hint
            )
        if self.shard is None:
            return chosen[: self.limit], None
        of, of_video = cards(revision), video_cards(revision)
        weigh = partial(planner.planned_work, card_of=of, video_card_of=of_video)
        shard = planner.shard_of(chosen, *self.shard, weigh)
        return list(shard.jobs[: self.limit]), shard


@dataclass(frozen=True)
class RunRequest:
    """What one run was asked to do: manifest, settings, selection, resume policy. `change`: what
    is drawn instead of the jobs that the manifest asks for.
    """

    manifest: Manifest
    config: RunConfig
    settings: Mapping[str, Setting]
    selection: Selection = Selection()
    policy: ResumePolicy = field(default_factory=ResumePolicy)
    change: Callable[[Sequence[Job]], Sequence[Job]] = tuple


@dataclass
class Summary:
    """Counts and times of a run, gathered from its events. `left` was planned and did not run.

    Of edits that keep their source: `unchanged`, in which no edit was found, `whole`, which changed
    the whole picture, and `gated`, which are beyond a gate, in this run and before.
    `lossy`: by a step cache. `failed` counts jobs, in this run and before; `invalid` lines that
    never became jobs. Of several replicas' seconds of loading, prewarming, embedding and compiling,
    those of the slowest count.
    """

    done: int = 0
    failed: int = 0
    invalid: int = 0
    skipped: int = 0
    left: int = 0
    unchanged: int = 0
    whole: int = 0
    gated: int = 0
    lossy: int = 0
    load_s: float = 0.0
    prewarm_s: float = 0.0
    encode_s: float = 0.0
    compile_s: float = 0.0
    pictures_s: float = 0.0
    noun: str = "picture"
    _clock: float = field(default_factory=time.perf_counter, repr=False)
    _at_work: set[str] = field(default_factory=set, repr=False)
    _ready_s: dict[tuple[str, int | None], float] = field(default_factory=dict, repr=False)

    def add(self, event: Event) -> None:
        before, self._clock = self._clock, time.perf_counter()
        # With replicas one loads while another draws: time with a job at work is the jobs'.
        if self._at_work or isinstance(event, JobStarted | JobEnded):
            self.pictures_s += self._clock - before
        facts = vars(event)
        for name in ("load_s", "prewarm_s", "encode_s"):
            if name in facts:
                self._get_ready(name, facts["replica"], facts[name])
        if isinstance(event, JobStarted):
            self._at_work.add(event.custom_id)
        elif isinstance(event, JobEnded):
            self.finish(event.outcome)

    def finish(self, outcome: Outcome) -> None:
        """A job's end."""
        self.done += outcome.status == "done"
        self.failed += outcome.status == "failed"
        edit = outcome.edit or {}
        self.unchanged += edit.get("kind") == "none"
        self.whole += edit.get("kind") == "global"
        self.gated += outcome.status == "done" and bool(edit.get("gates"))
        self.lossy += outcome.step_cache is not None
        self._get_ready("compile_s", outcome.replica, outcome.timings_s.get("compile", 0.0))
        self.left -= 1
        self._at_work.discard(outcome.custom_id)

    def _get_ready(self, name: str, replica: int | None, seconds: float) -> None:
        """Count seconds of this name. Replicas get ready at the same time: the slowest one's."""
        self._ready_s[name, replica] = self._ready_s.get((name, replica), 0.0) + seconds
        setattr(self, name, max(s for (own, _), s in self._ready_s.items() if own == name))

    def to_json(self) -> dict[str, Any]:
        """Its numbers by name."""
        names = [one.name for one in fields(self) if one.name != "noun" and one.repr]
        numbers = {name: getattr(self, name) for name in names}
        return numbers | {"seconds_per_picture": self.seconds_per_picture}

    @property
    def seconds_per_picture(self) -> float | None:
        """Wall time by what was made in this run; loading, prewarming, the strings embedded ahead
        and compiling are left out.
        """
        return (self.pictures_s - self.compile_s) / self.done if self.done else None


@dataclass(frozen=True)
class RunPlan:
    """What is left to do. `plan`: of a session; `to_finish`: edits whose redraws are there, which
    need no model. `ended`: jobs and lines that failed before; `is_over`: by one of them, so that no
    other job is to be done. `summary` counts what is known before the first event.
    """

    plan: Plan
    summary: Summary
    ended: tuple[Outcome, ...]
    to_finish: tuple[ImageJob, ...]
    is_over: bool


def make_plan(
    jobs: Manifest | Sequence[Job], card_of: Callable[[str], ModelCard] | None = None
) -> Plan:
    """The plan of a manifest, with the checkpoint's own defaults, or of ready-made jobs.

    Neither environment nor recipe is looked at. `card_of` gives a model's card; by default it is
    read from the checkpoint. Raises ManifestError with every fault of the manifest.
    """
    if isinstance(jobs, Manifest):
        jobs, _ = accept(jobs, settle({}, {}, {}))
    return planner.make_plan(jobs, card_of or cards(None))


@gc_paused()
def examine(
    manifest: Manifest, settings: Mapping[str, Setting]
) -> tuple[list[Job], list[HyimgError]]:
    """The jobs without fault, and every fault of the manifest's text in the order of its lines.

    No file is read but those of the checkpoints, and of these no weights. Raises UsageError for
    settings that no job can run with.
    """
    revision = settings["revision"].value
    jobs, unresolved = resolve_jobs(manifest, settings, cards(revision), video_cards(revision))
    jobs, unnamed = name_files(manifest, jobs, settings["name"])
    config = build_run_config(settings, Path(), None)
    refuse_settings(jobs, config)
    # Faults of jobs that their checkpoint cannot take, by line: a line's jobs differ in seed only.
    unfit: dict[str, HyimgError] = {}
    line = ""
    for job in jobs:
        if job.source_line == line:
            continue
        line = job.source_line
        try:
            registry.check(job, revision, settings["video_components"].value)
        except JobError as error:
            field, slug = error.where, error.code.partition(".")[2]
            is_own = field in job.user_fields or field not in settings
            place = line if is_own else settings[field].origin
            unfit[line] = fault(slug, error.what, where=f"{place}: {field}", hint=error.hint)
    good = [job for job in jobs if job.source_line not in unfit]
    # What a setting caused is the same in every line; it is said once.
    once = {(one.where, one.what): one for one in unfit.values()}
    return good, in_line_order(manifest, [*manifest.faults, *unresolved, *unnamed, *once.values()])


def accept(
    manifest: Manifest, settings: Mapping[str, Setting]
) -> tuple[tuple[Job, ...], tuple[Outcome, ...]]:
    """The manifest's jobs, fully resolved, and the outcomes of lines that could not become jobs.

    Raises ManifestError with every fault, unless the setting `skip_invalid` is on: then faulty
    lines become failed outcomes, and only faults of the whole file are raised.
    """
    jobs, faults = examine(manifest, settings)
    by_id = failed_lines(manifest, faults) if settings["skip_invalid"].value else {}
    recorded = {id(fault) for some in by_id.values() for fault in some}
    unrecorded = [fault for fault in faults if id(fault) not in recorded]
    if unrecorded:
        raise ManifestError(unrecorded, where=manifest.title)
    return tuple(jobs), tuple(failed_line(name, some) for name, some in by_id.items())


def cards(revision: str | None) -> Callable[[str], ModelCard]:
    """A look-up of model cards that reads each checkpoint once."""
    return cache(lambda model: registry.model_card(model, revision))


def video_cards(revision: str | None) -> Callable[[str], VideoCard]:
    """A look-up of video models' cards that reads each checkpoint once."""
    return cache(lambda model: registry.video_card(model, revision))


def replicas_of(plan: Plan, config: RunConfig) -> int:
    """Number of replicas that start for a plan: no more than it has jobs."""
    return max(1, min(config.parallel.replicas, len(plan.jobs)))


@gc_paused()
def prepare(
    folder: RunFolder,
    request: RunRequest,
    every: Sequence[Job],
    jobs: Sequence[Job],
    invalid: Sequence[Outcome],
    found: SourcesSeen,
) -> RunPlan:
    """What is left to do of those `jobs` of `every` one that are meant; records the `invalid` lines
    that could not become jobs, and the jobs whose sources cannot be read, by what was `found`.

    Raises StorageError where the disk cannot hold what is left, before anything is loaded.
    """
    config = request.config
    for model in sorted({job.model for job in jobs}):
        # A checkpoint that is not all there is told of before anything is written.
        registry.fingerprint(model, config.model.revision)
    rest = resume(folder, jobs, config, request.policy)
    to_run = [job for job in rest.to_run if not found.error_of(job)]
    videos = [job for job in to_run if isinstance(job, VideoJob)]
    refuse_full_disk(folder.folder, videos, config)
    # Whoever runs all again wants none of what an earlier run left.
    begun = rest.done if request.policy.resume else [job.custom_id for job in rest.to_run]
    folder.drop_latents(begun)
    folder.supersede(rest.former)
    folder.write_resolved(every)
    for line in invalid:
        # Once: a resumed run says the same of them and adds nothing.
        earlier = rest.results.get(line.custom_id, {}).get("error") or {}
        if line.error and earlier.get("message") != line.error.message:
            folder.append(line)
    untried, limit = list[Outcome](), FailureLimit(config.failure)
    for job in rest.to_run:
        if not limit.is_over and (error := found.error_of(job)):
            attempt = folder.attempts[job.custom_id] + 1
            untried.append(failed_job(job, config, attempt, error))
            folder.append(untried[-1])
            limit.add(JobEnded(untried[-1]))
    plan = planner.make_plan(to_run, cards(config.model.revision))
    plan = replace(plan, begun=rest.begun)
    kinds = {type(job) for job in to_run}
    summary = Summary(
        noun="video" if kinds == {VideoJob} else "job" if VideoJob in kinds else "picture",
        failed=len(rest.failed_before) + len(untried),
        invalid=len(invalid),
        skipped=len(rest.done),
        gated=sum(bool((rest.results[name].get("edit") or {}).get("gates")) for name in rest.done),
        left=len(to_run) + len(rest.to_finish),
    )
    return RunPlan(plan, summary, (*invalid, *untried), tuple(rest.to_finish), limit.is_over)
