"""Which jobs are at work and how far each is, told in one line for each phase."""

from collections.abc import Iterator
from dataclasses import replace

from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Progress


class Underway:
    """The jobs between their start and their end, the one that moved last behind the others."""

    def __init__(self) -> None:
        self._jobs: dict[str, Progress] = {}

    def add(self, event: Event) -> None:
        match event:
            case JobStarted(name):
                self._move(Progress(name, "start"))
            case Progress() if event.custom_id:
                self._move(event)
            case JobEnded(outcome):
                self._jobs.pop(outcome.custom_id, None)
            case _:
                pass

    def lines(self) -> Iterator[Progress]:
        """The progress of each phase that has jobs: of its job, or of several that moved last."""
        for phase in sorted({at.phase for at in self._jobs.values()}):
            at_work = [at for at in self._jobs.values() if at.phase == phase]
            many = f"{len(at_work)} jobs"
            yield at_work[0] if len(at_work) == 1 else replace(at_work[-1], custom_id=many)

    @property
    def drawn(self) -> float:
        """Denoise steps done by the jobs at work, in pictures."""
        return sum(at.done / at.total for at in self._jobs.values() if at.total)

    def _move(self, at: Progress) -> None:
        self._jobs.pop(at.custom_id, None)
        self._jobs[at.custom_id] = at
