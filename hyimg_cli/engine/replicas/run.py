"""Several sessions at one plan, each a process with a model of its own; no torch here.

    this process    the folder, its lock and journal; the queue of jobs; one stream of events
    replica 0 .. N  replica.py: a session on GPU 0 .. N-1, or on its share of the CPU's threads

A replica writes a job's file, then sends its line; the line is on disk before the replica goes on
and before `JobDone` leaves this process. So a kill anywhere leaves no line without its file.
"""

import logging
import os
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Self

from hyimg_cli.engine.choice import replicas_of
from hyimg_cli.engine.replicas.job_queue import JobQueue
from hyimg_cli.engine.replicas.messages import (
    OutcomeLine,
    PieceDone,
    Ready,
    Recorded,
    SessionEvent,
    Setup,
    Stop,
)
from hyimg_cli.engine.replicas.outcomes import again, died_twice, marked
from hyimg_cli.engine.replicas.worker import Launch, Worker, awaited
from hyimg_cli.errors import (
    CheckpointError,
    HyimgError,
    Interrupted,
    JournalError,
    MachineError,
    StorageError,
)
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import key_of, precision, source_digests
from hyimg_cli.journal.provenance import cores
from hyimg_cli.memory.fit import judged
from hyimg_cli.memory.present import available_bytes, copies_of, of_each, present
from hyimg_cli.parallel.launch import Launched, launched
from hyimg_cli.spec.events import Event, JobDone, JobFailed, Outcome, ReplicaDied
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import RunConfig

logger = logging.getLogger(__name__)

# The longest silence of a replica that has work: loading, a video's step, or its whole decode.
_SILENCE_S = 3600.0
_MOST_DEATHS = 2


class Replicas:
    """Runs plans as `Session` does, on as many replicas as `config.parallel` says at most. Each run
    starts its own.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        launch: Launch | None = None,
        silence_s: float = _SILENCE_S,
    ) -> None:
        """`launch` starts a replica's process; one that works and says nothing for `silence_s` is
        taken for dead. Raises MachineError where there are fewer GPUs than replicas.
        """
        _refuse_missing_gpus(config, config.parallel.replicas)
        self._config = config
        self._launch = launch
        self._silence_s = silence_s
        self._stop_signal: int | None = None
        self._dispatcher: _Dispatcher | None = None

    def request_stop(self, signal_number: int) -> None:
        """Every replica stops after its current denoise step; `run` then raises Interrupted."""
        self._stop_signal = signal_number
        if self._dispatcher is not None:
            self._dispatcher.wake()

    def close(self) -> None:
        """End the replicas that a run has left."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, plan: Plan, folder: JobFolder) -> Generator[Event, None, None]:
        """Every job of the plan, as in `Session.run`; only as many replicas as there are jobs.

        A replica that dies costs nobody a job: what it had begun runs once more, alone. Raises
        MachineError where all of them died, and on a CPU whose memory cannot hold a model each.
        """
        if not plan.jobs:
            return
        count = replicas_of(plan, self._config)
        _refuse_little_memory(self._config, plan, count)
        config = of_each(self._config, count)
        launch = self._launch or partial(_launched, config, count)
        workers = [Worker(number, launch) for number in range(count)]
        dispatcher = self._dispatcher = _Dispatcher(plan, folder, config, workers)
        try:
            yield from self._worked(dispatcher)
        except GeneratorExit:
            for _ in dispatcher.drained(self._silence_s):
                pass
            raise
        finally:
            self.close()

    def _worked(self, dispatcher: "_Dispatcher") -> Iterator[Event]:
        dispatcher.start()
        try:
            while dispatcher.is_busy:
                dispatcher.dispatch()
                for event in dispatcher.events(self._silence_s):
                    yield event
                    if isinstance(event, JobFailed) and self._config.failure.fail_fast:
                        yield from dispatcher.drained(self._silence_s)
                        return
                self._stop_if_asked()
        except HyimgError as error:
            if isinstance(error, StorageError) and not isinstance(error, JournalError):
                raise  # nothing more can be written
            number = error.exit_code - 128 if isinstance(error, Interrupted) else signal.SIGTERM
            yield from dispatcher.drained(self._silence_s, number)
            raise

    def _stop_if_asked(self) -> None:
        signal_number, self._stop_signal = self._stop_signal, None
        if signal_number is not None:
            raise Interrupted(signal_number)


