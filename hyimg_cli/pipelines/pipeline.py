"""Pipelines, for pictures and for videos: a loaded model that runs one kind of job.

A pipeline knows its kind of job, from shape to pixels and line. The session knows the plan, the
folder and the journal.
"""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hyimg_cli.errors import HyimgError, MachineError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import key_of
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.queue import TicketQueue
from hyimg_cli.pipelines.ranks import ModelRanks
from hyimg_cli.pipelines.request import Request
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, ModelLoaded, OutputFile, Prewarmed, TextFile
from hyimg_cli.spec.job import Job

if TYPE_CHECKING:
    from hyimg_cli.models.common.model import DecoderModel
    from hyimg_cli.models.latent import LatentModel

logger = logging.getLogger(__name__)
# Letters of a library's error in a warning.
_MOST_SAID = 300
Model = TypeVar("Model", bound="DecoderModel | LatentModel")
OneJob = TypeVar("OneJob", bound=Job)
Done = TypeVar("Done", bound=Request[Any])


class Pipeline(ABC, Generic[Model, OneJob, Done]):
    """Runs groups of one kind of job with a model; owns what its jobs share."""

    def __init__(self, config: RunConfig) -> None:
        # The run, and the same with what its model took by itself to fit.
        self._config = self.fitted = config
        self._model: Model | None = None
        self._ranks: ModelRanks | None = None
        # Shapes that have been run once.
        self._warmed: set[Any] = set()
        # True once a stop was requested: latents are saved after the current step.
        self.is_stopping = False
        # True for a server, where jobs arrive at any time.
        self._serves = False

    @property
    def model(self) -> str | None:
        """The name of the loaded model; None if no model is loaded."""
        return None if self._model is None else self._model.card.model

    @abstractmethod
    def use(self, model: str, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Event]:
        """Load `model`, and prepare what all of the plan's `jobs` for it need at once.

        `folder` may hold a part of it already.
        """

    def prepare(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Prewarmed]:
        """Prepare for a group; run its shapes once if configured."""
        self._revive()
        self._fit(jobs)
        asked = self._config.batch.prewarm
        if self._gains_by_prewarming() if asked is None else asked:
            started = time.perf_counter()
            with Attempt() as tried:
                warmed = self._prewarm(jobs, folder)
            if tried.error is not None:
                self._tell_lost(tried.error)
            elif warmed.shapes or warmed.graphs:
                yield replace(warmed, prewarm_s=time.perf_counter() - started)

    def prepare_to_serve(self, jobs: Sequence[OneJob]) -> Iterator[Prewarmed]:
        """Prepare for jobs like these, for as many of each as fit into memory.

        No later job may need more than the largest of them.
        """
        self._serves = True
        yield from self.prepare([*jobs] * (2 * self._config.batch.max_size), None)

    @abstractmethod
    def work(self, queue: TicketQueue) -> Iterator[None]:
        """Run the queue's jobs, until no more can come and nothing is at work.

        Each ticket is told the events of its job, one of them before each yield. A caller that
        closes the iterator ends the jobs at work.
        """

    @abstractmethod
    def write(self, done: Done, folder: JobFolder) -> Sequence[OutputFile | TextFile]:
        """Write a finished job's pixels or answer, if any; called in a separate thread.

        Returns its files; none of a job without either.
        """

    @abstractmethod
    def line_fields(self, done: Done) -> dict[str, Any]:
        """Return the line fields that only this kind of job has.

        `warnings` among them are added to the request's own.
        """

    def checkpoint_of(
        self, work: Request[Any], folder: JobFolder | None
    ) -> LatentsCheckpoint | None:
        """Return the place for a request's latents, once its sources are read; None without one."""
        if folder is None:
            return None
        key = key_of(work.job, work.sources_as_read, self._config)
        path = folder.latents_for(work.job.custom_id, work.job.part)
        every = self._config.output.checkpoint_every
        return LatentsCheckpoint(
            path, key, every, work.notes, work.warnings, is_stopping=lambda: self.is_stopping
        )

    @abstractmethod
    def forget(self) -> None:
        """Drop what earlier jobs left in memory for later ones; the model stays."""

    def release(self) -> None:
        """Free the model and everything that depends on it."""
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
        """Return by kind how often items were in memory, were on disk, or had to be made so far."""

    @abstractmethod
    def peak_memory_mb(self) -> float:
        """Return the peak memory use so far, in MB."""

    def _gains_by_prewarming(self) -> bool:
        """Return True if a shape's first forward takes longer than later ones by enough."""
        return False

    def _tell_lost(self, error: Exception) -> None:
        """Warn that prewarming failed, unless a job itself will fail and report the cause.

        Raises MachineError.
        """
        if isinstance(error, MachineError):
            raise error
        if not isinstance(error, HyimgError):
            said = " ".join(str(error).split())[:_MOST_SAID]
            logger.warning(
                "prewarming failed (%s: %s): the jobs run without it", type(error).__name__, said
            )

    def _fit(self, jobs: Sequence[OneJob]) -> None:
        """Decide how many of a group's jobs work together."""

    def _prewarm(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> Prewarmed:
        """Run a group's new shapes once; the caller measures the seconds."""
        return Prewarmed(0, 0.0)

    def _revive(self) -> None:
        """Restart ranks that have ended since the last job, or were stopped for another pool."""
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
