"""Which jobs are at work and how far each is, told in one line for each phase."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hyimg_cli.spec.events import (
    DenoiseStep,
    Event,
    JobDone,
    JobFailed,
    JobStarted,
    PhaseStarted,
    ThinkToken,
)


@dataclass(frozen=True)
class At:
    """How far a job is. `total` is 0 where nobody knows it."""

    phase: str
    completed: int = 0
    total: int = 0

    @property
    def count(self) -> str:
        """The same in words; empty where nothing is counted yet."""
        if self.total:
            return f"step {self.completed}/{self.total}"
        return f"{self.completed} tokens" if self.completed else ""


@dataclass(frozen=True)
class PhaseLine:
    """The jobs that are in one phase, and how far the one is that moved last."""

    who: str
    at: At


class Underway:
    """The jobs between their start and their end, the one that moved last behind the others."""

    def __init__(self) -> None:
        self._jobs: dict[str, At] = {}

    def add(self, event: Event) -> None:
        match event:
            case JobStarted():
                self._move(event.custom_id, At("start"))
            case PhaseStarted():
                self._move(event.custom_id, At(event.phase, total=event.total))
            case ThinkToken():
                self._move(event.custom_id, At("think", event.count))
            case DenoiseStep():
                at = self._jobs.get(event.custom_id, At("denoise"))
                at = replace(at, completed=event.step, total=event.total)
                self._move(event.custom_id, at)
            case JobDone() | JobFailed():
                self._jobs.pop(event.outcome.custom_id, None)
            case _:
                pass

    def lines(self) -> Iterator[PhaseLine]:
        """A line for each phase that has jobs, by name."""
        for phase in sorted({at.phase for at in self._jobs.values()}):
            names = [name for name, at in self._jobs.items() if at.phase == phase]
            who = names[0] if len(names) == 1 else f"{len(names)} jobs"
            yield PhaseLine(who, self._jobs[names[-1]])

    @property
    def drawn(self) -> float:
        """Denoise steps done by the jobs at work, in pictures."""
        return sum(at.completed / at.total for at in self._jobs.values() if at.total)

    def _move(self, custom_id: str, at: At) -> None:
        self._jobs.pop(custom_id, None)
        self._jobs[custom_id] = at