class _Dispatcher:
    """One run: who works on what, and what has become of it."""

    def __init__(
        self, plan: Plan, folder: JobFolder, config: RunConfig, workers: list[Worker]
    ) -> None:
        self._plan, self._folder, self._config, self._workers = plan, folder, config, workers
        self._queue = JobQueue(plan, len(workers))
        self._attempts = folder.attempts()
        self._deaths: dict[str, list[str]] = {}
        self._dead: list[str] = []
        self._advice = ""
        self._is_over = False
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    @property
    def is_busy(self) -> bool:
        return len(self._queue) > 0 or any(worker.has_work for worker in self._workers)

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def wake(self) -> None:
        """End the wait in `events`; a signal's handler may call this."""
        with suppress(OSError):
            os.write(self._waker, b"!")

    def end(self) -> None:
        """End every process, whatever it does."""
        for worker in self._workers:
            worker.close_pipe()
        for worker in self._workers:
            worker.end()
        for descriptor in (self._woken, self._waker):
            os.close(descriptor)

    def dispatch(self) -> None:
        """Give work to those without. Raises MachineError where nobody is left to do it."""
        for worker in self._workers:
            if worker.is_up and not worker.has_work:
                at_work = [one.model for one in self._workers if one.has_work and one.model]
                piece = self._queue.take(worker.model, at_work)
                if piece is None:
                    break
                tried = {job.custom_id: self._tried(job) for job in piece.jobs}
                worker.dispatch(piece, tried)
        if len(self._queue) and not any(worker.is_alive for worker in self._workers):
            raise MachineError(
                f"every replica died: {'; '.join(self._dead)}",
                hint=self._advice or "run the same command again to resume, with fewer replicas",
                code="machine.replicas",
            )

    def events(self, silence_s: float) -> Iterator[Event]:
        """What replicas have to say; waits for it."""
        alive: list[Worker] = [worker for worker in self._workers if worker.is_alive]
        first = min((worker.last_message_at for worker in awaited(alive)), default=time.monotonic())
        left_s = max(0.0, first + silence_s - time.monotonic())
        for one in wait([*alive, self._woken], left_s):  # type: ignore[list-item]
            if isinstance(one, Worker):
                yield from self._taken(one)
            else:
                os.read(self._woken, 64)
        for worker in awaited(self._workers):
            if time.monotonic() - worker.last_message_at >= silence_s:
                yield from self._lost(worker, why=f"no word from it for {silence_s:.0f} s")

    def drained(self, silence_s: float, number: int = signal.SIGTERM) -> Iterator[Event]:
        """Nothing more is begun; what is made is written and told, and all end."""
        self._is_over = True
        self._queue.clear()
        for worker in self._workers:
            if worker.is_alive and worker.is_at_risk:
                worker.send(Stop(number))
            else:
                worker.close_pipe()
        for worker in self._workers:
            if not worker.is_at_risk:
                worker.end()
        while any(worker.has_work for worker in self._workers):
            yield from self.events(silence_s)

    def _taken(self, worker: Worker) -> Iterator[Event]:
        try:
            message = worker.received()
        except (EOFError, OSError):
            yield from self._lost(worker)
            return
        match message:
            case Ready():
                worker.is_up = True
                worker.send(self._setup(worker.number))
            case OutcomeLine():
                self._record(worker, message.outcome)
            case SessionEvent():
                event = marked(message.event, worker.number, self._deaths)
                worker.note(event)
                yield event
            case PieceDone():
                yield from self._ended(worker, message)

    def _setup(self, number: int) -> Setup:
        level = logging.getLogger().getEffectiveLevel()
        return Setup(number, self._config, self._plan, self._folder.folder, level)

    def _record(self, worker: Worker, outcome: Outcome) -> None:
        written = again(outcome, worker.number, self._deaths)
        fault: JournalError | None = None
        try:
            self._folder.append(written)
        except JournalError as error:  # behind the line
            fault = error
        self._attempts[written.custom_id] = written.attempt
        worker.recorded(written)
        worker.send(Recorded())
        if fault is not None:
            raise fault

    def _ended(self, worker: Worker, ended: PieceDone) -> Iterator[Event]:
        error, trace = ended.error, ended.trace
        if error is None and not trace:
            worker.finished()
        elif error is not None and not (self._is_over or _is_its_own(error)):
            raise error
        else:
            if trace:
                logger.error("replica %d ended by a fault of its own:\n%s", worker.number, trace)
            self._advice = error.hint if error else ""
            why = error.what if error else trace.strip().splitlines()[-1]
            yield from self._lost(worker, why=why)

    def _lost(self, worker: Worker, why: str = "") -> Iterator[Event]:
        """A replica is dead, or will be now: its jobs go to others, or to one in its place."""
        pid = worker.pid
        how, left = worker.died(why=why)
        self._folder.remove_temporaries(pid)
        yield from (JobDone(outcome) for outcome in left.unreported)
        if self._is_over:
            return
        self._dead.append(f"replica {worker.number}: {how}")
        self._queue.requeue(left.waiting)
        for job in left.begun:
            self._deaths.setdefault(job.custom_id, []).append(f"replica {worker.number} ({how})")
        given_up = [job for job in left.begun if len(self._of(job)) >= _MOST_DEATHS]
        for job in left.begun:
            if job not in given_up:
                self._queue.isolate(job)
        returns = worker.may_return and len(self._queue) > 0
        if returns:
            worker.start()
        yield ReplicaDied(worker.number, how, len(left.begun), returns)
        for job in given_up:
            yield self._given_up(job)

    def _given_up(self, job: Job) -> JobFailed:
        key = key_of(job, source_digests(job), self._config)
        outcome = died_twice(job, key, self._tried(job) + 1, self._of(job))
        self._folder.append(outcome)
        return JobFailed(outcome)

    def _of(self, job: Job) -> list[str]:
        """The deaths that the job was at."""
        return self._deaths.get(job.custom_id, [])

    def _tried(self, job: Job) -> int:
        return self._attempts.get(job.custom_id, 0)


