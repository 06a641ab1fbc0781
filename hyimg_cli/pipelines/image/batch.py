"""Jobs of one model and size at work together: some think, some wait to draw, one batch draws.

    waiting ─ prefill ─▶ thinking ─ a token each, together ─▶ ready ─ all steps, together ─▶ decoded
              (joins as soon as a row is free)   (leaves when its text ends)
    K/V                 context                                context  branches

As many think as one size says and as many draw as another: a decode step gains from every row, a
denoise step is full with few pictures, and branches take more memory than contexts. A job that
fails leaves the group; the others go on as if it had never been there.

Out of memory, in this order, none of which changes a pixel: fewer together; the shared prefixes
dropped; a picture decoded behind all others. Then the job is lost. Tiles are other pixels, and so
another run: only who asks for them gets them.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import denoise
from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.models.protocols import LivePicture
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.stages import (
    Decoded,
    Denoising,
    Generated,
    ImageStages,
    Prefilled,
    decode,
    prefill,
    with_branches,
    with_text,
)
from hyimg_cli.pipelines.image.think import DecodeLoop, Decoding, reading_lag
from hyimg_cli.pipelines.pipeline import Lost
from hyimg_cli.spec.events import DenoiseStep, JobStarted, PhaseStarted, Progress, ThinkToken
from hyimg_cli.spec.job import ImageJob

logger = logging.getLogger(__name__)
Work = TypeVar("Work", Prefilled, Denoising)
_FREED = "out of memory; it went on when the prefixes kept for other jobs were dropped"


@dataclass(frozen=True)
class Shortage:
    """Memory was too small for more than `most` of such jobs to think, or to draw, together."""

    stage: Literal["think", "draw"]
    most: int
    jobs: tuple[ImageJob, ...]


class ContinuousBatch:
    """One group's jobs on their way: at most `batch_size` think, at most `draw_size` draw."""

    def __init__(
        self,
        jobs: Iterable[ImageJob],
        stages: ImageStages,
        *,
        batch_size: int,
        draw_size: int | None = None,
        draws: bool = True,
        new_clock: Callable[[], PhaseClock],
        read_lag: int | None = None,
    ) -> None:
        """`draw_size`: by default as many draw as think; without `draws` a job ends with its text.
        `read_lag`: see `DecodeLoop`; by default
        what suits the model's device. What memory turns out to be too small for is in `shortages`.
        """
        self.shortages: list[Shortage] = []
        self._waiting = deque(jobs)
        self._thinking: list[Prefilled] = []
        self._ready: deque[Generated] = deque()
        self._stages = stages
        self._think_size = batch_size
        self._draws = draws
        self._draw_size = batch_size if draw_size is None else draw_size
        self._new_clock = new_clock
        lag = reading_lag(stages.model.layer_devices) if read_lag is None else read_lag
        self._loop = DecodeLoop(stages.model, lag=lag)
        # Of jobs that wait although they have begun: their clocks, and what to tell of them.
        self._begun: dict[str, tuple[PhaseClock, list[str]]] = {}
        self._freed_for: set[str] = set()
        self._undecoded: list[tuple[Denoising, Tensor, int]] = []
        # No memory to open another job, until some have drawn.
        self._is_short = False

    def run(self) -> Iterator[Progress | Generated | Decoded | Lost]:
        """Every job's way, in as few forwards as the batch sizes allow."""
        while self._waiting or self._thinking or self._ready:
            self._is_short = self._is_short and self._holds_memory
            yield from self._open_more()
            yield from self._write_on()
            is_full = len(self._ready) >= self._draw_size
            has_more = self._thinking or (self._waiting and not self._is_short)
            if self._ready and (is_full or not has_more):
                yield from self._draw(self._next_batch())
                self._is_short = False
        while self._undecoded:
            yield from self._finished(*self._undecoded.pop(0))

    @property
    def _holds_memory(self) -> bool:
        return bool(self._thinking or self._ready)

    def _open_more(self) -> Iterator[Progress | Generated | Lost]:
        """Waiting jobs take the free rows."""
        while self._waiting and self._has_room:
            job = self._waiting.popleft()
            is_new = job.custom_id not in self._begun
            clock, notes = self._begun.pop(job.custom_id, (self._new_clock(), []))
            if is_new:
                yield JobStarted(job.custom_id)
                yield PhaseStarted(job.custom_id, "prefill")
            failure: Exception | None = None
            try:
                work = prefill(job, self._stages, clock)
            except Exception as error:
                failure = error
            if failure is not None:
                if not self._put_back(job, clock, notes, failure):
                    yield Lost(job, clock, failure)
                continue
            work.notes.extend(notes)
            if work.decoding is None:
                yield from self._make_ready(work)
            else:
                yield PhaseStarted(job.custom_id, "think")
                clock.enter("think")
                self._thinking.append(work)

    def _put_back(
        self, job: ImageJob, clock: PhaseClock, notes: list[str], error: Exception
    ) -> bool:
        """Whether a job that could not be opened waits once more, for memory."""
        if self._frees(job, error):
            self._begins_anew(job, clock, [*notes, _FREED])
        elif isinstance(error, torch.OutOfMemoryError) and self._holds_memory:
            _without_frames(error, [job, job])
            self._begins_behind(job, clock, [*notes, "no memory to begin it beside others"])
            if self._thinking:
                self._shorten("think", len(self._thinking), [job])
        else:
            return False
        return True

    def _begins_anew(self, job: ImageJob, clock: PhaseClock, notes: list[str]) -> None:
        logger.warning("%s: %s", job.custom_id, notes[-1])
        clock.enter("queue")
        self._waiting.appendleft(job)
        self._begun[job.custom_id] = clock, notes

    def _begins_behind(self, job: ImageJob, clock: PhaseClock, notes: list[str]) -> None:
        """The same, when some have drawn: the prefixes that they leave may be in its way again."""
        self._begins_anew(job, clock, notes)
        self._freed_for.discard(job.custom_id)
        self._is_short = True

    def _gives_way(self, batch: list[Generated]) -> bool:
        """Whether a job that waits to draw gave its context back, and so begins anew: its draws
        are its own, so it writes the same text.
        """
        if not batch and not self._ready:
            return False
        last = batch.pop() if batch else self._ready.pop()
        told = [*last.notes, "it began anew: no memory for its context beside another's branches"]
        self._begins_behind(last.job, last.clock, told)
        return True

    def _shorten(self, stage: Literal["think", "draw"], most: int, jobs: list[ImageJob]) -> None:
        """From here on no more than `most` think, or draw, together."""
        self.shortages.append(Shortage(stage, most, tuple(jobs)))
        if stage == "think":
            self._think_size = most
        else:
            self._draw_size = most

    def _frees(self, job: ImageJob, error: Exception) -> bool:
        """Whether memory was freed that a job alone may lack: once, and once more where it waited
        for others.
        """
        if not isinstance(error, torch.OutOfMemoryError) or job.custom_id in self._freed_for:
            return False
        self._freed_for.add(job.custom_id)
        logger.warning("%s: no memory for it; the shared prefixes are dropped", job.custom_id)
        self._stages.prefixes.release()
        _without_frames(error, [job, job])
        return True

    @property
    def _has_room(self) -> bool:
        if self._is_short:
            return False
        # A batch that is ready to draw lets go of its contexts first; see `footprint.Needs`.
        return len(self._thinking) < self._think_size and len(self._ready) < self._draw_size

    def _write_on(self) -> Iterator[Progress | Generated | Decoded | Lost]:
        """A token for every job that thinks; those whose text has ended leave."""
        at_once = list(self._thinking)
        for batch in _batches(at_once, self._think_size):
            yield from self._written(batch)
        for work in list(self._thinking):
            if _decoding(work).is_done:
                self._thinking.remove(work)
                yield from self._make_ready(work)

    def _written(self, batch: list[Prefilled]) -> Iterator[Progress | Decoded | Lost]:
        failure = None
        try:
            told = self._loop.step([_decoding(work) for work in batch])
        except Exception as error:
            failure, told = _without_frames(error, batch), self._loop.settle()
        for work in self._thinking:
            if _decoding(work) in told:
                yield ThinkToken(work.job.custom_id, _decoding(work).count)
        for work in batch:
            work.batch["think"] = max(work.batch["think"], len(batch))
        left = [work for work in batch if not _decoding(work).is_done]
        if failure is not None and left:
            if _is_short_of_memory(failure, left):
                self._shorten("think", len(left) // 2, [work.job for work in left])
            yield from self._halved(left, failure, self._written)

    def _make_ready(self, work: Prefilled) -> Iterator[Generated | Lost]:
        try:
            ready = with_text(work, self._stages)
        except Exception as error:
            yield Lost(work.job, work.clock, error)
            return
        if self._draws:
            self._ready.append(ready)
        else:
            yield ready

    def _next_batch(self) -> list[Generated]:
        """The jobs that can draw together with the one that has waited longest."""
        key = self._ready[0].draws_with
        fits = [work for work in self._ready if work.draws_with == key]
        batch = fits[: self._draw_size]
        self._ready = deque(work for work in self._ready if work not in batch)
        return batch

    def _draw(self, batch: list[Generated]) -> Iterator[Progress | Decoded | Lost]:
        standing = yield from self._standing(batch)
        if standing:
            yield from self._denoised(standing)

    def _standing(
        self, batch: list[Generated]
    ) -> Generator[Progress | Lost, None, list[Denoising]]:
        """The jobs of a batch with their branches; what memory is short of goes on waiting."""
        standing: list[Denoising] = []
        # Each leaves the batch: nothing holds a context whose branches stand.
        while batch:
            work, failure = batch.pop(0), None
            try:
                standing.append(with_branches(work, self._stages))
            except Exception as error:
                failure = error
            if failure is None:
                continue
            if standing and isinstance(failure, torch.OutOfMemoryError):
                _without_frames(failure, [work, *standing])
                self._ready.extendleft(reversed([work, *batch]))
                short = [work.job, *(one.job for one in standing)]
                self._shorten("draw", len(standing), short)
                _note(standing, f"no memory to draw more than {len(standing)} together")
                break
            if self._frees(work.job, failure):
                work.notes.append(_FREED)
                batch.insert(0, work)
                continue
            if isinstance(failure, torch.OutOfMemoryError) and self._gives_way(batch):
                _without_frames(failure, [work, work])
                batch.insert(0, work)
                continue
            yield Lost(work.job, work.clock, failure)
        return standing

    def _denoised(self, batch: list[Denoising]) -> Iterator[Progress | Decoded | Lost]:
        for work in batch:
            work.batch["denoise"] = len(batch)
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
            failure = _without_frames(error, batch)
        if failure is not None:
            if _is_short_of_memory(failure, batch):
                self._shorten("draw", len(batch) // 2, [work.job for work in batch])
            yield from self._halved(batch, failure, self._denoised)
            return
        for work in batch:
            work.release()
        for work, latents_CYX in zip(batch, latents, strict=True):
            yield from self._finished(work, latents_CYX, steps)

    def _velocities(
        self, batch: Sequence[Denoising]
    ) -> Callable[[Sequence[Tensor], Sequence[Step]], list[Tensor]]:
        def velocities(latents: Sequence[Tensor], steps: Sequence[Step]) -> list[Tensor]:
            return self._stages.model.velocities(
                [
                    LivePicture(x_CYX, step, work.job.guidance_scale, work.branches.items)
                    for work, x_CYX, step in zip(batch, latents, steps, strict=True)
                ]
            )

        return velocities

    def _finished(
        self, work: Denoising, latents_CYX: Tensor, steps: int
    ) -> Iterator[Decoded | Lost]:
        """The picture of the last latents; these wait where memory is short beside other jobs."""
        failure = None
        try:
            picture = decode(work, latents_CYX, steps, self._stages)
        except Exception as error:
            failure = error
        if failure is None:
            yield picture
        elif self._frees(work.job, failure):
            work.notes.append(_FREED)
            yield from self._finished(work, latents_CYX, steps)
        elif isinstance(failure, torch.OutOfMemoryError) and (self._waiting or self._holds_memory):
            _without_frames(failure, [work, work])
            _note([work], "no memory to decode beside other jobs; it was decoded behind them")
            work.clock.enter("queue")
            self._freed_for.discard(work.job.custom_id)
            self._undecoded.append((work, latents_CYX, steps))
        else:
            yield Lost(work.job, work.clock, failure)

    def _halved(
        self,
        batch: list[Work],
        error: Exception,
        again: Callable[[list[Work]], Iterator[Progress | Decoded | Lost]],
    ) -> Iterator[Progress | Decoded | Lost]:
        """A batch that failed, in halves, down to the job whose fault it is."""
        if len(batch) == 1 and self._frees(batch[0].job, error):
            batch[0].notes.append(_FREED)
            yield from again(batch)
            return
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


def _note(batch: Sequence[Prefilled] | Sequence[Denoising], note: str) -> None:
    logger.warning(note)
    for work in batch:
        work.notes.append(note)


def _without_frames(error: Exception, batch: Sequence[object]) -> Exception:
    """The error, without the frames that keep a failed batch's activations alive while its halves
    are tried. A job alone keeps them: they tell where its fault is.
    """
    if len(batch) > 1:
        error.__traceback__ = error.__context__ = None
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    return error


def _decoding(work: Prefilled) -> Decoding:
    assert work.decoding is not None, "a job that thinks has text to write"
    return work.decoding


def _enter(batch: Sequence[Denoising], phase: str) -> None:
    for work in batch:
        work.clock.enter(phase)
