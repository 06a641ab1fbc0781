"""The run of a manifest: check, sources, resume, plan, session, files, lines, page."""

import logging
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from hyimg_cli.addresses import address_of
from hyimg_cli.engine import runner
from hyimg_cli.engine.chains import Lost, refuse_links
from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.preparation import Preparation, Refusals, RunPlan, begin, prepare, read_jobs
from hyimg_cli.engine.runner import RunRequest, Summary, replicas_of, selection_of
from hyimg_cli.errors import (
    HyimgError,
    Interrupted,
    OutputFolderError,
    TimeIsUp,
    UsageError,
    require,
)
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import PREPARING, JobFolder, RunFolder
from hyimg_cli.journal.keys import here
from hyimg_cli.journal.past_run import read_run_info
from hyimg_cli.journal.provenance import run_info
from hyimg_cli.journal.resume import ResumePolicy
from hyimg_cli.journal.texts_file import TextsFile
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.manifest.planner import make_plan, waves_of
from hyimg_cli.models.registry import TOYS
from hyimg_cli.pipelines.failures import FailureLimit, failed_job
from hyimg_cli.report.run_page import LivePage
from hyimg_cli.settings.config import Setting, settings_of
from hyimg_cli.settings.kinds import seconds_in
from hyimg_cli.settings.run import MachineInfo, RunConfig
from hyimg_cli.spec.events import Event, JobEnded, Outcome, Remark, RemarkKind
from hyimg_cli.spec.gc_paused import freeze_libraries, gc_paused
from hyimg_cli.spec.job import ImageJob, Job, TextJob, VideoJob
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import counted

if TYPE_CHECKING:
    from hyimg_cli.engine.replicas.joining import SharedWork
    from hyimg_cli.engine.replicas.run import Replicas
    from hyimg_cli.engine.rewriting import RewritingSession
    from hyimg_cli.engine.service import ServedSession
    from hyimg_cli.engine.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlanned:
    """The run has been planned; from here on its events update `summary` and `eta`.

    `summary.left` counts its jobs: those of the `plan`, and edits that need no model.
    """

    plan: Plan
    summary: Summary
    eta: Eta
    replicas: int = 1


@dataclass(frozen=True)
class RunEnded:
    """All work has ended. `error`: what ended the run early."""

    summary: Summary
    error: BaseException | None = None


ManifestEvent: TypeAlias = Event | Remark | RunPlanned | RunEnded
OnEvent: TypeAlias = Callable[[ManifestEvent], object]
AnySession: TypeAlias = "Session | Replicas | ServedSession | RewritingSession"


def _ignore(event: object) -> None:
    """Do nothing with an event."""


def run_manifest(
    manifest: Manifest | Path | str,
    config: RunConfig,
    *,
    select: str | Sequence[str] = (),
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = True,
    retry_failed: bool = False,
    force: bool = False,
    on_event: OnEvent = _ignore,
) -> Summary:
    """Run a manifest's remaining jobs, as `hyimg generate` does, and return the run's counts.

    The keyword arguments are the flags of that command; settings of jobs are in `config`.
    `on_event` gets each event as it happens, including job failures. Raises ManifestError with
    every fault of the manifest, and other errors of `hyimg_cli.errors` if the whole run ends.
    """
    if not isinstance(manifest, Manifest):
        manifest = read_manifest(Path(manifest))
    texts, policy = (
        [select] if isinstance(select, str) else select,
        ResumePolicy(resume, retry_failed, force),
    )
    selection, policy = selection_of(texts, limit, shard, config.output.folder, policy)
    request = RunRequest(manifest, config, settings_of(config), selection, policy)
    return ManifestRun(request).run(on_event)


