"""Several processes that work on one run, each a replica with its own model; no torch here.

    this process    the folder and its lock; starts replicas, watches them, and follows their lines
    replica 0 .. N  a session on GPUs of its own, or on its share of the CPU's threads

The plan is cut into pieces (`pieces.cut`). A replica takes one, works on it as a run in one process
would, and takes the next (`worker`). A piece of a replica that dies is free again: its lock was
held by the process. So killing any process leaves no line without its file, and no job is lost.
"""

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import address_of
from hyimg_cli.engine.replicas.joining import SharedWork
from hyimg_cli.engine.replicas.local import LocalProcesses
from hyimg_cli.engine.replicas.messages import (
    Ended,
    EventBatch,
    Exited,
    FromReplica,
    Launcher,
    Ready,
    Setup,
)
from hyimg_cli.engine.replicas.pieces import cut
from hyimg_cli.engine.replicas.worker import folder_fact, replica_facts
from hyimg_cli.engine.runner import replicas_of
from hyimg_cli.errors import HyimgError, Interrupted, MachineError, StorageError
from hyimg_cli.files import remove
from hyimg_cli.journal.bucket import BucketFolder
from hyimg_cli.journal.journal import JobFolder, RunFolder
from hyimg_cli.journal.journal_file import entry_of
from hyimg_cli.journal.pieces import begun_jobs, note_death, outcome_of
from hyimg_cli.journal.provenance import versions
from hyimg_cli.journal.texts_file import TextsFile
from hyimg_cli.parallel.watch import LIMITS, AwakeClock, Beat, Limits, StepWatch
from hyimg_cli.pipelines.failures import MOST_DEATHS_OF_REPLICA, FailureLimit, is_of_replica
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Outcome, Progress, ReplicaDied
from hyimg_cli.spec.plan import Plan

logger = logging.getLogger(__name__)

# Maximum seconds between checks for a stop and for hanging replicas.
_POLL_S = 0.5
# Seconds between looks at the lines of pieces; in an object store each look is several requests.
_FOLLOW_S, _FOLLOW_STORE_S = 0.5, 5.0
# Seconds that replicas have to end once all jobs have ended.
_END_S = 5.0


