"""Several sessions that share one plan, each a replica with its own model; no torch here.

    this process    the folder, its lock, its files and its journal; the queue of jobs; one stream
    replica 0 .. N  a session on GPUs of its own, or on its share of the CPU's threads

A replica writes its files into its own folder, `OUT/.replica-N`. This process moves them to their
final places, then writes the lines, then sends the jobs' events. Killing any process therefore
leaves no line without its file, and a replica that was given up changes nothing.
"""

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hyimg_cli.engine.failures import FailureLimit, failed_job, replicas_died
from hyimg_cli.engine.replicas.job_queue import JobQueue
from hyimg_cli.engine.replicas.local import LocalProcesses
from hyimg_cli.engine.replicas.messages import (
    Assign,
    EventBatch,
    Exited,
    FromReplica,
    PieceDone,
    Ready,
    Setup,
    Transport,
)
from hyimg_cli.engine.replicas.replica import replica_facts
from hyimg_cli.engine.runner import replicas_of
from hyimg_cli.errors import CheckpointError, HyimgError, Interrupted, MachineError, StorageError
from hyimg_cli.files import remove
from hyimg_cli.journal.journal import FinishedJob, JobFolder
from hyimg_cli.journal.provenance import versions
from hyimg_cli.parallel.watch import LIMITS, AwakeClock, Beat, Limits, StepWatch
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Readiness, ReplicaDied
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan

logger = logging.getLogger(__name__)

_MOST_DEATHS = 2
# A replica that dies this often without finishing a job in between is not restarted.
_MOST_DEATHS_IN_A_ROW = 3
# Maximum seconds between checks for a stop and for hanging replicas.
_LOOK_S = 0.5


