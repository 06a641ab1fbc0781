"""Which jobs are at work and how far each is, told in one line for each phase."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Progress


@dataclass(frozen=True)
class PhaseLine:
    """How far a job is, or of several in one phase the one that moved last. `total` is 0 where
    nobody knows it.
    """

    phase: str
    who: str
    completed: int = 0
    total: int = 0

    @property
    def count(self) -> str:
        """How far in words; empty where nothing is counted yet."""
        if self.total:
            return f"step {self.completed}/{self.total}"
        return f"{self.completed} tokens" if self.completed else ""


class Underway:
    """The jobs between their start and their end, the one that moved last behind the others."""

    def __init__(self) -> None:
        self._jobs: dict[str, PhaseLine] = {}

    def add(self, event: Event) -> None:
        match event:
            case JobStarted(name):
                self._move(PhaseLine("start", name))
            case Progress(name, phase, done, total) if name:
                self._move(PhaseLine(phase, name, done, total))
            case JobEnded(outcome):
                self._jobs.pop(outcome.custom_id, None)
            case _:
                pass

    def lines(self) -> Iterator[PhaseLine]:
        """A line for each phase that has jobs, by name."""
        for phase in sorted({at.phase for at in self._jobs.values()}):
            at_work = [at for at in self._jobs.values() if at.phase == phase]
            many = f"{len(at_work)} jobs"
            yield at_work[0] if len(at_work) == 1 else replace(at_work[-1], who=many)

    @property
    def drawn(self) -> float:
        """Denoise steps done by the jobs at work, in pictures."""
        return sum(at.completed / at.total for at in self._jobs.values() if at.total)

    def _move(self, at: PhaseLine) -> None:
        self._jobs.pop(at.who, None)
        self._jobs[at.who] = at