class Replicas:
    """Runs plans as `Session` does, on at most as many replicas as `config.parallel` says.

    Each run starts its own replicas.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        launcher: Callable[[RunConfig, Plan, int], Launcher] = LocalProcesses,
        limits: Limits = LIMITS,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        """`launcher` makes the launcher for a plan and a number of replicas.

        `setup`: fields of each replica's `Setup` that differ from the defaults.
        """
        self._config, self._launcher = config, launcher
        self._limits, self._setup = limits, setup or {}
        self._stop_signal: int | None = None
        self._joined: SharedWork | None = None

    def join(self, work: SharedWork) -> None:
        """Let `run` take pieces beside the command that began this work and has its folder."""
        self._joined = work

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
        launcher = self._launcher(self._config, plan, count)
        try:
            with _shared(folder) as shared:
                work = self._joined or _begin(plan, count, shared, launcher.config)
                is_address = address_of(shared.place)
                setup = Setup(
                    number=0,
                    process=secrets.token_hex(8),
                    share=0.0,
                    config=launcher.config,
                    whole=plan,
                    work=work,
                    place=shared.place if is_address else Path(os.path.abspath(shared.place)),
                    shard=shared.part,
                    local=shared.folder if is_address else None,
                    log_level=logging.getLogger().getEffectiveLevel(),
                    **self._setup,
                )
                run = _Run(setup, count, shared, launcher, self._limits)
                for event in run.events(self._stop_if_asked):
                    if isinstance(event, JobEnded) and shared is not folder:
                        folder.append(event.outcome)
                    yield event
        finally:
            launcher.close()

    def _stop_if_asked(self) -> None:
        signal_number, self._stop_signal = self._stop_signal, None
        if signal_number is not None:
            raise Interrupted(signal_number)


def _begin(plan: Plan, count: int, folder: RunFolder, config: RunConfig) -> SharedWork:
    """Cut a plan into pieces of the folder, and let other commands know them."""
    folder.gather()
    folder.make_places(plan.jobs)
    names = {job.custom_id for job in plan.jobs}
    attempts = {name: folder.attempts[name] for name in names & folder.attempts.keys()}
    former = {name: folder.former[name] for name in names & folder.former.keys()}
    work = SharedWork(tuple(cut(plan, count)), attempts, former)
    folder.begin_pieces(work.to_json(folder, config))
    return work


@contextmanager
def _shared(folder: JobFolder) -> Iterator[RunFolder]:
    """Give the folder that several processes write; for a file of texts, one beside it."""
    if isinstance(folder, RunFolder):
        yield folder
        return
    assert isinstance(folder, TextsFile), "there is no third kind of folder"
    try:
        with RunFolder(folder.workshop) as shared:
            yield shared
    finally:
        remove(folder.workshop)


@dataclass(eq=False)
class _Replica:
    """Replica `number` as the run sees it; a process that dies may be replaced.

    `process`: its token. `heard_at`: the time of its last message, or of its start.
    """

    number: int
    process: str = ""
    is_alive: bool = False
    is_up: bool = False
    heard_at: float = 0.0
    beat: Beat = field(default_factory=Beat)
    deaths_in_a_row: int = 0


class _Run:
    """One run: its replicas, and how each job ended."""

    def __init__(
        self, setup: Setup, count: int, folder: RunFolder, launcher: Launcher, limits: Limits
    ) -> None:
        self._launcher, self._setup, self._folder = launcher, setup, folder
        self._replicas = [_Replica(number) for number in range(count)]
        # Package versions are not compared with this process: the first replica's apply to all.
        packages = versions().keys() - {"hyimg"}
        facts = replica_facts(setup.config, setup.whole) | folder_fact(folder, setup.place)
        self._facts = {name: fact for name, fact in facts.items() if name not in packages}
        self._left = {job.custom_id for job in setup.whole.jobs}
        # How far the lines of each piece were followed, and when.
        self._lines_read, self._followed_at = dict[str, int](), 0.0
        is_store = isinstance(folder, BucketFolder)
        self._follow_s = _FOLLOW_STORE_S if is_store else _FOLLOW_S
        self._deaths: list[str] = []
        self._advice = ""
        self._is_over = False
        self._limits, self._steps, self._clock = limits, StepWatch(limits), AwakeClock()
        self._poll_s = min(_POLL_S, limits.silence_s / 10)
        self._starts = 0

    def events(self, stop_if_asked: Callable[[], None]) -> Iterator[Event]:
        """Yield events until nothing is left; if the run ends early, stop the replicas in order."""
        setup = self._setup
        limit = FailureLimit(setup.config.failure.for_run(len(setup.whole.jobs)))
        for replica in self._replicas:
            self._start(replica)
        try:
            while self._left:
                for event in self._poll():
                    yield event
                    limit.add(event)
                    if limit.is_over:
                        yield from self._drain()
                        limit.raise_fault()
                        return
                self._refuse_to_wait()
                stop_if_asked()
            self._let_replicas_end()
        except GeneratorExit:
            list(self._drain())
            raise
        except HyimgError as error:
            if isinstance(error, StorageError):
                raise  # nothing more can be written
            number = error.exit_code - 128 if isinstance(error, Interrupted) else signal.SIGTERM
            yield from self._drain(number)
            raise

    def _start(self, replica: _Replica) -> None:
        self._starts += 1
        replica.process = f"{self._setup.process}-{self._starts}"
        share = (replica.number + 0.5) / len(self._replicas)
        self._launcher.start(
            replace(self._setup, number=replica.number, process=replica.process, share=share)
        )
        replica.is_alive, replica.is_up = True, False
        replica.heard_at, replica.beat = self._clock(), Beat()

    def _refuse_to_wait(self) -> None:
        """Raise MachineError if jobs are left and no replica is left to do them."""
        if self._left and not any(replica.is_alive for replica in self._replicas):
            raise MachineError(
                f"every replica died: {'; '.join(self._deaths)}",
                hint=self._advice or "run the same command again to resume, with fewer replicas",
                code="machine.replicas",
            )

    def _poll(self) -> Iterator[Event]:
        """Yield what replicas report and what their lines say; wait for the first message.

        Kills replicas that are stopped or hang.
        """
        messages = self._launcher.events(self._poll_s)
        now, lost = self._clock(), set()
        for number, message in messages:
            replica = self._replicas[number]
            if number in lost or not replica.is_alive:
                continue
            replica.heard_at = now
            yield from self._on_message(replica, message)
            if not replica.is_up and not isinstance(message, Beat):
                lost.add(number)
        if time.monotonic() - self._followed_at >= self._follow_s or any(
            isinstance(message, Ended) for _, message in messages
        ):
            yield from self._follow_lines()
        now = self._clock()
        for replica in [replica for replica in self._replicas if replica.is_alive]:
            most_s = self._limits.silence_s if replica.is_up else self._limits.start_s
            beat, replica.beat = replica.beat, Beat()
            if now - replica.heard_at > most_s:
                yield from self._kill(replica, f"no sign of life for {most_s:.0f} s")
            elif why := self._steps.overdue(beat):
                yield from self._kill(replica, why)

    def _on_message(self, replica: _Replica, message: FromReplica) -> Iterator[Event]:
        match message:
            case Ready():
                replica.is_up = True
                if differences := describe_differences(self._facts, message.facts):
                    # Its machine differs, so a new process there would differ too.
                    replica.deaths_in_a_row = MOST_DEATHS_OF_REPLICA
                    node = f" ({message.node})" if message.node else ""
                    self._advice = (
                        "give every machine the same packages, models and sources under the "
                        f"same paths (relative ones: in {os.getcwd()}), and the output folder, "
                        "then run the same command again"
                    )
                    yield from self._kill(replica, f"refused{node}, it has {differences}")
                else:  # the first replica's packages apply to all others
                    self._facts = dict(message.facts)
                    self._launcher.begin(replica.number)
            case EventBatch():
                for event in message.events:
                    if isinstance(event, JobEnded):
                        yield from self._end_job(event.outcome)
                    elif (
                        not isinstance(event, JobStarted | Progress)
                        or event.custom_id in self._left
                        or not event.custom_id
                    ):
                        yield event
            case Ended():
                yield from self._end_replica(replica, message)
            case Beat():
                replica.beat = message
            case Exited():
                yield from self._replace_dead(replica, message.why)

    def _follow_lines(self) -> Iterator[Event]:
        """Yield the ends of jobs whose lines are on disk and that nobody has reported yet."""
        for line in self._folder.new_lines(self._lines_read):
            if (entry := entry_of(line)) is not None and entry["custom_id"] in self._left:
                yield from self._end_job(outcome_of(entry))
        self._followed_at = time.monotonic()

    def _end_job(self, outcome: Outcome) -> Iterator[Event]:
        if outcome.custom_id in self._left:
            self._left.discard(outcome.custom_id)
            for replica in self._replicas:
                if replica.number == outcome.replica:
                    replica.deaths_in_a_row = 0
            yield JobEnded(outcome)

    def _let_replicas_end(self) -> None:
        """Let replicas that wait for pieces end by themselves, and so release what they hold."""
        until = time.monotonic() + _END_S
        for replica in self._replicas:
            if replica.is_up:
                self._launcher.stop(replica.number, signal.SIGTERM)
            elif replica.is_alive:
                self._launcher.kill(replica.number)
                replica.is_alive = False
        self._is_over = True
        while any(replica.is_alive for replica in self._replicas) and time.monotonic() < until:
            list(self._poll())

    def _drain(self, number: int = signal.SIGTERM) -> Iterator[Event]:
        """Begin nothing more; report jobs that still end, and end all replicas."""
        self._is_over = True
        yield from self._follow_lines()
        begun = self._begun_jobs()
        for replica in self._replicas:
            if replica.is_up and begun.get(replica.process):
                self._launcher.stop(replica.number, number)
            elif replica.is_alive:
                self._launcher.kill(replica.number)
                replica.is_alive = replica.is_up = False
        while any(replica.is_alive for replica in self._replicas):
            yield from self._poll()
        yield from self._follow_lines()

    def _begun_jobs(self) -> dict[str, list[str]]:
        """Return the jobs that each process has begun and that have not ended."""
        begun = begun_jobs(self._folder, len(self._setup.work.pieces))
        return {by: [name for name in some if name in self._left] for by, some in begun.items()}

    def _end_replica(self, replica: _Replica, ended: Ended) -> Iterator[Event]:
        error, trace = ended.error, ended.trace
        if error is None and not trace:
            replica.is_alive = replica.is_up = False
        elif error is not None and not self._is_over and not is_of_replica(error):
            self._launcher.kill(replica.number)
            replica.is_alive = replica.is_up = False
            raise error
        else:
            if trace:
                logger.error("replica %d crashed:\n%s", replica.number, trace)
            self._advice = error.hint if error else ""
            why = error.what if error else trace.strip().splitlines()[-1]
            yield from self._kill(replica, why)

    def _kill(self, replica: _Replica, why: str) -> Iterator[Event]:
        self._launcher.kill(replica.number)
        yield from self._replace_dead(replica, why)

    def _replace_dead(self, replica: _Replica, how: str) -> Iterator[Event]:
        """Tell others how a replica died, and start a new one."""
        yield from self._follow_lines()
        begun = self._begun_jobs().get(replica.process, ())
        replica.deaths_in_a_row += 1
        replica.is_alive = replica.is_up = False
        if self._is_over:
            return
        self._deaths.append(f"replica {replica.number}: {how}")
        note_death(self._folder, replica.process, f"replica {replica.number} ({how})")
        # A replica that dies again and again is not restarted: the cause is not a job.
        returns = replica.deaths_in_a_row < MOST_DEATHS_OF_REPLICA and bool(self._left)
        if returns:
            self._start(replica)
        yield ReplicaDied(how, len(begun), returns, replica=replica.number)


def describe_differences(expected: Mapping[str, object], found: Mapping[str, object]) -> str:
    """Describe which of the expected facts differ in `found`."""
    return ", ".join(
        f"{name} {found.get(name)} instead of {value}"
        for name, value in expected.items()
        if found.get(name) != value
    )
