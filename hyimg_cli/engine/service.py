"""One loaded model that works for many callers: a server's engine.

    callers' threads    a `ServedSession` each: puts tickets, gets their events, records results
    engine thread       `Pipeline.work`: takes tickets, draws, sends events

A `ServedSession` has the interface of `Session`, and a `ManifestRun` can use it. It records results
in its caller's thread, in its own folder; the engine writes nothing.
"""

import json
import logging
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from PIL import Image

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.engine.recorder import AnyPipeline, Recorder
from hyimg_cli.engine.runner import accept
from hyimg_cli.errors import HyimgError, Interrupted, JobError, UsageError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.memory.available import available_memory, limit_gpu_memory
from hyimg_cli.memory.fit import check_fit, fits, need
from hyimg_cli.memory.refusals import refuse_conflicts
from hyimg_cli.models import registry
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.failures import FailureLimit, engine_fault, machine_fault
from hyimg_cli.pipelines.image.pipeline import ImagePipeline
from hyimg_cli.pipelines.latent.pictures import EditPipeline
from hyimg_cli.pipelines.parts import tickets_of
from hyimg_cli.pipelines.queue import Dropped, EngineEvent, Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.pipelines.torch_settings import torch_settings
from hyimg_cli.remote import keep_copies_in
from hyimg_cli.settings.config import in_config, settings_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.events import Event, GroupStarted, JobStarted, Progress
from hyimg_cli.spec.gc_paused import freeze_libraries
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan

logger = logging.getLogger(__name__)
# Number of latest pictures over which the rate is measured.
_LATELY = 32
_PREFIX_PART = 4
# Maximum delay of progress events. Waking a thread for every token would take time from the engine.
_PROGRESS_S = 1.0