class ManifestRun:
    """One run of a manifest's jobs, or of their texts alone."""

    def __init__(
        self, request: RunRequest, new_session: Callable[[RunConfig], AnySession] | None = None
    ) -> None:
        """`new_session` makes the session for the jobs; `session_for` by default.

        If it is given, the machine is shared with other runs, so this run's rates are not saved.
        """
        self.request, self._new_session = request, new_session
        self._summary = Summary()
        self._emit: OnEvent = _ignore
        # Updates the run's page.
        self._update_page: Callable[[Event], object] = _ignore
        self._session: AnySession | None = None
        # Failed jobs, and those after them.
        self._lost = Lost()
        # While edits are put back on their sources, a stop waits for the current edit: image
        # readers catch every Exception, and would take the stop for a damaged file.
        self._is_patient = False
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> bool:
        """Stop after the current denoise step or edit; the run then raises Interrupted.

        Return False if nothing is at work yet; in that case the run stops when its work begins.
        """
        self._stop_signal = signal_number
        if self._session is not None:
            self._session.request_stop(signal_number)
        return self._session is not None or self._is_patient

    def run(self, on_event: OnEvent, *, age_s: float = 0.0) -> Summary:
        """Run the remaining jobs. `age_s`: seconds since the command began.

        Raises TimeIsUp, after a stop in order, if the run has a time limit and reaches it.
        """
        with self._time_limit(age_s):
            return self._run(on_event, age_s)

    def _run(self, on_event: OnEvent, age_s: float) -> Summary:
        began = time.monotonic() - age_s
        self._emit = on_event
        ready = prepare(self.request, self._emit, Refusals(), find_machine)
        request = self.request = ready.request
        config, settings = request.config, request.settings
        with ExitStack() as held:
            folder = run_folder(config.output.folder, request.selection.shard)
            try:
                held.enter_context(folder)
            except OutputFolderError as error:
                if error.code != "output.in-use" or not config.parallel.has_replicas:
                    raise
                return self._join(folder, ready, error)
            if config.parallel.has_replicas:
                folder.begin_pieces(PREPARING)
            todo = begin(ready, folder)
            del ready  # all jobs, which may be a million
            plan, self._summary = todo.plan, todo.summary
            self._remark(describe_toys(plan.jobs, settings))
            kept = KeptRates(config)
            eta = Eta(plan, config, kept.read(plan), age_s=time.monotonic() - began)
            page = self._page()
            try:
                self._end(todo.ended)
                self._update_page = page.look if page else _ignore
                with self._plan_and_end_events(plan, eta):
                    if todo.to_finish:
                        from hyimg_cli.engine.recomposite import recomposite  # imports scipy

                        self._recomposite(recomposite(folder, todo.to_finish, config))
                    if todo.limit.is_over:
                        todo.limit.raise_fault()
                    elif plan.jobs:
                        self._allow_failures(plan, todo)
                        place = asdict(config.model.machine or here())
                        info = run_info(request.manifest, settings, plan)
                        folder.write_run(info | {"place": place})
                        self._work(plan, folder, eta)
            finally:
                # Whatever ends the run, update the page and save the rates.
                again = shlex.join(["hyimg", "report", str(config.output.folder)])
                with self._failures_as_remarks("no report", then=f"to write it: {again}"):
                    if page and page.close():
                        self._remark([f"report: {config.output.folder / 'report.html'}"], "info")
                with self._failures_as_remarks("this run's times were not saved for estimates"):
                    if self._new_session is None:
                        kept.keep(plan, eta.rates())
                    self._remark(kept.take_notes())
            folder.confirm()
        return self._summary

    def _join(self, folder: RunFolder, ready: Preparation, error: OutputFolderError) -> Summary:
        """Work beside a running command that is the same as this one; raise `error` otherwise."""
        from hyimg_cli.engine.replicas.joining import find_work

        config, card_of = self.request.config, runner.cards(self.request.config.model.revision)
        work = find_work(folder, ready.every, config, card_of, lambda: folder.is_locked)
        if work is None:
            raise error
        results = folder.results()
        attempts = {name: one.get("attempt") or 0 for name, one in results.items()}
        left = [job for job in work.jobs if work.is_left(job, attempts)]
        plan = make_plan(left, card_of)
        self._remark([f"joined the run that has this folder: {error.what}"], "info")
        self._summary = Summary(
            noun=runner.noun_of(left), skipped=len(ready.jobs) - len(left), left=len(left)
        )
        others = {job.custom_id for job in ready.jobs} - {job.custom_id for job in left}
        for name in others & results.keys():
            if results[name].get("status") == "done":
                self._summary.count_edit(results[name].get("edit"))
        eta = Eta(plan, config)
        with self._plan_and_end_events(plan, eta):
            if plan.jobs:
                self._work(plan, folder, eta, work)
        # If the command that began the run is gone, nobody else gathers the lines.
        with suppress(OutputFolderError), folder:
            pass
        return self._summary

    def write_texts(self, path: Path, on_event: OnEvent) -> Summary:
        """Write the jobs' texts that are not in the file yet, and draw nothing.

        Raises TimeIsUp as `run` does.
        """
        with self._time_limit():
            return self._write_texts(path, on_event)

    def _write_texts(self, path: Path, on_event: OnEvent) -> Summary:
        config = self.request.config
        if self.request.selection.asked.conditions:
            hint = "select ids; a text that exists is not written again"
            raise UsageError("--select by results: texts have none", hint=hint, code="usage.select")
        output = replace(config.output, only_texts=True)
        batch = replace(config.batch, prewarm=False)
        self._emit = on_event
        request = replace(self.request, config=replace(config, output=output, batch=batch))
        ready = read_jobs(request, Refusals(), find_machine)
        refuse_links(ready.jobs, "its text can only be written once that is drawn")
        if answers := [job for job in ready.jobs if isinstance(job, TextJob)]:
            raise UsageError(
                f"task {answers[0].task} writes an answer, not a text before a picture",
                where=answers[0].source_line,
                hint="run it with hyimg generate",
                code="usage.answers",
            )
        self.request, jobs, invalid = ready.request, ready.jobs, ready.invalid
        config = self.request.config
        with TextsFile(path, jobs) as file:
            left = file.begin(config, force=self.request.policy.force)
            to_write = list[Job]()
            to_rewrite = set[str]()
            for job in left:
                if isinstance(job, ImageJob) and job.writes_text:
                    to_write.append(job)
                elif runner.rewrites(job, config):
                    to_write.append(job)
                    to_rewrite.add(job.custom_id)
                else:
                    file.append_as_is(job)
            plan = make_plan(to_write, runner.cards(config.model.revision))
            self._summary = Summary(
                noun="text",
                done=len(left) - len(to_write),
                invalid=len(invalid),
                skipped=len(jobs) - len(left),
                left=len(to_write),
            )
            self._remark(describe_toys(plan.jobs, self.request.settings))
            self._end(invalid)
            eta = Eta(plan, config)
            with self._plan_and_end_events(plan, eta):
                texts = plan.without(to_rewrite)
                if texts.jobs:
                    self._work(texts, file, eta)
                if to_rewrite:
                    if config.parallel.has_replicas:
                        self._remark(["one process rewrites the prompts, without --replicas"])
                    from hyimg_cli.engine.rewriting import RewritingSession

                    others = {job.custom_id for job in texts.jobs}
                    self._work(plan.without(others), file, eta, new_session=RewritingSession)
        return self._summary

    @contextmanager
    def _time_limit(self, age_s: float = 0.0) -> Iterator[None]:
        """Stop in order when the time is up; what has not begun to work by then does not begin."""
        if (limit := self.request.config.failure.time_limit) is None:
            yield
            return
        is_up = threading.Event()

        def stop() -> None:
            is_up.set()
            self.request_stop(signal.SIGTERM)

        timer = threading.Timer(max(0.0, seconds_in(limit) - age_s), stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Interrupted as error:
            raise TimeIsUp(limit) if is_up.is_set() else error from None
        finally:
            timer.cancel()

    def _allow_failures(self, plan: Plan, todo: RunPlan) -> None:
        """Let as many jobs of the plan fail as the run's policy leaves, with those before it."""
        config, untried = self.request.config, len(todo.limit.failed)
        failure = config.failure.for_run(len(plan.jobs) + untried, untried)
        self.request = replace(self.request, config=replace(config, failure=failure))

    def _work(
        self,
        plan: Plan,
        folder: JobFolder,
        eta: Eta,
        joined: "SharedWork | None" = None,
        new_session: Callable[[RunConfig], AnySession] | None = None,
    ) -> None:
        """Run a plan in a session that stops in order on a signal. `joined`: another run's work."""
        new_session = new_session or self._new_session or session_for
        session = self._session = new_session(self.request.config)
        if joined is not None:
            cast("Replicas", session).join(joined)
        freeze_libraries()
        try:
            if self._stop_signal is not None:
                session.request_stop(self._stop_signal)
            limit = FailureLimit(self.request.config.failure.for_run(len(plan.jobs)))
            for wave in waves_of(plan):
                with closing(self._events(session, wave, folder)) as events:
                    for event in events:
                        eta.add(event)
                        self._summary.add(event)
                        self._show(event)
                        limit.add(event)
                if limit.is_over:
                    limit.raise_fault()
                    break
        finally:
            with self._failures_as_remarks("the session did not close properly"):
                session.close()
            self._session = None  # from here on a signal stops at once

    def _events(
        self, session: AnySession, wave: Plan, folder: JobFolder
    ) -> Generator[Event, None, None]:
        """Yield the events of jobs that do not need each other.

        Those that edit results which were not drawn fail first.
        """
        lost = set[str]()
        for job in wave.jobs:
            if error := self._lost.error_of(job):
                lost.add(job.custom_id)
                attempt = folder.attempts[job.custom_id] + 1
                outcome = failed_job(job, self.request.config, attempt, error)
                yield JobEnded(folder.append(outcome))
        rest = wave.without(lost) if lost else wave
        if rest.groups:
            with closing(session.run(rest, folder)) as events:
                yield from events

    def _recomposite(self, outcomes: Iterable[Outcome]) -> None:
        """Count and report edits with saved redraws as each is put back on its source."""
        count, self._is_patient = 0, True
        try:
            for outcome in outcomes:
                count += 1
                self._summary.finish(outcome)
                self._end([outcome])
                if self._stop_signal is not None:
                    raise Interrupted(self._stop_signal)
        finally:
            self._is_patient = False
        text = f"{counted(count, 'edit')} finished again from the saved redraws"
        self._remark([text], "info")

    def _end(self, outcomes: Iterable[Outcome]) -> None:
        """Report jobs that ended without a session."""
        for outcome in outcomes:
            self._show(JobEnded(outcome))

    def _show(self, event: Event) -> None:
        if isinstance(event, JobEnded) and not event.is_done:
            self._lost.add(event.outcome.custom_id)
        self._emit(event)
        self._update_page(event)

    def _remark(self, texts: Iterable[str], kind: RemarkKind = "note") -> None:
        for text in texts:
            self._emit(Remark(text, kind))

    @contextmanager
    def _plan_and_end_events(self, plan: Plan, eta: Eta) -> Iterator[None]:
        """Report the plan before the work, and the end however it comes."""
        error: BaseException | None = None
        replicas = replicas_of(plan, self.request.config)
        self._emit(RunPlanned(plan, self._summary, eta, replicas))
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._emit(RunEnded(self._summary, error))

    @contextmanager
    def _failures_as_remarks(self, what: str, then: str = "") -> Iterator[None]:
        """Guard work that follows the jobs: its failure does not end the run.

        The failure becomes a remark, and its traceback goes to the log.
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

    def _page(self) -> LivePage | None:
        """Return the object that updates the run's page; None if the run writes no page."""
        output = self.request.config.output
        address = address_of(output.folder)
        if not output.report:
            return None
        if address:
            bring = shlex.join(["hyimg", "merge", address, "-o", "FOLDER"])
            self._remark([f"no report.html at an address; to download the run: {bring}"], "info")
            return None
        if self.request.selection.shard:
            make = shlex.join(["hyimg", "report", str(output.folder)])
            self._remark([f"shards write no report.html; when all are done: {make}"], "info")
            return None
        return LivePage(output.folder)


def describe_toys(jobs: Iterable[Job], settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield a sentence if no model was chosen, so that one of the package's toy models draws."""
    by_default = (job for job in jobs if "model" not in job.user_fields)
    names = {"video_model" if isinstance(job, VideoJob) else "model" for job in by_default}
    if said := [TOYS[name] for name in sorted(names) if settings[name].origin == "default"]:
        yield "; ".join(said)


def find_machine(config: RunConfig) -> RunConfig:
    """Return `config` with what is known of the run's machines; see `find_place`.

    Raises MachineError if this machine lacks a device that the user named.
    """
    config = find_place(config)
    if not config.parallel.has_replicas and config.model.device not in ("auto", "cpu"):
        # `auto` takes an existing device, and replicas count their own. So torch is imported
        # here only for a GPU that the user named.
        from hyimg_cli.parallel.devices import device_of

        device_of(config.model)
    return config


def find_place(config: RunConfig) -> RunConfig:
    """Return `config` with the facts of a cluster's machines, if the run uses a cluster.

    The facts come from the run's folder if it has them, or else from one of the machines, because
    this machine may have no GPU. Raises MachineError if the cluster is missing or lacks what the
    replicas need.
    """
    if config.parallel.ray_address is None:
        return config
    found = read_run_info(config.output.folder).get("place")
    if isinstance(found, dict) and found.keys() == {"has_gpu", "has_triton"}:
        place = MachineInfo(**{name: bool(value) for name, value in found.items()})
    else:
        _admit_ray(config.parallel.ray_address)
        from hyimg_cli.engine.replicas.cluster import place_of

        place = place_of(config)
    return replace(config, model=replace(config.model, machine=place))


def _admit_ray(address: str) -> None:
    """Check that Ray is installed, and restrict access to a cluster that it may start.

    Raises MachineError.
    """
    require("ray", extra="ray")
    # Ray reads these on import. The run itself reports a worker's death, and not on stdout.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
    if address == "local" and "ray" not in sys.modules:
        # Ray listens on the network, and anyone with access can run code.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@gc_paused()
def session_for(config: RunConfig) -> AnySession:
    """Return the session that `config` asks for. Raises MachineError if GPUs are missing."""
    # Imported here: `--help` must not wait for torch, and replicas do not need it in this process.
    if not config.parallel.has_replicas:
        from hyimg_cli.engine.session import Session

        return Session(config)
    from hyimg_cli.engine.replicas.run import Replicas

    if config.parallel.ray_address is None:
        return Replicas(config)
    _admit_ray(config.parallel.ray_address)
    from hyimg_cli.engine.replicas.cluster import RayCluster

    return Replicas(config, launcher=RayCluster)