class Replicas:
    """Runs plans as `Session` does, on at most as many replicas as `config.parallel` says.

    Each run starts its own replicas.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        transport: Callable[[RunConfig, Plan, int], Transport] = LocalProcesses,
        limits: Limits = LIMITS,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        """`transport` makes the transport for a plan and a number of replicas.

        `setup`: fields of each replica's `Setup` that differ from the defaults.
        """
        self._config, self._transport = config, transport
        self._limits, self._setup = limits, setup or {}
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> None:
        """Stop every replica after its current denoise step; `run` then raises Interrupted."""
        self._stop_signal = signal_number

    def close(self) -> None:
        """Do nothing: each run ends its own replicas."""

    def run(self, plan: Plan, folder: JobFolder) -> Generator[Event, None, None]:
        """Run every job of the plan, as in `Session.run`, on no more replicas than there are jobs.

        No job is lost when a replica dies: the jobs that it had begun run once more, alone. Raises
        MachineError if all replicas died, or if the machine lacks what they need. Raises
        ConsecutiveErrors as a session does, even if all the errors come from one replica.
        """
        if not plan.jobs:
            return
        count = replicas_of(plan, self._config)
        folder.make_places(plan.jobs)
        transport = self._transport(self._config, plan, count)
        level = logging.getLogger().getEffectiveLevel()
        setup = Setup(0, transport.config, plan, folder.replica_folder(0), level, **self._setup)
        dispatcher = _Dispatcher(setup, count, folder, transport, self._limits)
        try:
            yield from dispatcher.run(self._stop_if_asked)
        finally:
            transport.close()
            for number in range(count):
                remove(folder.replica_folder(number))

    def _stop_if_asked(self) -> None:
        signal_number, self._stop_signal = self._stop_signal, None
        if signal_number is not None:
            raise Interrupted(signal_number)


@dataclass(eq=False)
class _Worker:
    """Replica `number` as the run sees it; a process that dies may be replaced.

    `jobs`: jobs of its piece that have not ended; `begun`: which of them have begun. `heard_at`:
    the time of its last message, or of its start.
    """

    number: int
    model: str | None = None
    is_alive: bool = False
    is_up: bool = False
    has_work: bool = False
    heard_at: float = 0.0
    beat: Beat = field(default_factory=Beat)
    deaths_in_a_row: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    def note(self, event: Event) -> None:
        """Update the jobs in hand after an event."""
        if isinstance(event, JobStarted):
            self.begun.add(event.custom_id)
        elif isinstance(event, JobEnded):
            self.jobs.pop(event.outcome.custom_id, None)
            self.begun.discard(event.outcome.custom_id)
            self.deaths_in_a_row = 0

    def finished(self) -> None:
        """Record that the piece has ended."""
        self.has_work, self.jobs, self.begun = False, {}, set()

    def died(self) -> tuple[list[Job], list[Job]]:
        """Record that the process is gone; return the jobs that it had begun, and the others."""
        begun = [job for name, job in self.jobs.items() if name in self.begun]
        waiting = [job for name, job in self.jobs.items() if name not in self.begun]
        self.deaths_in_a_row += 1
        self.is_alive = self.is_up = False
        self.finished()
        return begun, waiting


class _Dispatcher:
    """One run: which replica works on which jobs, and how each job ended."""

    def __init__(
        self, setup: Setup, count: int, folder: JobFolder, transport: Transport, limits: Limits
    ) -> None:
        self._transport = transport
        self._setup, self._config, self._folder = setup, setup.config, folder
        self._workers = [_Worker(number) for number in range(count)]
        self._queue = JobQueue(setup.whole, count)
        # Package versions are not compared with this process: the first replica's apply to all.
        packages = versions().keys() - {"hyimg"}
        facts = replica_facts(setup.config, setup.whole)
        self._facts = {name: fact for name, fact in facts.items() if name not in packages}
        self._deaths: dict[str, list[str]] = {}
        self._dead: list[str] = []
        self._advice = ""
        self._is_over = False
        self._limits, self._steps, self._clock = limits, StepWatch(limits), AwakeClock()
        self._look_s = min(_LOOK_S, limits.silence_s / 10)

    def run(self, stop_if_asked: Callable[[], None]) -> Iterator[Event]:
        """Run until nothing is left; if the run ends early, stop the replicas in order."""
        limit = FailureLimit(self._config.failure)
        for worker in self._workers:
            self._start(worker)
        try:
            while len(self._queue) or any(worker.has_work for worker in self._workers):
                self._dispatch()
                for event in self._events():
                    yield event
                    limit.add(event)
                    if limit.is_over:
                        yield from self._drain()
                        limit.raise_fault()
                        return
                stop_if_asked()
        except GeneratorExit:
            list(self._drain())
            raise
        except HyimgError as error:
            if isinstance(error, StorageError):
                raise  # nothing more can be written
            number = error.exit_code - 128 if isinstance(error, Interrupted) else signal.SIGTERM
            yield from self._drain(number)
            raise

    def _start(self, worker: _Worker) -> None:
        folder = self._folder.replica_folder(worker.number)
        remove(folder)  # files of an earlier process that were never reported
        self._transport.start(replace(self._setup, number=worker.number, folder=folder))
        worker.is_alive, worker.is_up = True, False
        worker.model, worker.heard_at, worker.beat = None, self._clock(), Beat()

    def _dispatch(self) -> None:
        """Give work to idle replicas. Raises MachineError if no replica is left to do it."""
        at_work = Counter(one.model for one in self._workers if one.has_work and one.model)
        for worker in self._workers:
            if worker.is_up and not worker.has_work:
                piece = self._queue.take(worker.model, at_work)
                if piece is None:
                    break
                worker.jobs = {job.custom_id: job for job in piece.jobs}
                worker.model, worker.has_work = piece.groups[0].model, True
                at_work[piece.groups[0].model] += 1
                attempts = {name: self._folder.attempts[name] for name in worker.jobs}
                self._transport.assign(worker.number, Assign(piece, attempts))
        if len(self._queue) and not any(worker.is_alive for worker in self._workers):
            raise MachineError(
                f"every replica died: {'; '.join(self._dead)}",
                hint=self._advice or "run the same command again to resume, with fewer replicas",
                code="machine.replicas",
            )

    def _events(self) -> Iterator[Event]:
        """Yield the replicas' events once their files are on disk; wait for the first ones.

        Kills replicas that are stopped or hang.
        """
        said = [(n, self._mark(n, message)) for n, message in self._transport.events(self._look_s)]
        # Store everything of a round at once: files, then lines, then events.
        finished = [
            FinishedJob(event.outcome, self._folder.replica_folder(number))
            for number, message in said
            if isinstance(message, EventBatch)
            for event in message.events
            if isinstance(event, JobEnded)
        ]
        now, lost = self._clock(), set()
        if finished:
            self._folder.store(finished)
        for number, message in said:
            if number in lost:
                continue
            worker = self._workers[number]
            worker.heard_at = now
            match message:
                case Ready():
                    worker.is_up = True
                    if differences := describe_differences(self._facts, message.facts):
                        # Its machine differs, so a new process there would differ too.
                        worker.deaths_in_a_row = _MOST_DEATHS_IN_A_ROW
                        node = f" ({message.node})" if message.node else ""
                        self._advice = (
                            "give every machine the same packages, models and sources under the "
                            f"same paths (relative ones: in {os.getcwd()}), then run the same "
                            "command again"
                        )
                        yield from self._kill(worker, f"refused{node}, it has {differences}")
                    else:  # the first replica's packages apply to all others
                        self._facts = dict(message.facts)
                case EventBatch():
                    for event in message.events:
                        worker.note(event)
                        yield event
                case PieceDone():
                    yield from self._end_piece(worker, message)
                case Beat():
                    worker.beat = message
                case Exited():
                    yield from self._redistribute(worker, message.why)
            if not worker.is_up and not isinstance(message, Beat):
                lost.add(number)
        now = self._clock()
        for worker in [one for one in self._workers if one.is_alive]:
            most_s = self._limits.silence_s if worker.is_up else self._limits.start_s
            beat, worker.beat = worker.beat, Beat()
            if now - worker.heard_at > most_s:
                yield from self._kill(worker, f"no sign of life for {most_s:.0f} s")
            elif why := self._steps.overdue(beat):
                yield from self._kill(worker, why)

    def _drain(self, number: int = signal.SIGTERM) -> Iterator[Event]:
        """Begin nothing more; write and report finished jobs, and end all replicas."""
        self._is_over = True
        self._queue.clear()
        for worker in self._workers:
            if worker.begun:
                self._transport.stop(worker.number, number)
            elif worker.is_alive:
                self._transport.kill(worker.number)
                worker.died()
        while any(worker.has_work for worker in self._workers):
            yield from self._events()

    def _mark(self, number: int, message: FromReplica) -> FromReplica:
        """Return the message with the replica's number in its events.

        If other replicas died while running a job, this is added to the job's warnings.
        """
        if not isinstance(message, EventBatch):
            return message
        events = list[Event]()
        for event in message.events:
            if isinstance(event, JobEnded):
                deaths = self._deaths.get(event.outcome.custom_id, ())
                told = (
                    f"{who} died while running this job, which was started again" for who in deaths
                )
                warnings = (*event.outcome.warnings, *told)
                event = JobEnded(replace(event.outcome, replica=number, warnings=warnings))
            elif isinstance(event, Readiness):
                event = replace(event, replica=number)
            events.append(event)
        return EventBatch(tuple(events))

    def _end_piece(self, worker: _Worker, ended: PieceDone) -> Iterator[Event]:
        error, trace = ended.error, ended.trace
        # A machine error is about one replica's GPU; checkpoint and disk errors affect all.
        is_its_own = isinstance(error, MachineError) and not isinstance(
            error, CheckpointError | StorageError
        )
        if error is None and not trace:
            worker.finished()
        elif error is not None and not self._is_over and not is_its_own:
            self._transport.kill(worker.number)
            worker.died()
            raise error
        else:
            if trace:
                logger.error("replica %d crashed:\n%s", worker.number, trace)
            self._advice = error.hint if error else ""
            why = error.what if error else trace.strip().splitlines()[-1]
            yield from self._kill(worker, why)

    def _kill(self, worker: _Worker, why: str) -> Iterator[Event]:
        self._transport.kill(worker.number)
        yield from self._redistribute(worker, why)

    def _redistribute(self, worker: _Worker, how: str) -> Iterator[Event]:
        """Give the jobs of a dead replica to others, or to its replacement."""
        begun, waiting = worker.died()
        if self._is_over:
            return
        self._dead.append(f"replica {worker.number}: {how}")
        self._queue.requeue(waiting)
        for job in begun:
            self._deaths.setdefault(job.custom_id, []).append(f"replica {worker.number} ({how})")
        given_up = [job for job in begun if len(self._deaths[job.custom_id]) >= _MOST_DEATHS]
        for job in begun:
            if job not in given_up:
                self._queue.isolate(job)
        # A replica that dies again and again is not restarted: the cause is not a job.
        returns = worker.deaths_in_a_row < _MOST_DEATHS_IN_A_ROW and len(self._queue) > 0
        if returns:
            self._start(worker)
        yield ReplicaDied(how, len(begun), returns, replica=worker.number)
        for job in given_up:
            error = replicas_died(self._deaths[job.custom_id])
            outcome = failed_job(job, self._config, self._folder.attempts[job.custom_id] + 1, error)
            self._folder.append(outcome)
            yield JobEnded(outcome)


def describe_differences(expected: Mapping[str, object], found: Mapping[str, object]) -> str:
    """Describe which of the expected facts differ in `found`."""
    return ", ".join(
        f"{name} {found.get(name)} instead of {value}"
        for name, value in expected.items()
        if found.get(name) != value
    )
