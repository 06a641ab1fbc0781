"""Mark a replica's events and outcomes: who it was, and who died at a job; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hyimg_cli.spec.events import (
    Event,
    JobEnded,
    ModelLoaded,
    ModelLoading,
    ModelReleased,
    Prewarmed,
    PromptsReady,
)

Deaths = Mapping[str, Sequence[str]]


def marked(event: Event, number: int, deaths: Deaths) -> Event:
    """The event as one of replica `number`; that others died at a job is among its warnings."""
    match event:
        case ModelLoading() | ModelLoaded() | ModelReleased() | Prewarmed() | PromptsReady():
            return replace(event, replica=number)
        case JobEnded():
            died = deaths.get(event.outcome.custom_id, ())
            told = tuple(f"{who} died at this job; it was dispatched again" for who in died)
            warnings = event.outcome.warnings + told
            return JobEnded(replace(event.outcome, replica=number, warnings=warnings))
        case _:
            return event
