"""The run of a manifest: check, sources, resume, plan, session, files, lines, page."""

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from hyimg_cli.addresses import address_of
from hyimg_cli.engine import runner
from hyimg_cli.engine.choice import (
    RunsPlans,
    find_place,
    refuse_missing_device,
    replicas_of,
    session_for,
)
from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.runner import ResumePolicy, Selection, Summary
from hyimg_cli.engine.sources import SourcesSeen, probe_sources, refuse_hopeless, turned_sizes
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import here, job_keys
from hyimg_cli.journal.provenance import run_info
from hyimg_cli.journal.texts_file import TextsFile
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.report.run_page import Follower
from hyimg_cli.settings.config import Setting, settings_of
from hyimg_cli.settings.run import TOYS, RunConfig
from hyimg_cli.spec.events import Event, JobEnded, Outcome, Remark, RemarkKind
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import counted

logger = logging.getLogger(__name__)

# The IPTC property is in every file unless it is asked to be left out.
_UNMARKED = (
    "--no-metadata: the files do not say that a model made them, which the EU's AI Act asks for "
    "(article 50)"
)


@dataclass(frozen=True)
class RunPlanned:
    """What the run will do is known. `summary` and `eta` follow it from here on; `summary.left`
    counts its jobs, those of the `plan` and edits that need no model.
    """

    plan: Plan
    summary: Summary
    eta: Eta
    replicas: int = 1


@dataclass(frozen=True)
class RunEnded:
    """No job is worked on any more. `error`: what ended the run early."""

    summary: Summary
    error: BaseException | None = None


ManifestEvent: TypeAlias = Event | Remark | RunPlanned | RunEnded
OnEvent: TypeAlias = Callable[[ManifestEvent], object]


def _ignore(event: object) -> None:
    """Do nothing with an event."""


@dataclass(frozen=True)
class RunRequest:
    """What one run was asked to do: manifest, settings, selection, resume policy."""

    manifest: Manifest
    config: RunConfig
    settings: Mapping[str, Setting]
    selection: Selection = field(default_factory=Selection)
    policy: ResumePolicy = field(default_factory=ResumePolicy)


def run_manifest(
    manifest: Manifest | Path | str,
    config: RunConfig,
    *,
    select: str | None = None,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = True,
    retry_failed: bool = False,
    force: bool = False,
    on_event: OnEvent = _ignore,
) -> Summary:
    """Run what is left of a manifest's jobs, as `hyimg generate` does, and return its counts.

    The key words are the flags of that command; settings of jobs are in `config`. `on_event` gets
    each event as it happens: a job's failure is one of them. Raises ManifestError with every fault
    of the manifest, and other errors of `hyimg_cli.errors` for what ends the whole run.
    """
    if not isinstance(manifest, Manifest):
        manifest = read_manifest(Path(manifest))
    settings = settings_of(config)
    selection = Selection(select, limit, shard)
    policy = ResumePolicy(resume, retry_failed, force)
    return ManifestRun(RunRequest(manifest, config, settings, selection, policy)).run(on_event)


