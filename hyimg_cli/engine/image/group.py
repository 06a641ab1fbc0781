"""Jobs of one model and size at work together: some think, some wait to draw, one batch draws.

    waiting ─ opened ─▶ thinking ─ one token each, together ─▶ ready ─ all steps, together ─▶ drawn
              (joins as soon as a row is free)   (leaves when its text ends)
    K/V                 context                                context  branches

As many think as one size says and as many draw as another: a decode step gains from every row, a
denoise step is full with few pictures, and branches take more memory than contexts. A job that
fails leaves the group; the others go on as if it had never been there.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import denoise
from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.crew import Lost
from hyimg_cli.engine.image.stages import (
    Drawing,
    Picture,
    Prefilled,
    Ready,
    Studio,
    drawing,
    finished,
    opened,
    ready,
)
from hyimg_cli.engine.image.think import TextLoop, Writer, reading_lag
from hyimg_cli.models.protocols import LivePicture
from hyimg_cli.spec.events import DenoiseStep, JobStarted, PhaseStarted, Progress, ThinkToken
from hyimg_cli.spec.job import ImageJob

logger = logging.getLogger(__name__)
Work = TypeVar("Work", Prefilled, Drawing)


@dataclass(frozen=True)
class Drawn:
    """A job's picture is there; it is not written yet."""

    job: ImageJob
    clock: PhaseClock
    picture: Picture