def _is_its_own(error: HyimgError) -> bool:
    """True if an error is of one replica's GPU; checkpoint and disk are the same for all."""
    return isinstance(error, MachineError) and not isinstance(error, CheckpointError | StorageError)


def _launched(config: RunConfig, count: int, number: int) -> Launched:
    environment = _environment(config, count, number, os.environ)
    return launched("hyimg_cli.engine.replicas.process", environment)


def _environment(
    config: RunConfig, count: int, number: int, ours: Mapping[str, str]
) -> dict[str, str]:
    """Environment of a replica's process: one GPU of those that we see, its share of the cores."""
    found = {}
    if "OMP_NUM_THREADS" not in ours:
        found["OMP_NUM_THREADS"] = str(max(1, cores() // count))
    if precision(config.model)[0] == "cuda":
        visible = ours.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible is not None else [str(n) for n in range(count)]
        found["CUDA_VISIBLE_DEVICES"] = names[number].strip()
    return found


def _refuse_missing_gpus(config: RunConfig, count: int) -> None:
    if precision(config.model)[0] != "cuda":
        return
    from hyimg_cli.parallel.devices import gpu_count, refuse_missing_gpus

    found = gpu_count()
    hint = f"--replicas {found}" if found > 1 else "leave --replicas out, or --device cpu"
    refuse_missing_gpus(count, "replicas", hint)


def _refuse_little_memory(config: RunConfig, plan: Plan, count: int) -> None:
    """On a CPU every replica's model lies in the same memory; each is asked before any loads."""
    if copies_of(config, count) == 1:
        return
    for model in dict.fromkeys(group.model for group in plan.groups):
        judge = partial(judged, model, plan.jobs_of_model(model), config)
        found = judge(present(config, replicas=count))
        if not found.is_enough:
            fewer = (
                n for n in range(count - 1, 1, -1) if judge(present(config, replicas=n)).is_enough
            )
            fit = next(fewer, 1)
            raise MachineError(
                f"{count} replicas hold {found.needed.weights / 1e9:.1f} GB of weights each; main "
                f"memory has {available_bytes() / 1e9:.1f} GB free",
                hint=f"--replicas {fit}" if fit > 1 else "leave --replicas out",
                code="machine.memory",
            )
