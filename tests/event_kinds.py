"""Kinds of events that tests pick from a run's."""

from hyimg_cli.spec.events import JobEnded, Progress


def is_done(event: object) -> bool:
    """A job was done; one that failed was not."""
    return isinstance(event, JobEnded) and event.is_done


def is_step(event: object) -> bool:
    """A denoise step of a job is over."""
    return isinstance(event, Progress) and event.phase == "denoise" and event.done > 0


def is_token(event: object) -> bool:
    """A job wrote a token."""
    return isinstance(event, Progress) and event.phase == "think" and event.done > 0


def is_embedded(event: object) -> bool:
    """A prompt or start picture of the plan was embedded."""
    return isinstance(event, Progress) and event.phase == "embed"
