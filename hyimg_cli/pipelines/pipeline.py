"""Pipelines, one for pictures and one for videos: a loaded model at work on one kind of job.

A pipeline knows its kind of job from shape to pixels and line; the session knows the plan, the
folder and the journal.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.pipelines.queue import JobQueue
from hyimg_cli.pipelines.ranks import ModelRanks
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, ModelLoaded, OutputFile, Prewarmed
from hyimg_cli.spec.job import Job

if TYPE_CHECKING:
    from hyimg_cli.models.common.model import DecoderModel
    from hyimg_cli.models.latent import LatentModel

Model = TypeVar("Model", bound="DecoderModel | LatentModel")
OneJob = TypeVar("OneJob", bound=Job)
Done = TypeVar("Done", bound=Request[Any])


class Pipeline(ABC, Generic[Model, OneJob, Done]):
    """A model at work on groups of one kind of job; what its jobs share is its own."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._model: Model | None = None
        self._ranks: ModelRanks | None = None
        # Shapes that were run once already.
        self._warmed: set[Any] = set()
        # Jobs come at any time.
        self._serves = False

    @property
    def model(self) -> str | None:
        """The model that is loaded."""
        return None if self._model is None else self._model.card.model

    @abstractmethod
    def use(self, model: str, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Event]:
        """Have `model` loaded, and what all of the plan's `jobs` for it need at once; `folder` may
        hold a part of them.
        """

    def prepare(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Prewarmed]:
        """Get ready for a group; its shapes are run once where that was asked for."""
        self._revive()
        self._fit(jobs)
        if self._config.batch.prewarm:
            started = time.perf_counter()
            warmed = self._prewarm(jobs, folder)
            if warmed.shapes or warmed.graphs:
                yield replace(warmed, prewarm_s=time.perf_counter() - started)

    def prepare_to_serve(self, jobs: Sequence[OneJob]) -> Iterator[Prewarmed]:
        """Get ready for jobs like these, none of which needs more than the largest, as many of each
        as there is room for.
        """
        self._serves = True
        yield from self.prepare([*jobs] * (2 * self._config.batch.max_size), None)

    @abstractmethod
    def work(
        self, jobs: Sequence[OneJob], folder: JobFolder | None, started: float
    ) -> Iterator[Event | Done | Lost[OneJob]]:
        """A group's jobs on their way; `started` is where their clocks begin."""

    @abstractmethod
    def serve(self, queue: JobQueue) -> None:
        """Work on jobs as they come, until the queue is closed and nothing is at work; tickets are
        told of what becomes of them.
        """

    @abstractmethod
    def write(self, done: Done, folder: JobFolder) -> OutputFile | None:
        """Put a finished job's pixels into the folder, where it has some; called in a thread of its
        own.
        """

    @abstractmethod
    def line_fields(self, done: Done) -> dict[str, Any]:
        """Fields of a finished job's line that only its kind of job has; `warnings` are added to
        the request's own.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop what earlier jobs left in memory for later ones; the model stays."""

    def release(self) -> None:
        """Let the model and all that hangs on it go."""
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None
        if self._model is not None:
            self._model = None
            self.forget()
            self._warmed.clear()
            gc.collect()

    @abstractmethod
    def cache_counts(self) -> dict[str, dict[str, int]]:
        """By kind, what was found in memory, was found on disk, had to be made until now."""

    @abstractmethod
    def peak_memory_mb(self) -> float:
        """The most memory that was in use until now."""

    def _fit(self, jobs: Sequence[OneJob]) -> None:
        """Settle how many of a group's jobs are at work together."""

    def _prewarm(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> Prewarmed:
        """Run a group's new shapes once; its seconds are counted around it."""
        return Prewarmed(0, 0.0)

    def _revive(self) -> None:
        """Ranks that have ended since the last job, or left for another pool's, start again."""
        if self._ranks is not None:
            self._ranks.revive()

    def _resident(self) -> Model:
        assert self._model is not None, "a model is loaded before its jobs run"
        return self._model

    def _loaded(self, load_s: float, ranks: int, precision: str = "") -> ModelLoaded:
        model = self._resident()
        return ModelLoaded(
            model=model.card.model,
            load_s=load_s,
            device=model.device_name,
            dtype=precision or model.dtype_name,
            parameters=model.parameter_count,
            ranks=ranks,
        )