class ManifestRun:
    """One run of a manifest's jobs, or of their texts alone."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self._summary = Summary()
        self._tell: OnEvent = _ignore
        self._session: RunsPlans | None = None
        # While edits are put back on their sources a stop waits for the one at work: readers of
        # pictures catch every Exception, and would take it for a damaged file.
        self._is_patient = False
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> bool:
        """Stop after the current denoise step, or edit; the run then raises Interrupted. False
        where nothing is at work that could end in order.
        """
        self._stop_signal = signal_number
        if self._session is not None:
            self._session.request_stop(signal_number)
        return self._session is not None or self._is_patient

    def run(self, on_event: OnEvent, *, age_s: float = 0.0) -> Summary:
        """Do what is left of the jobs. `age_s`: seconds since the command began."""
        began, self._tell = time.monotonic() - age_s, on_event
        request = self.request = replace(self.request, config=find_place(self.request.config))
        config, settings = request.config, request.settings
        every, invalid = runner.accept(request.manifest, settings)
        # Of a million lines none is needed any more: the jobs are.
        manifest = replace(request.manifest, lines=())
        request = self.request = replace(request, manifest=manifest)
        if not invalid:  # a faulty line may be of the other kind
            self._remark(without_effect(settings, every))
        refuse_missing_device(config)
        if not config.output.metadata:
            self._remark([_UNMARKED])
        jobs = request.selection.of(every, config.model.revision)[0]
        found = inspect_sources(jobs, config, self._tell)
        with run_folder(config.output.folder, request.selection.shard) as folder:
            todo = runner.prepare(
                folder,
                every,
                jobs,
                config=config,
                policy=request.policy,
                invalid=invalid,
                found=found,
            )
            plan = todo.plan
            self._remark(describe_toys(plan.jobs, settings))
            self._summary = todo.summary
            with self._keep_rates(plan, began) as eta, self._keep_page() as follow:
                self._end(todo.ended)
                with self._told_from_plan_to_end(plan, eta):
                    if todo.to_finish:
                        from hyimg_cli.engine.recomposite import recomposite  # imports scipy

                        self._recomposite(recomposite(folder, todo.to_finish, config), follow)
                    if plan.jobs and not todo.is_over:
                        place = asdict(config.model.machine or here())
                        folder.write_run(run_info(manifest, settings, plan) | {"place": place})
                        self._work(plan, folder, eta, follow)
            folder.confirm()
        return self._summary

    def write_texts(self, path: Path, on_event: OnEvent) -> Summary:
        """Write the jobs' texts that are not in the file yet, and draw nothing."""
        self._tell, settings = on_event, self.request.settings
        every, invalid = runner.accept(self.request.manifest, settings)
        config = find_place(without_drawing(self.request.config))
        self.request = replace(self.request, config=config)
        refuse_missing_device(config)
        jobs = self.request.selection.of(every, config.model.revision)[0]
        with TextsFile(path, jobs) as file:
            there = file.lines()
            keys = job_keys([job for job in jobs if job.custom_id in there], config)
            left = file.begin(jobs, keys, force=self.request.policy.force)
            to_write, as_they_are = list[Job](), list[Job]()
            for job in left:
                writes = isinstance(job, ImageJob) and job.writes_text
                (to_write if writes else as_they_are).append(job)
            for job in as_they_are:
                file.append_as_is(job)
            plan = make_plan(to_write, runner.cards(config.model.revision))
            self._summary = Summary(
                noun="text",
                done=len(as_they_are),
                invalid=len(invalid),
                skipped=len(jobs) - len(left),
                left=len(to_write),
            )
            self._remark(describe_toys(plan.jobs, settings))
            self._end(invalid)
            eta = Eta(plan, config)
            with self._told_from_plan_to_end(plan, eta):
                if plan.jobs:
                    self._work(plan, file, eta, _ignore)
        return self._summary

    def _work(
        self, plan: Plan, folder: JobFolder, eta: Eta, follow: Callable[[Event], object]
    ) -> None:
        """Run a plan in a session that a signal stops in order."""
        session = self._session = session_for(self.request.config)
        try:
            with closing(session.run(plan, folder)) as events:
                for event in events:
                    eta.add(event)
                    self._summary.add(event)
                    self._tell(event)
                    follow(event)
        finally:
            with self._told("the session did not close in order"):
                session.close()
            self._session = None  # from here on a signal stops at once

    def _recomposite(self, outcomes: Iterable[Outcome], follow: Callable[[Event], object]) -> None:
        """Count and show edits whose redraws were there, as each is put back on its source."""
        count, self._is_patient = 0, True
        try:
            for outcome in outcomes:
                count += 1
                self._summary.finish(outcome)
                self._end([outcome], follow)
                if self._stop_signal is not None:
                    raise Interrupted(self._stop_signal)
        finally:
            self._is_patient = False
        self._remark(
            [f"{counted(count, 'edit')} finished again from the redraws that are kept"], "info"
        )

    def _end(
        self, outcomes: Iterable[Outcome], follow: Callable[[Event], object] = _ignore
    ) -> None:
        """Tell of jobs that ended without a session."""
        for outcome in outcomes:
            event = JobEnded(outcome)
            self._tell(event)
            follow(event)

    def _remark(self, texts: Iterable[str], kind: RemarkKind = "note") -> None:
        for text in texts:
            self._tell(Remark(text, kind))

    @contextmanager
    def _told_from_plan_to_end(self, plan: Plan, eta: Eta) -> Iterator[None]:
        """Tell of the plan before the work, and of the end whatever it is."""
        error: BaseException | None = None
        replicas = replicas_of(plan, self.request.config)
        self._tell(RunPlanned(plan, self._summary, eta, replicas))
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._tell(RunEnded(self._summary, error))

    @contextmanager
    def _told(self, what: str, then: str = "") -> Iterator[None]:
        """Work behind the jobs: it ends no run, so its failure is a remark, with its traceback in
        the log.
        """
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:
            is_ours = isinstance(error, HyimgError)
            why = str(error) if is_ours else f"{type(error).__name__}: {error}".rstrip(": ")
            self._remark(["; ".join(filter(None, (f"{what}: {why}", then)))], "fault")
            logger.info(what, exc_info=error)

    @contextmanager
    def _keep_rates(self, plan: Plan, began: float) -> Iterator[Eta]:
        """Estimate of the time left, by earlier runs; what this one took is kept, however it
        ends.
        """
        kept = KeptRates(self.request.config)
        age_s = time.monotonic() - began
        eta = Eta(plan, self.request.config, kept.read(plan), age_s=age_s)
        try:
            yield eta
        finally:
            with self._told("no rates are kept of this run"):
                kept.keep(plan, eta.rates())
                self._remark(kept.take_notes())

    @contextmanager
    def _keep_page(self) -> Iterator[Callable[[Event], object]]:
        """Keep the run's page up to date, event by event; whatever ends the run, the page says
        what was done.
        """
        output, shard = self.request.config.output, self.request.selection.shard
        address = address_of(output.folder)
        if address and output.report:
            bring = shlex.join(["hyimg", "merge", address, "-o", "FOLDER"])
            self._remark([f"no report.html at an address; {bring} brings all of it here"], "info")
        elif shard and output.report:
            page = shlex.join(["hyimg", "report", str(output.folder)])
            self._remark([f"no report.html by a shard; {page} makes it of all"], "info")
        if address or shard or not output.report:
            yield _ignore
            return
        follower = Follower(output.folder)
        try:
            yield follower.look
        finally:
            again = shlex.join(["hyimg", "report", str(output.folder)])
            with self._told("no report", then=f"to have one: {again}"):
                if follower.close():
                    self._remark([f"report: {output.folder / 'report.html'}"], "info")


