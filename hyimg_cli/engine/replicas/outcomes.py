"""Mark a replica's events and outcomes: who it was, and who died at a job; no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hyimg_cli.errors import ReplicaError
from hyimg_cli.spec.events import (
    Event,
    Failure,
    JobDone,
    JobFailed,
    ModelLoaded,
    ModelLoading,
    ModelReleased,
    Outcome,
    Prewarmed,
    PromptsReady,
)
from hyimg_cli.spec.job import Job

Deaths = Mapping[str, Sequence[str]]


def marked(event: Event, number: int, deaths: Deaths) -> Event:
    """The event as one of replica `number`; that others died at a job is among its warnings."""
    match event:
        case ModelLoading() | ModelLoaded() | ModelReleased() | Prewarmed() | PromptsReady():
            return replace(event, replica=number)
        case JobDone() | JobFailed():
            died = deaths.get(event.outcome.custom_id, ())
            told = tuple(f"{who} died at this job; it was dispatched again" for who in died)
            warnings = event.outcome.warnings + told
            return type(event)(replace(event.outcome, replica=number, warnings=warnings))
        case _:
            return event


def died_twice(job: Job, key: str, attempt: int, deaths: Sequence[str]) -> Outcome:
    """The line of a job that replicas died at until nobody tried any more."""
    error = ReplicaError(
        f"the processes that worked on it died: {', then '.join(deaths)}",
        hint="memory may be short (signal 9): look at the system's log, then --retry-failed with "
        "fewer --replicas or a smaller --batching-max-size",
        code="replica.died",
        retryable=True,
    )
    return Outcome(
        custom_id=job.custom_id,
        status="failed",
        key=key,
        attempt=attempt,
        error=Failure.of(error),
        metadata=json.loads(job.metadata_json),
        extra=json.loads(job.extra_json),
    )
