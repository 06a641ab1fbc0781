"""Continuous batching: jobs of one model and size, of which some think while one batch draws.

    waiting ─ prefill ─▶ thinking ─ a token each, together ─▶ ready ─ all steps, together ─▶ decoded
              (joins as soon as a row is free)   (leaves when its text ends)
    K/V                 context                                context  branches

As many think as one size says and as many draw as another: a decode step gains from every row, a
denoise step is full with few pictures, and branches take more memory than contexts. A job that
fails leaves the batch; the others go on as if it had never been there. What is tried before it is
lost, and in which order, is `out_of_memory`'s to say. Of jobs that would write the same text one
thinks, and the others wait for it, each in turn where it fails. A job that needs no text draws as
soon as nobody of its kind is next in line: it waits for no text of another.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from hyimg_cli.diffusion.denoise import Velocities, denoise
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
    insert_prefix,
    leave_text,
    prefill,
    shared_text,
    with_branches,
    with_text,
)
from hyimg_cli.pipelines.image.texts import SharedTexts
from hyimg_cli.pipelines.image.think import DecodeLoop, DecodeRequest, reading_lag
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy, Remedy, SharedStage, Shortage
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import ImageJob

Events = Iterator[JobStarted | Progress | Generated | Decoded | Lost[ImageJob]]


class ContinuousBatch:
    """One group's jobs on their way: at most `batch_size` think, at most `draw_size` draw."""

    def __init__(
        self,
        jobs: Iterable[ImageJob],
        stages: ImageStages,
        *,
        batch_size: int,
        draw_size: int | None = None,
        new_clock: Callable[[], PhaseClock],
        read_lag: int | None = None,
    ) -> None:
        """`draw_size`: by default as many draw as think. `read_lag`: see `DecodeLoop`; by default
        what suits the model's device.
        """
        self._waiting = deque(jobs)
        self._texts = SharedTexts(shared_text(job, stages) for job in self._waiting)
        # Texts that were written before: one job feeds each, the others find its rows.
        self._given = Counter(job.cot_token_ids for job in self._waiting if job.cot_token_ids)
        # Begun, and without K/V again: they come before those that wait.
        self._preempted: deque[Request[ImageJob]] = deque()
        self._thinking: list[Prefilled] = []
        self._ready: deque[Generated] = deque()
        self._undecoded: deque[Denoising] = deque()
        self._stages = stages
        self._new_clock = new_clock
        lag = reading_lag(stages.model.layer_devices) if read_lag is None else read_lag
        self._loop = DecodeLoop(stages.model, lag=lag)
        self._memory = MemoryPolicy(
            stages.prefixes.release,
            "the prefixes kept for other jobs",
            {"think": batch_size, "draw": batch_size if draw_size is None else draw_size},
        )
        # No memory to admit another job, until some have drawn.
        self._is_full = False

    @property
    def shortages(self) -> Sequence[Shortage]:
        """Sizes that memory turned out to be too small for until now."""
        return self._memory.shortages

    def run(self) -> Events:
        """Every job's way, in as few forwards as the batch sizes allow."""
        while self._is_waiting or self._holds_memory:
            yield from self._admit()
            yield from self._decode_text()
            if self._is_due:
                yield from self._draw(self._next_batch())
                self._is_full = False
        while self._undecoded:
            yield from self._decode(self._undecoded.popleft())

    @property
    def _is_waiting(self) -> bool:
        return bool(self._preempted or self._waiting)

    @property
    def _next_writes(self) -> bool:
        return (self._preempted[0].job if self._preempted else self._waiting[0]).writes_text

    @property
    def _holds_memory(self) -> bool:
        return bool(self._thinking or self._ready)

    @property
    def _has_room(self) -> bool:
        # A batch that is ready to draw lets go of its contexts first; see `footprint.Needs`.
        most = self._memory.most
        return len(self._thinking) < most["think"] and len(self._ready) < most["draw"]

    @property
    def _is_due(self) -> bool:
        """True if a batch draws now: it is full, or nothing is left that could fill it."""
        if not self._ready or len(self._ready) >= self._memory.most["draw"]:
            return bool(self._ready)
        can_come = self._is_waiting and not self._is_full
        if self._ready[0].job.writes_text:
            return not (self._thinking or can_come)
        return not (can_come and not self._next_writes)

    def _admit(self) -> Events:
        """Waiting jobs take the free rows."""
        self._is_full = self._is_full and self._holds_memory
        while self._is_waiting and self._has_room and not (self._is_full or self._is_due):
            if self._preempted:
                request = self._preempted.popleft()
            else:
                job = self._waiting.popleft()
                if self._texts.defer(shared_text(job, self._stages), job):
                    continue
                request = Request(job, self._new_clock())
                yield JobStarted(job.custom_id)
                yield Progress(job.custom_id, "prefill")
            yield from self._prefill(request)

    def _prefill(self, request: Request[ImageJob]) -> Events:
        with Attempt() as tried:
            work = prefill(request, self._stages)
        if tried.error is not None:
            match self._memory.remedy(tried.error, [request], can_wait=self._holds_memory):
                case Remedy.RETRY:
                    yield from self._prefill(request)
                case Remedy.REQUEUE:
                    self._preempt(request, "prefill")
                    if self._thinking:
                        self._memory.limit("think", len(self._thinking), [request])
                case _:
                    yield Lost(request, tried.error)
        elif work.decoding is None:
            given = work.job.cot_token_ids
            if given and work.taken is not None and self._given[given] > 1 and self._stages.draws:
                insert_prefix(work, self._stages)
            yield from self._make_ready(work)
        else:
            yield Progress(work.job.custom_id, "think")
            work.clock.enter("think")
            self._thinking.append(work)
            self._texts.begin(shared_text(work.job, self._stages))

    def _preempt(self, request: Request[ImageJob], lacking: str) -> None:
        """It begins anew when some have drawn, and writes the same text: its draws are its own."""
        self._memory.put_off(request, lacking)
        self._preempted.appendleft(request)
        self._is_full = True

    def _decode_text(self) -> Events:
        """A token for every job that thinks; those whose text has ended leave."""
        thinking, size = list(self._thinking), self._memory.most["think"]
        for first in range(0, len(thinking), size):
            yield from self._decode_step(*thinking[first : first + size])
        for work in [work for work in self._thinking if _decoding(work).is_done]:
            self._thinking.remove(work)
            text = shared_text(work.job, self._stages)
            if self._texts.are_several(text):
                leave_text(work, self._stages)
            self._waiting.extendleft(reversed(self._texts.end(text)))
            yield from self._make_ready(work)

    def _decode_step(self, *batch: Prefilled) -> Events:
        batch = tuple(work for work in batch if work in self._thinking)
        with Attempt() as tried:
            known = self._loop.step([_decoding(work) for work in batch])
        if tried.error is not None:
            known = self._loop.settle()
        for work in self._thinking:
            if _decoding(work) in known:
                yield Progress(work.job.custom_id, "think", _decoding(work).count)
        failed = self._loop.take_failed()
        for work in [work for work in self._thinking if _decoding(work) in failed]:
            yield from self._lose(work, failed[_decoding(work)])
        for work in batch:
            work.batch["think"] = max(work.batch["think"], len(batch))
        left = [work for work in batch if work in self._thinking and not _decoding(work).is_done]
        if tried.error is not None and left:
            yield from self._smaller(tried.error, left, self._decode_step, "think")

    def _make_ready(self, work: Prefilled) -> Events:
        with Attempt() as tried:
            ready = with_text(work, self._stages)
        if tried.error is not None:
            yield Lost(work.request, tried.error)
        elif self._stages.draws:
            self._ready.append(ready)
        else:
            yield ready

    def _next_batch(self) -> deque[Generated]:
        """The jobs that can draw together with the one that has waited longest."""
        key = self._ready[0].draws_with
        fits = [work for work in self._ready if work.draws_with == key]
        batch = fits[: self._memory.most["draw"]]
        self._ready = deque(work for work in self._ready if work not in batch)
        return deque(batch)

    def _draw(self, batch: deque[Generated]) -> Events:
        """Branches for as many as there is memory for, then their pictures; the others wait on."""
        standing: list[Denoising] = []
        while batch:
            # Each leaves the batch: nothing holds a context whose branches stand.
            work = batch.popleft()
            with Attempt() as tried:
                standing.append(with_branches(work, self._stages))
            if tried.error is None:
                continue
            # What waits to draw may give its context back.
            others = batch or self._ready
            match self._memory.remedy(
                tried.error,
                [work.request],
                company=[one.request for one in standing],
                can_wait=bool(others),
            ):
                case Remedy.SPLIT:
                    self._ready.extendleft(reversed([work, *batch]))
                    break
                case Remedy.RETRY:
                    batch.appendleft(work)
                case Remedy.REQUEUE:
                    self._preempt(others.pop().request, "branches")
                    batch.appendleft(work)
                case _:
                    yield Lost(work.request, tried.error)
        if standing:
            yield from self._denoise(*standing)

    def _denoise(self, *batch: Denoising) -> Events:
        for work in batch:
            work.batch["denoise"] = len(batch)
            yield Progress(work.job.custom_id, "denoise", 0, work.track.schedule.count)
        with Attempt() as tried:
            _enter(batch, "denoise_first")
            # Anew for each attempt.
            for work in batch:
                work.velocities = work.track.velocity_cache(work.job.step_cache)
            tracks, caches = zip(*((work.track, work.velocities) for work in batch), strict=True)
            moved = denoise(tracks, caches, self._velocities(batch))
            for step, latents in enumerate(moved, 1):
                if step == 1:
                    _enter(batch, "denoise_rest")
                for work, latents_CYX in zip(batch, latents, strict=True):
                    work.latents_CYX, work.steps = latents_CYX, step
                    yield Progress(work.job.custom_id, "denoise", step, work.track.schedule.count)
            _enter(batch, "queue")
        if tried.error is not None:
            yield from self._smaller(tried.error, batch, self._denoise, "draw")
            return
        for work in batch:
            work.release()
        for work in batch:
            yield from self._decode(work)

    def _velocities(self, batch: Sequence[Denoising]) -> Velocities:
        def live(work: Denoising, x_CYX: Tensor, step: Step) -> LivePicture:
            return LivePicture(x_CYX, step, work.job.guidance_scale, work.branches_at(step))

        def velocities(
            numbers: Sequence[int], latents: Sequence[Tensor], steps: Sequence[Step]
        ) -> list[Tensor]:
            works = [batch[number] for number in numbers]
            return self._stages.model.velocities(list(map(live, works, latents, steps)))

        return velocities

    def _decode(self, work: Denoising) -> Events:
        with Attempt() as tried:
            picture = decode(work, self._stages)
        if tried.error is None:
            yield picture
            return
        can_wait = self._is_waiting or self._holds_memory
        match self._memory.remedy(tried.error, [work.request], can_wait=can_wait):
            case Remedy.RETRY:
                yield from self._decode(work)
            case Remedy.REQUEUE:
                self._memory.put_off(work.request, "decode")
                self._undecoded.append(work)
            case _:
                yield Lost(work.request, tried.error)

    def _smaller(
        self,
        error: Exception,
        batch: Sequence[Prefilled] | Sequence[Denoising],
        again: Callable[..., Events],
        stage: SharedStage,
    ) -> Events:
        """A batch that failed together, in halves, down to the job whose fault it is."""
        match self._memory.remedy(error, [work.request for work in batch], stage=stage):
            case Remedy.SPLIT:
                half = len(batch) // 2
                yield from again(*batch[:half])
                yield from again(*batch[half:])
            case Remedy.RETRY:
                yield from again(*batch)
            case _:
                (lost,) = batch
                yield from self._lose(lost, error)

    def _lose(self, lost: Prefilled | Denoising, error: Exception) -> Events:
        """A job that failed; those that waited for its text are next."""
        if lost in self._thinking:
            self._thinking.remove(lost)
            waited = self._texts.end(shared_text(lost.job, self._stages))
            self._waiting.extendleft(reversed(waited))
        yield Lost(lost.request, error)


def _decoding(work: Prefilled) -> DecodeRequest:
    assert work.decoding is not None, "a job that thinks has text to write"
    return work.decoding


def _enter(batch: Sequence[Denoising], phase: str) -> None:
    for work in batch:
        work.clock.enter(phase)
