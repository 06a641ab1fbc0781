"""A replica as the run sees it: its process, its pipe, and the jobs it has; no torch."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hyimg_cli.engine.replicas.messages import (
    Deal,
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
_MOST_FALLS = 2

Launch = Callable[[int], Launched]


@dataclass(frozen=True)
class Left:
    """What a replica had in hand when it died: jobs it worked on, jobs it had not begun, and lines
    that are in the journal and were not told.
    """

    begun: tuple[Job, ...]
    waiting: tuple[Job, ...]
    untold: tuple[Outcome, ...]


@dataclass(eq=False)
class Link:
    """Number `number` of the replicas: one process after another, where it dies and is replaced."""

    number: int
    launch: Launch
    model: str | None = None
    heard_at: float = 0.0
    is_up: bool = False
    is_dealt: bool = False
    _running: Launched | None = None
    _falls: int = 0
    _jobs: dict[str, Job] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)
    _recorded: dict[str, Outcome] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether it has a process, which may still be starting."""
        return self._running is not None

    @property
    def pid(self) -> int:
        return self._launched.process.pid

    @property
    def is_at_risk(self) -> bool:
        """Whether work would be lost with its process."""
        return bool(self._begun)

    @property
    def may_return(self) -> bool:
        """Whether it died at a job, and not too often: what dies while it loads does so again."""
        return self._falls < _MOST_FALLS

    def fileno(self) -> int:
        """Of its pipe: it can be waited for."""
        return self._launched.pipe.fileno()

    def start(self) -> None:
        self._running = self.launch(self.number)
        self.heard_at = time.monotonic()
        self.model, self.is_up, self.is_dealt = None, False, False

    def received(self) -> FromReplica:
        """The next message. Raises EOFError or OSError where the process is gone."""
        message: ToReplica | FromReplica = received(self._launched.pipe)
        self.heard_at = time.monotonic()
        assert not isinstance(message, Setup | Deal | Stop), "a replica gives no orders"
        return message  # type: ignore[return-value]

    def tell(self, message: ToReplica) -> None:
        """Where nobody is left to read, the pipe's end says so soon enough."""
        with contextlib.suppress(OSError):
            send(self._launched.pipe, message)

    def deal(self, piece: Plan, attempts: dict[str, int]) -> None:
        self._jobs = {job.custom_id: job for job in piece.jobs}
        self.model, self.is_dealt = piece.groups[0].model, True
        self.heard_at = time.monotonic()
        self.tell(Deal(piece, attempts))

    def note(self, event: Event) -> None:
        """Keep account of which jobs are in hand."""
        if isinstance(event, JobStarted):
            self._begun.add(event.custom_id)
        elif isinstance(event, JobDone | JobFailed):
            self._release(event.outcome.custom_id)
            self._falls = 0

    def recorded(self, outcome: Outcome) -> None:
        """A line of this replica is in the journal; its event is on the way."""
        self._recorded[outcome.custom_id] = outcome

    def finished(self) -> None:
        """The piece has ended."""
        self.is_dealt = False
        self._jobs, self._begun, self._recorded = {}, set(), {}

    def hang_up(self) -> None:
        """Close the pipe, which ends a process that listens."""
        if self._running is not None:
            self._running.pipe.close()

    def end(self) -> None:
        """Hang up and wait; a process that does not listen is killed."""
        self.hang_up()
        running, self._running = self._running, None
        self.is_up = self.is_dealt = False
        if running is not None:
            running.end()

    def fallen(self, *, why: str = "") -> tuple[str, Left]:
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
        left = Left(
            begun=tuple(job for name, job in self._jobs.items() if name in self._begun),
            waiting=tuple(job for name, job in self._jobs.items() if name not in self._begun),
            untold=tuple(self._recorded.values()),
        )
        self._falls = self._falls + 1 if left.begun or left.untold else _MOST_FALLS
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


def owing(links: Iterable[Link]) -> list[Link]:
    """Those that will say something next: they are starting, or have work."""
    return [link for link in links if link.is_alive and (link.is_dealt or not link.is_up)]
