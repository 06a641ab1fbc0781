"""Pipelines, one for pictures and one for videos: a loaded model at work on one kind of job.

A pipeline knows its kind of job from shape to pixels and line; the session knows the plan, the
folder and the journal.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.pipelines.outcomes import Facts
from hyimg_cli.pipelines.request import Finished, Lost
from hyimg_cli.spec.events import Event, Outcome, OutputFile, Prewarmed, Progress
from hyimg_cli.spec.job import Job

OneJob = TypeVar("OneJob", bound=Job, contravariant=True)
Done = TypeVar("Done", bound=Finished[Any])


class Pipeline(Protocol[OneJob, Done]):
    """A model at work on groups of one kind of job; what its jobs share is its own."""

    @property
    def model(self) -> str | None:
        """The model that is loaded."""

    def use(self, model: str, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Event]:
        """Have `model` loaded, and what all of the plan's `jobs` for it need at once; `folder` may
        hold a part of them.
        """

    def prepare(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Prewarmed]:
        """Get ready for a group; its shapes are run once where that was asked for."""

    def work(
        self, jobs: Sequence[OneJob], folder: JobFolder | None, started: float
    ) -> Iterator[Progress | Done | Lost[Any]]:
        """A group's jobs on their way; `started` is where their clocks begin."""

    def write(self, done: Done, folder: JobFolder) -> OutputFile:
        """Put a finished job's pixels into the folder; called in a thread of its own."""

    def outcome(self, done: Done, output: OutputFile | None, facts: Facts) -> Outcome:
        """The line of a finished job; `output` is None where nothing was written."""

    def forget(self) -> None:
        """Drop what earlier jobs left in memory for later ones; the model stays."""

    def release(self) -> None:
        """Let the model and all that hangs on it go."""

    def cache_counts(self) -> dict[str, dict[str, int]]:
        """By kind, what was found in memory, was found on disk, had to be made until now."""

    def peak_memory_mb(self) -> float:
        """The most memory that was in use until now."""