def inspect_sources(
    jobs: Sequence[Job], config: RunConfig, tell: OnEvent, *, fetches: bool = False
) -> SourcesSeen:
    """The jobs' sources that can be read; those that cannot are told. `fetches`: see
    `probe_sources`.

    Raises UsageError where no job has its sources, and the folder holds no result of any.
    """
    found = probe_sources(
        jobs, config.cache, fetches=fetches, tell=lambda text: tell(Remark(text, "info"))
    )
    for text in found.named():
        tell(Remark(text, "info"))
    for text in turned_sizes(found, jobs):
        tell(Remark(text))
    refuse_hopeless(found, jobs, run_folder(config.output.folder))
    return found


def describe_toys(jobs: Iterable[Job], settings: Mapping[str, Setting]) -> Iterator[str]:
    """A sentence where nobody named a model, so that one of the package draws the jobs."""
    by_default = (job for job in jobs if "model" not in job.user_fields)
    names = {"video_model" if isinstance(job, VideoJob) else "model" for job in by_default}
    if said := [TOYS[name] for name in sorted(names) if settings[name].origin == "default"]:
        yield "; ".join(said)


def without_drawing(config: RunConfig) -> RunConfig:
    """The run of texts alone: without what only drawing needs."""
    return replace(
        config,
        output=replace(config.output, only_texts=True),
        batch=replace(config.batch, prewarm=False),
    )
