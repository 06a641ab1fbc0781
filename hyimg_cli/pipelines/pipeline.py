"""Pipelines, one for pictures and one for videos: a loaded model at work on one kind of job.

A pipeline knows its kind of job from shape to pixels; the session knows the plan, the folder and
the journal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.outcomes import Facts
from hyimg_cli.spec.events import Event, Outcome, OutputFile, Prewarmed, Progress
from hyimg_cli.spec.job import Job

OneJob = TypeVar("OneJob", bound=Job, contravariant=True)


@dataclass(frozen=True)
class Lost:
    """A job failed; `notes` stand in its line beside the error."""

    job: Job
    clock: PhaseClock
    error: Exception
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """A job's pixels are there, not written yet.

    `write` puts them into the folder, in a thread of its own (None: the line is all there is), and
    `settle` follows the job's line;
    `outcome` is that line. `source_digests` are those of the images that were read, `notes_if_lost`
    for the line of a job that cannot be written.
    """

    job: Job
    clock: PhaseClock
    write: Callable[[JobFolder], OutputFile] | None
    outcome: Callable[[OutputFile | None, Facts], Outcome]
    source_digests: tuple[str, ...] = ()
    settle: Callable[[], None] = lambda: None
    notes_if_lost: tuple[str, ...] = ()


class Pipeline(Protocol[OneJob]):
    """A model at work on groups of one kind of job; what its jobs share is its own."""

    @property
    def model(self) -> str | None:
        """The model that is loaded."""

    def use(self, model: str, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Event]:
        """Have `model` loaded, and what all of the plan's `jobs` for it need at once; `folder` may
        hold a part of them.
        """

    def forget(self) -> None:
        """Drop what earlier jobs left in memory for later ones; the model stays."""

    def release(self) -> None:
        """Let the model and all that hangs on it go."""

    def prepared(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Prewarmed]:
        """Get ready for a group; its shapes are run once where that was asked for."""

    def work(
        self, jobs: Sequence[OneJob], folder: JobFolder | None, started: float
    ) -> Iterator[Progress | Made | Lost]:
        """A group's jobs on their way; `started` is where their clocks begin."""

    def cache_counts(self) -> dict[str, dict[str, int]]:
        """By kind, what was found in memory, was found on disk, had to be made until now."""

    def peak_memory_mb(self) -> float:
        """The most memory that was in use until now."""
