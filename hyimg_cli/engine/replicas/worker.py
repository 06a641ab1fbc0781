"""A replica as the run sees it: whether it is up, and the jobs it has; no process is known here."""

from dataclasses import dataclass, field

from hyimg_cli.engine.replicas.messages import FromReplica, Pending
from hyimg_cli.parallel.watch import Beat
from hyimg_cli.spec.events import Event, JobEnded, JobStarted
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan

# A replica that dies so often without a finished job in between is not started again.
_MOST_DEATHS_IN_A_ROW = 3


@dataclass(eq=False)
class Worker:
    """Number `number` of the replicas: one process after another, where it dies and is replaced.

    `heard_at`: when it said something last, or was started, where it `was_heard` not yet; while it
    waits for room it is not started yet.
    """

    number: int
    model: str | None = None
    is_alive: bool = False
    is_up: bool = False
    has_work: bool = False
    heard_at: float = 0.0
    was_heard: bool = False
    beat: Beat = field(default_factory=Beat)
    _deaths_in_a_row: int = 0
    _jobs: dict[str, Job] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)

    @property
    def is_at_risk(self) -> bool:
        """True if work would be lost with its process."""
        return bool(self._begun)

    @property
    def may_return(self) -> bool:
        """True unless it dies again and again: whatever is wrong, it is not a job."""
        return self._deaths_in_a_row < _MOST_DEATHS_IN_A_ROW

    def started(self, now: float) -> None:
        self.is_alive, self.is_up, self.was_heard = True, False, False
        self.model, self.heard_at, self.beat = None, now, Beat()

    def heard(self, message: FromReplica, now: float) -> None:
        self.heard_at, self.was_heard = now, not isinstance(message, Pending)

    def assigned(self, piece: Plan) -> None:
        self._jobs = {job.custom_id: job for job in piece.jobs}
        self.model, self.has_work = piece.groups[0].model, True

    def note(self, event: Event) -> None:
        """Keep account of which jobs are in hand."""
        if isinstance(event, JobStarted):
            self._begun.add(event.custom_id)
        elif isinstance(event, JobEnded):
            self._jobs.pop(event.outcome.custom_id, None)
            self._begun.discard(event.outcome.custom_id)
            self._deaths_in_a_row = 0

    def finished(self) -> None:
        """The piece has ended."""
        self.has_work = False
        self._jobs, self._begun = {}, set()

    def refused(self) -> None:
        """It finds on its machine what the run's others do not: another one there would, too."""
        self._deaths_in_a_row = _MOST_DEATHS_IN_A_ROW

    def died(self) -> tuple[list[Job], list[Job]]:
        """Its process is gone: the jobs that it worked on, and those that it had not begun."""
        begun = [job for name, job in self._jobs.items() if name in self._begun]
        waiting = [job for name, job in self._jobs.items() if name not in self._begun]
        self._deaths_in_a_row += 1
        self.is_alive = self.is_up = False
        self.finished()
        return begun, waiting