class Service:
    """A model that is loaded once and draws for all sessions, in a separate thread."""

    def __init__(self, config: RunConfig) -> None:
        """Raises CheckpointError, and UsageError for settings that need more than one process."""
        for row in SETTINGS.values():
            if row.table == "parallel" and in_config(row.name, config) != row.default:
                what = "a server runs in one process"
                hint = "remove it; use several servers behind a proxy instead"
                raise UsageError(what, where=row.flag, hint=hint, code="usage.not-served")
        self.model, self._room = config.model.model, available_memory(config)
        # Prefixes eventually fill their whole budget, so it is limited to a part of the memory that
        # the weights leave.
        spare = max(0, self._room.free - need(self.model, (), config).total)
        kept_mb = min(config.batch.prefix_cache_mb, spare // _PREFIX_PART // 1_000_000)
        config = replace(config, batch=replace(config.batch, prefix_cache_mb=kept_mb))
        self.config = config
        self.card = registry.model_card(self.model, config.model.revision)
        is_latent = self.card.denoises_latents
        self.pipeline: AnyPipeline = EditPipeline(config) if is_latent else ImagePipeline(config)
        self.queue = TicketQueue()
        self.is_ready = False
        self.fault: HyimgError | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._begun = threading.Event()
        # Running sessions; they hold the tickets that have not ended.
        self._changed = threading.Condition()
        self._sessions = set[ServedSession]()
        self._is_stopping = self.has_ended = False
        # The engine's seconds for each of the latest pictures.
        self._lately = deque[float](maxlen=_LATELY)

    def start(self) -> None:
        """Load the model and run the usual shapes once; raise the engine's error if this fails."""
        self._thread.start()
        self._begun.wait()
        if self.fault is not None:
            raise self.fault

    def session(self, scope: str, caller: str, *, is_online: bool = False) -> "ServedSession":
        """Return a session for a caller; its jobs share texts and prefixes within `scope`."""
        return ServedSession(self, scope, caller, is_online=is_online)

    def counts(self) -> dict[str, Any]:
        """Return waiting jobs by kind, jobs at work by phase, and recent pictures per second.

        The rate is None until a picture is drawn.
        """
        with self._changed:
            tickets = [one for session in self._sessions for one in session.tickets()]
            at_work = Counter(one.phase for one in tickets if one.phase)
            seconds = sum(self._lately)
            rate = len(self._lately) / seconds if seconds else None
        waiting = self.queue.counts()
        return {"waiting": waiting, "at_work": dict(at_work), "pictures_per_s": rate}

    def stop(self, grace_s: float) -> None:
        """Stop in order, and begin nothing new.

        Batches are dropped after their current step; online sessions have `grace_s` to finish.
        """
        with self._changed:
            self._is_stopping = True
            sessions = [*self._sessions]
        for session in sessions:
            if not session.is_online:
                session.request_stop(signal.SIGTERM)
        with self._changed:
            self._changed.wait_for(
                lambda: self.has_ended or not any(one.is_online for one in self._sessions), grace_s
            )
            sessions = [*self._sessions]
        for session in sessions:
            session.request_stop(signal.SIGTERM)
        self.queue.close()
        if self._thread.is_alive():
            self._thread.join()

    def enter(self, session: "ServedSession") -> None:
        """Register a session. Raises the engine's fault, or Interrupted if it is stopping."""
        with self._changed:
            if self._is_stopping or self.has_ended:
                raise self.fault or Interrupted(signal.SIGTERM)
            self._sessions.add(session)

    def leave(self, session: "ServedSession") -> None:
        """Unregister a session."""
        with self._changed:
            self._sessions.discard(session)
            self._changed.notify_all()

    def note(self, ticket: Ticket, event: EngineEvent) -> None:
        """Record a ticket's progress. A machine error ends the engine."""
        match event:
            case JobStarted():
                ticket.phase = "queue"
            case Progress() if event.custom_id:
                ticket.phase = event.phase
            case Request() | Dropped():  # a Lost is also a Request
                ticket.phase = ""
        if isinstance(event, Lost):
            if (fault := machine_fault(event.error)) is not None:
                self._end_by(fault)
        elif isinstance(event, Request):
            with self._changed:
                self._lately.append(sum(event.clock.dealt_s.values()))

    def unfit(self, jobs: Sequence[Job]) -> dict[str, JobError]:
        """Return the error of each job that does not fit into memory even alone, by custom_id."""
        loaded, there = self.pipeline.fitted, self._room
        config = replace(loaded, model=replace(loaded.model, auto_fit=False))
        if fits(need(self.model, jobs, config), there):
            return {}
        found = {job.custom_id: check_fit(self.model, [job], config, there) for job in jobs}
        faults = {name: one.refusal() for name, one in found.items() if not one.is_enough}
        return {
            name: JobError(one.what, hint=one.hint, code="job.memory")
            for name, one in faults.items()
        }

    def _work(self) -> None:
        """Load the model, then serve jobs until the queue is closed (engine thread)."""
        config = self.config
        try:
            keep_copies_in(DiskStore(config.cache.folder, config.cache.budget_bytes))
            limit_gpu_memory(config)
            with torch_settings(config.model, draws=True):
                self._load()
                freeze_libraries()
                self.is_ready = True
                self._begun.set()
                deque(self.pipeline.work(self.queue), maxlen=0)
        except BaseException as error:
            self._end_by(engine_fault(error))
        finally:
            self.is_ready = False
            self.queue.close()
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()
            self._begun.set()
            limit_gpu_memory(config, is_over=True)

    def _load(self) -> None:
        """Load the model, divide the memory, and run the usual shapes once.

        The division assumes the largest job of the usual size for every job at work. The shapes run
        are those of the largest and the smallest such job.
        """
        card, side = self.card, self.card.base_size
        names = [f"source-{number}.png" for number in range(card.most_images)]
        # Typical jobs: with the minimum and the maximum number of source pictures.
        lines = [
            {"custom_id": f"stand-in-{count}", "prompt": "a picture", "images": names[:count]}
            for count in sorted({card.fewest_images, card.most_images})
        ]
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                Image.new("RGB", (side, side), "grey").save(Path(folder, name))
            data = "\n".join(map(json.dumps, lines)).encode()
            manifest = manifest_of(data, "stand-ins", folder=Path(folder))
            jobs, _ = accept(manifest, settings_of(self.config))
            deque(self.pipeline.use(self.model, jobs, None), maxlen=0)
            deque(self.pipeline.prepare_to_serve(jobs), maxlen=0)

    def _end_by(self, fault: HyimgError) -> None:
        """Stop the engine: drop everything that waits or is at work."""
        self.fault = self.fault or fault
        self.queue.close()
        with self._changed:
            sessions = [*self._sessions]
        for session in sessions:
            self.queue.drop(session.tickets())


class ServedSession:
    """Runs one plan at a time as `Session` does, with the model of a `Service`."""

    def __init__(self, service: Service, scope: str, caller: str, *, is_online: bool) -> None:
        self._service, self._scope, self._caller = service, scope, caller
        self.is_online = is_online
        # By custom_id, the tickets of jobs that have not ended; and their events.
        self._open: dict[str, list[Ticket]] = {}
        self._inbox = SimpleQueue[tuple[str, EngineEvent]]()
        # By custom_id, the latest progress; earlier progress may be skipped.
        self._progress: dict[str, Progress] = {}
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> None:
        """Drop the jobs at work after their current step; `run` then raises Interrupted."""
        self._stop_signal = signal_number
        self._drop()

    def close(self) -> None:
        """Do nothing: the model belongs to the service."""

    def tickets(self) -> list[Ticket]:
        """Return the tickets whose end this session has not received yet."""
        return [ticket for tickets in self._open.values() for ticket in tickets]

    def run(
        self, plan: Plan, folder: JobFolder | None = None, *, whole: Plan | None = None
    ) -> Generator[Event, None, None]:
        """Run every job of the plan, as in `Session.run`.

        Raises UsageError for a job of another model, and MachineError if the engine has failed.
        """
        service, jobs = self._service, plan.jobs
        service.enter(self)
        try:
            for job in jobs:
                if job.model != service.model:
                    what = f"{job.model} is not served here"
                    hint = f"remove the model, or use {service.model}"
                    raise UsageError(what, where=job.custom_id, hint=hint, code="usage.not-served")
            refuse_conflicts(jobs, service.config)
            if folder:
                folder.make_places(jobs)
            for group in plan.groups:
                yield GroupStarted(group.model, group.size_class)
            limit = FailureLimit(service.config.failure.for_run(len(jobs)))
            recorder = Recorder(service.pipeline, service.config, folder, limit, is_elsewhere=True)
            yield from recorder.run(jobs, self._work, time.perf_counter())
            if limit.is_over:
                limit.raise_fault()
        finally:
            # Leave the folder only when no job works in it any more.
            self._drop()
            while self._open and not service.has_ended:
                self._take_events()
            service.leave(self)

    def _work(
        self, jobs: Sequence[Job], folder: JobFolder | None, started: float
    ) -> Iterator[Event | Request[Any] | Lost[Any]]:
        """Yield the events of jobs that run through the engine."""
        service = self._service
        unfit = service.unfit(jobs)
        for job in jobs:
            if error := unfit.get(job.custom_id):
                yield Lost(job, PhaseClock(started, lambda: None), error=error)
        now = time.perf_counter()
        self._open = {
            job.custom_id: tickets_of(
                job,
                partial(self._emit, job.custom_id),
                scope=self._scope,
                caller=self._caller,
                is_online=self.is_online,
                folder=folder,
                submitted=now,
            )
            for job in jobs
            if job.custom_id not in unfit
        }
        service.queue.put(self.tickets())
        if self._stop_signal is not None:
            self._drop()
        is_cut = False
        while self._open:
            is_last = service.has_ended  # no events follow the engine's end
            for event in self._take_events():
                if isinstance(event, Dropped):
                    is_cut = True
                else:
                    yield event
            if is_last:
                break
        if is_cut or self._open:
            raise service.fault or Interrupted(self._stop_signal or signal.SIGTERM)

    def _emit(self, custom_id: str, event: EngineEvent) -> None:
        """Record an event; called in the engine's thread, or in the one that drops the job."""
        self._service.note(self._open[custom_id][0], event)
        if isinstance(event, Progress) and not event.answer:  # an answer is told as it is written
            self._progress[custom_id] = event
        else:
            self._inbox.put((custom_id, event))

    def _take_events(self) -> list[EngineEvent]:
        """Return new events; wait for the first one for a limited time."""
        events, progress = list[tuple[str, EngineEvent]](), dict[str, EngineEvent]()
        with suppress(Empty):
            events.append(self._inbox.get(timeout=_PROGRESS_S))
        while self._progress:  # before the rest of the inbox, where its job has begun
            name, event = self._progress.popitem()
            progress[name] = event
        while not self._inbox.empty():
            events.append(self._inbox.get())
        for name, news in events:
            if isinstance(news, Request | Dropped):
                self._open.pop(name, None)
                progress.pop(name, None)
        return [event for _, event in events] + [*progress.values()]

    def _drop(self) -> None:
        self._service.queue.drop(self.tickets())
