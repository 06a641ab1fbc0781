"""Jobs of several drawings: each is a ticket of its own, and their ends are one end.

A pipeline draws one picture per ticket. So a job of several crops is put into the queue as several
jobs, and whoever waits for it is told of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from hyimg_cli.pipelines.queue import Dropped, EngineEvent, Ticket
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import Job

_STEPS = "denoise"


def tickets_of(job: Job, tell: Callable[[EngineEvent], object], **facts: Any) -> list[Ticket]:
    """Return the tickets of a job, one for each drawing; `facts` are further fields of each.

    `tell` gets the events of the whole job, and exactly one end.
    """
    parts: Sequence[Any] = job.parts
    if len(parts) == 1:
        return [Ticket(job, tell=tell, **facts)]
    joined = _Joined(job, len(parts), tell)
    return [Ticket(part, tell=joined.teller(n), **facts) for n, part in enumerate(parts)]


class _Joined:
    """Tells of a job from what is told of its parts, by any thread."""

    def __init__(self, job: Job, count: int, tell: Callable[[EngineEvent], object]) -> None:
        self._job, self._tell, self._lock = job, tell, Lock()
        self._has_begun = False
        self._steps = [(0, 0)] * count
        self._ends: list[Request[Any] | Dropped | None] = [None] * count

    def teller(self, part: int) -> Callable[[EngineEvent], object]:
        """Return who is told of one part."""
        return lambda event: self._take(part, event)

    def _take(self, part: int, event: EngineEvent) -> None:
        with self._lock:
            if (told := self._of_job(part, event)) is not None:
                self._tell(told)

    def _of_job(self, part: int, event: EngineEvent) -> EngineEvent | None:
        """Return what an event of a part says of the job; None for nothing yet."""
        match event:
            case JobStarted() if self._has_begun:
                return None
            case JobStarted():
                self._has_begun = True
            case Progress() if event.phase == _STEPS:
                self._steps[part] = event.done, event.total
                done = sum(done for done, _ in self._steps)
                return replace(event, done=done, total=event.total * len(self._steps))
            case Request() | Dropped():
                self._ends[part] = event
                ends = [end for end in self._ends if end is not None]
                return self._end(ends) if len(ends) == len(self._ends) else None
        return event

    def _end(self, ends: list[Request[Any] | Dropped]) -> EngineEvent:
        """Return the end of the job: of what was lost or dropped, or of all drawings together."""
        works = [end for end in ends if isinstance(end, Request)]
        if len(works) < len(ends):
            return next(end for end in ends if isinstance(end, Dropped))
        whole = next((work for work in works if isinstance(work, Lost)), works[0])
        whole.join([work for work in works if work is not whole])
        whole.job = self._job
        return whole