class GroupRun:
    """One group's jobs on their way: at most `batch_size` think, at most `draw_size` draw."""

    def __init__(
        self,
        jobs: Iterable[ImageJob],
        studio: Studio,
        *,
        batch_size: int,
        draw_size: int | None = None,
        new_clock: Callable[[], PhaseClock],
        read_lag: int | None = None,
    ) -> None:
        """`draw_size`: by default as many draw as think. `read_lag`: see `TextLoop`; by default
        what suits the model's device.
        """
        self._waiting = deque(jobs)
        self._thinking: list[Prefilled] = []
        self._ready: deque[Ready] = deque()
        self._studio = studio
        self._think_size = batch_size
        self._draw_size = batch_size if draw_size is None else draw_size
        self._new_clock = new_clock
        lag = reading_lag(studio.model.layer_devices) if read_lag is None else read_lag
        self._loop = TextLoop(studio.model, lag=lag)

    def run(self) -> Iterator[Progress | Drawn | Lost]:
        """Every job's way, in as few forwards as the batch sizes allow."""
        while self._waiting or self._thinking or self._ready:
            yield from self._open_more()
            yield from self._write_on()
            is_full = len(self._ready) >= self._draw_size
            if self._ready and (is_full or not (self._waiting or self._thinking)):
                yield from self._draw(self._next_batch())

    def _open_more(self) -> Iterator[Progress | Lost]:
        """Waiting jobs take the free rows."""
        while self._waiting and self._has_room:
            job, clock = self._waiting.popleft(), self._new_clock()
            yield JobStarted(job.custom_id)
            yield PhaseStarted(job.custom_id, "prefill")
            try:
                work = opened(job, self._studio, clock)
            except Exception as error:
                yield Lost(job, clock, error)
                continue
            if work.writer is None:
                yield from self._make_ready(work)
            else:
                yield PhaseStarted(job.custom_id, "think")
                clock.enter("think")
                self._thinking.append(work)

    @property
    def _has_room(self) -> bool:
        # A batch that is ready to draw lets go of its contexts first; see `footprint.Needs`.
        return len(self._thinking) < self._think_size and len(self._ready) < self._draw_size

    def _write_on(self) -> Iterator[Progress | Drawn | Lost]:
        """A token for every job that thinks; those whose text has ended leave."""
        at_once = list(self._thinking)
        for batch in _batches(at_once, self._think_size):
            yield from self._written(batch)
        for work in list(self._thinking):
            if _writer(work).is_done:
                self._thinking.remove(work)
                yield from self._make_ready(work)

    def _written(self, batch: list[Prefilled]) -> Iterator[Progress | Drawn | Lost]:
        failure = None
        try:
            told = self._loop.step([_writer(work) for work in batch])
        except Exception as error:
            failure, told = _let_go(error, batch), self._loop.settle()
        for work in self._thinking:
            if _writer(work) in told:
                yield ThinkToken(work.job.custom_id, _writer(work).count)
        for work in batch:
            work.think_batch = max(work.think_batch, len(batch))
        left = [work for work in batch if not _writer(work).is_done]
        if failure is not None and left:
            if _is_short_of_memory(failure, left):
                self._think_size = len(left) // 2
            yield from self._halved(left, failure, self._written)

    def _make_ready(self, work: Prefilled) -> Iterator[Lost]:
        try:
            self._ready.append(ready(work, self._studio))
        except Exception as error:
            yield Lost(work.job, work.clock, error)

    def _next_batch(self) -> list[Ready]:
        """The jobs that can draw together with the one that has waited longest."""
        key = self._ready[0].draws_with
        fits = [work for work in self._ready if work.draws_with == key]
        batch = fits[: self._draw_size]
        self._ready = deque(work for work in self._ready if work not in batch)
        return batch

    def _draw(self, batch: list[Ready]) -> Iterator[Progress | Drawn | Lost]:
        standing = yield from self._standing(batch)
        if standing:
            yield from self._denoised(standing)

    def _standing(self, batch: list[Ready]) -> Generator[Progress | Lost, None, list[Drawing]]:
        """The jobs of a batch with their branches; what memory is short of goes on waiting."""
        standing: list[Drawing] = []
        # Each leaves the batch: nothing holds a context whose branches stand.
        while batch:
            work, failure = batch.pop(0), None
            try:
                standing.append(drawing(work, self._studio))
            except Exception as error:
                failure = error
            if failure is None:
                continue
            if standing and isinstance(failure, torch.OutOfMemoryError):
                _let_go(failure, [work, *standing])
                self._ready.extendleft(reversed([work, *batch]))
                self._draw_size = len(standing)
                _note(standing, f"no memory to draw more than {len(standing)} together")
                break
            yield Lost(work.job, work.clock, failure)
        return standing

    def _denoised(self, batch: list[Drawing]) -> Iterator[Progress | Drawn | Lost]:
        for work in batch:
            work.denoise_batch = len(batch)
            yield PhaseStarted(work.job.custom_id, "denoise", work.job.num_inference_steps)
        latents, steps = [work.track.noise_CYX for work in batch], 0
        failure = None
        try:
            _enter(batch, "denoise_first")
            for moved in denoise([work.track for work in batch], self._velocities(batch)):
                latents, steps = moved, steps + 1
                if steps == 1:
                    _enter(batch, "denoise_rest")
                for work in batch:
                    yield DenoiseStep(work.job.custom_id, steps, work.job.num_inference_steps)
            _enter(batch, "queue")
        except Exception as error:
            failure = _let_go(error, batch)
        if failure is not None:
            if _is_short_of_memory(failure, batch):
                self._draw_size = len(batch) // 2
            yield from self._halved(batch, failure, self._denoised)
            return
        for work in batch:
            work.let_go()
        for work, latents_CYX in zip(batch, latents, strict=True):
            yield self._finished(work, latents_CYX, steps)

    def _velocities(
        self, batch: Sequence[Drawing]
    ) -> Callable[[Sequence[Tensor], Sequence[Step]], list[Tensor]]:
        def velocities(latents: Sequence[Tensor], steps: Sequence[Step]) -> list[Tensor]:
            return self._studio.model.velocities(
                [
                    LivePicture(x_CYX, step, work.job.guidance_scale, work.branches.items)
                    for work, x_CYX, step in zip(batch, latents, steps, strict=True)
                ]
            )

        return velocities

    def _finished(self, work: Drawing, latents_CYX: Tensor, steps: int) -> Drawn | Lost:
        try:
            return Drawn(work.job, work.clock, finished(work, latents_CYX, steps, self._studio))
        except Exception as error:
            return Lost(work.job, work.clock, error)

    def _halved(
        self,
        batch: list[Work],
        error: Exception,
        again: Callable[[list[Work]], Iterator[Progress | Drawn | Lost]],
    ) -> Iterator[Progress | Drawn | Lost]:
        """A batch that failed, in halves, down to the job whose fault it is."""
        if len(batch) == 1:
            self._thinking = [work for work in self._thinking if work is not batch[0]]
            yield Lost(batch[0].job, batch[0].clock, error)
            return
        half = len(batch) // 2
        what = "out of memory" if isinstance(error, torch.OutOfMemoryError) else repr(error)
        _note(batch, f"a batch of {len(batch)} failed ({what}); it went on in halves")
        for part in (batch[:half], batch[half:]):
            yield from again(part)


def _batches(works: list[Prefilled], size: int) -> Iterator[list[Prefilled]]:
    return (works[first : first + size] for first in range(0, len(works), size))


def _is_short_of_memory(error: Exception, batch: Sequence[object]) -> bool:
    """Whether fewer together may do what these could not."""
    return len(batch) > 1 and isinstance(error, torch.OutOfMemoryError)


def _note(batch: Sequence[Prefilled] | Sequence[Drawing], note: str) -> None:
    logger.warning(note)
    for work in batch:
        work.notes.append(note)


def _let_go(error: Exception, batch: Sequence[object]) -> Exception:
    """The error, without the frames that keep a failed batch's activations alive while its halves
    are tried. A job alone keeps them: they tell where its fault is.
    """
    if len(batch) > 1:
        error.__traceback__ = error.__context__ = None
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    return error


def _writer(work: Prefilled) -> Writer:
    assert work.writer is not None, "a job that thinks has text to write"
    return work.writer


def _enter(batch: Sequence[Drawing], phase: str) -> None:
    for work in batch:
        work.clock.enter(phase)
