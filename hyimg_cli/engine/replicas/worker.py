"""A replica as the run sees it: its process, its pipe, and the jobs it has; no torch."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hyimg_cli.engine.replicas.messages import (
    Dispatch,
    FromReplica,
    Setup,
    Stop,
    ToReplica,
)
from hyimg_cli.parallel.launch import Launched, received, send
from hyimg_cli.spec.events import Event, JobDone, JobFailed, JobStarted, Outcome
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan

# A replica that dies so often without a finished job in between is not started again.
_MOST_DEATHS_IN_A_ROW = 2

Launch = Callable[[int], Launched]


@dataclass(frozen=True)
class Unfinished:
    """What a replica had in hand when it died: jobs it worked on, jobs it had not begun, and lines
    that are in the journal and were not told.
    """

    begun: tuple[Job, ...]
    waiting: tuple[Job, ...]
    unreported: tuple[Outcome, ...]


@dataclass(eq=False)
class Worker:
    """Number `number` of the replicas: one process after another, where it dies and is replaced."""

    number: int
    launch: Launch
    model: str | None = None
    last_message_at: float = 0.0
    is_up: bool = False
    has_work: bool = False
    _running: Launched | None = None
    _deaths_in_a_row: int = 0
    _jobs: dict[str, Job] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)
    _recorded: dict[str, Outcome] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """True if it has a process, which may still be starting."""
        return self._running is not None

    @property
    def pid(self) -> int:
        return self._launched.process.pid

    @property
    def is_at_risk(self) -> bool:
        """True if work would be lost with its process."""
        return bool(self._begun)

    @property
    def may_return(self) -> bool:
        """True if it died at a job, and not too often: what dies while it loads does so again."""
        return self._deaths_in_a_row < _MOST_DEATHS_IN_A_ROW

    def fileno(self) -> int:
        """Of its pipe: it can be waited for."""
        return self._launched.pipe.fileno()

    def start(self) -> None:
        self._running = self.launch(self.number)
        self.last_message_at = time.monotonic()
        self.model, self.is_up, self.has_work = None, False, False

    def received(self) -> FromReplica:
        """The next message. Raises EOFError or OSError where the process is gone."""
        message: ToReplica | FromReplica = received(self._launched.pipe)
        self.last_message_at = time.monotonic()
        assert not isinstance(message, Setup | Dispatch | Stop), "a replica gives no orders"
        return message  # type: ignore[return-value]

    def send(self, message: ToReplica) -> None:
        """Where nobody is left to read, the pipe's end says so soon enough."""
        with contextlib.suppress(OSError):
            send(self._launched.pipe, message)

    def dispatch(self, piece: Plan, attempts: dict[str, int]) -> None:
        self._jobs = {job.custom_id: job for job in piece.jobs}
        self.model, self.has_work = piece.groups[0].model, True
        self.last_message_at = time.monotonic()
        self.send(Dispatch(piece, attempts))

    def note(self, event: Event) -> None:
        """Keep account of which jobs are in hand."""
        if isinstance(event, JobStarted):
            self._begun.add(event.custom_id)
        elif isinstance(event, JobDone | JobFailed):
            self._release(event.outcome.custom_id)
            self._deaths_in_a_row = 0

    def recorded(self, outcome: Outcome) -> None:
        """A line of this replica is in the journal; its event is on the way."""
        self._recorded[outcome.custom_id] = outcome

    def finished(self) -> None:
        """The piece has ended."""
        self.has_work = False
        self._jobs, self._begun, self._recorded = {}, set(), {}

    def close_pipe(self) -> None:
        """Close the pipe, which ends a process that listens."""
        if self._running is not None:
            self._running.pipe.close()

    def end(self) -> None:
        """Hang up and wait; a process that does not listen is killed."""
        self.close_pipe()
        running, self._running = self._running, None
        self.is_up = self.has_work = False
        if running is not None:
            running.end()

    def died(self, *, why: str = "") -> tuple[str, Unfinished]:
        """Its process is gone, or is killed now: how it died, and what it leaves."""
        if why:
            self._launched.process.kill()
        how = why or self._launched.death()
        self.end()
        for custom_id, outcome in list(self._recorded.items()):
            if outcome.status == "done":
                self._jobs.pop(custom_id, None)
            else:
                # A failure is told or tried again by the session; nobody can say which any more.
                del self._recorded[custom_id]
        left = Unfinished(
            begun=tuple(job for name, job in self._jobs.items() if name in self._begun),
            waiting=tuple(job for name, job in self._jobs.items() if name not in self._begun),
            unreported=tuple(self._recorded.values()),
        )
        self._deaths_in_a_row = (
            self._deaths_in_a_row + 1 if left.begun or left.unreported else _MOST_DEATHS_IN_A_ROW
        )
        self.finished()
        return how, left

    @property
    def _launched(self) -> Launched:
        assert self._running is not None, "a replica without a process is not asked of it"
        return self._running

    def _release(self, custom_id: str) -> None:
        self._jobs.pop(custom_id, None)
        self._recorded.pop(custom_id, None)
        self._begun.discard(custom_id)


def awaited(workers: Iterable[Worker]) -> list[Worker]:
    """Those that will say something next: they are starting, or have work."""
    return [
        worker for worker in workers if worker.is_alive and (worker.has_work or not worker.is_up)
    ]
