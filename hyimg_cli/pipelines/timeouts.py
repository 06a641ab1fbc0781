"""Jobs that work longer than a run allows: which are overdue, and the error with which they end."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hyimg_cli.errors import JobError
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.queue import Dropped, EngineEvent
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.settings.kinds import seconds_in
from hyimg_cli.spec.events import Event, JobStarted
from hyimg_cli.spec.job import Job


class JobTimeout:
    """Knows since when each job is at work, by the events that are told of it.

    A job in a batch works for as long as the batch: the steps of the others count, too.
    """

    def __init__(
        self,
        limit: str | None,
        jobs: Mapping[str, Job],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: the time that a job may take, such as `10m`; None for any."""
        self._limit, self._jobs, self._clock = limit, jobs, clock
        # When each job that is at work began; a job that was dropped is not overdue again.
        self._began: dict[str, float] = {}

    def heed(self, event: EngineEvent) -> Event | Request[Any] | Lost[Any]:
        """Return the event; the end of a job that was dropped is its failure."""
        if isinstance(event, Dropped):
            return self._lost(self._jobs[event.custom_id])
        if isinstance(event, JobStarted):
            self._began[event.custom_id] = self._clock()
        elif isinstance(event, Request):
            self._began.pop(event.job.custom_id, None)
        return event

    def overdue(self) -> Iterator[str]:
        """Yield jobs that have worked for longer than allowed, each once."""
        if self._limit is None:
            return
        latest = self._clock() - seconds_in(self._limit)
        for name in [name for name, began in self._began.items() if began < latest]:
            del self._began[name]
            yield name

    def _lost(self, job: Job) -> Lost[Any]:
        error = JobError(
            f"it worked for longer than the {self._limit} of --job-timeout",
            hint="allow more time, then use --retry-failed: it continues from its saved latents",
            code="job.timeout",
            retryable=True,
        )
        return Lost(job, PhaseClock(time.perf_counter(), lambda: None), error=error)
