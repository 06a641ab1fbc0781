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

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from torch import Tensor

from hyimg_cli.diffusion.denoise import denoise
from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models.protocols import LivePicture
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.image.think import DecodeLoop, DecodeRequest, repeated_texts
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy, Remedy
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import ImageJob

Events = Iterator[JobStarted | Progress | ImageRequest | Lost[ImageJob]]


class ContinuousBatch:
    """One group's jobs on their way, of which so many think and so many draw `together`."""

    def __init__(
        self,
        jobs: Iterable[ImageJob],
        stages: ImageStages,
        together: Together,
        *,
        new_clock: Callable[[], PhaseClock],
        read_lag: int | None = None,
    ) -> None:
        """`read_lag`: see `DecodeLoop`; by default what suits the model's device."""
        self._stages = stages
        self._waiting = deque(jobs)
        self._repeated = repeated_texts(map(self._text_of, self._waiting))
        # By text that is being written, the jobs that wait for it.
        self._awaited: dict[Hashable, list[ImageJob]] = {}
        # Begun, and without K/V again: they come before those that wait.
        self._preempted: deque[ImageRequest] = deque()
        self._thinking: dict[DecodeRequest, ImageRequest] = {}
        self._ready: deque[ImageRequest] = deque()
        self._undecoded: deque[ImageRequest] = deque()
        self._new_clock = new_clock
        if read_lag is None:
            # A GPU works on while the host reads; on a CPU ids are there when the step is done.
            read_lag = int(any(device.type == "cuda" for device in stages.model.layer_devices))
        self._loop = DecodeLoop(stages.model, lag=read_lag)
        # It knows how many work together: fewer than were asked for where memory was short.
        self.memory = MemoryPolicy(
            stages.prefixes.release, "the prefixes kept for other jobs", together
        )
        # No memory to admit another job, until some have drawn.
        self._is_full = False

    def run(self) -> Events:
        """Every job's way, in as few forwards as the batch sizes allow."""
        while self._is_waiting or self._holds_memory:
            yield from self._admit()
            yield from self._decode_text()
            if self._is_due:
                yield from self._draw(self._next_batch())
                self._is_full = False
        while self._undecoded:
            yield from self._finish(self._undecoded.popleft())

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
        most = self.memory.most
        return len(self._thinking) < most.thinking and len(self._ready) < most.drawing

    @property
    def _is_due(self) -> bool:
        """True if a batch draws now: it is full, or nothing is left that could fill it."""
        if not self._ready or len(self._ready) >= self.memory.most.drawing:
            return bool(self._ready)
        can_come = self._is_waiting and not self._is_full
        if self._ready[0].job.writes_text:
            return not (self._thinking or can_come)
        return not can_come or self._next_writes

    def _admit(self) -> Events:
        """Waiting jobs take the free rows."""
        self._is_full = self._is_full and self._holds_memory
        while self._is_waiting and self._has_room and not (self._is_full or self._is_due):
            if self._preempted:
                work = self._preempted.popleft()
            else:
                job = self._waiting.popleft()
                if (text := self._text_of(job)) in self._awaited:
                    self._awaited[text].append(job)
                    continue
                work = ImageRequest(job, self._new_clock())
                yield JobStarted(job.custom_id)
                yield Progress(job.custom_id, "prefill")
            requeue = self._requeue if self._holds_memory else None
            yield from self.memory.attempt([work], self._prefill, self._lose, requeue=requeue)

    def _prefill(self, work: ImageRequest) -> Events:
        self._stages.prefill(work)
        if work.decoding is None:
            yield from self._make_ready(work)
        else:
            yield Progress(work.job.custom_id, "think")
            work.clock.enter("think")
            self._thinking[work.decoding] = work
            if (text := self._text_of(work.job)) is not None:
                self._awaited.setdefault(text, [])

    def _requeue(self, work: ImageRequest) -> None:
        self._preempt(work, "prefill")
        if self._thinking:
            self.memory.limit("thinking", len(self._thinking))

    def _preempt(self, work: ImageRequest, lacking: str) -> None:
        """It begins anew when some have drawn, and writes the same text: its draws are its own."""
        self.memory.put_off(work, lacking)
        self._preempted.appendleft(ImageRequest(**work.begun()))
        self._is_full = True

    def _decode_text(self) -> Events:
        """A token for every job that thinks; those whose text has ended leave."""
        thinking, size = list(self._thinking.values()), self.memory.most.thinking
        for first in range(0, len(thinking), size):
            batch = thinking[first : first + size]
            yield from self.memory.attempt(batch, self._decode_step, self._lose, kind="thinking")
        for decoding in [decoding for decoding in self._thinking if decoding.is_done]:
            work = self._thinking.pop(decoding)
            yield from self.memory.attempt([work], self._make_ready, self._lose)
            self._wake(work)

    def _decode_step(self, *batch: ImageRequest) -> Events:
        going = self._unfinished(batch)
        for decoding in going:
            counts = self._thinking[decoding].batch
            counts["think"] = max(counts["think"], len(going))
        with Attempt() as tried:
            read = self._loop.step(going)
        if tried.error is not None:
            read = self._loop.settle()
        for decoding, work in list(self._thinking.items()):
            if error := read.get(decoding):
                yield from self._lose(work, error)
            elif decoding in read:
                yield Progress(work.job.custom_id, "think", decoding.count)
        if tried.error is not None and self._unfinished(batch):
            raise tried.error

    def _unfinished(self, batch: Sequence[ImageRequest]) -> list[DecodeRequest]:
        going = self._thinking.items()
        return [decoding for decoding, work in going if work in batch and not decoding.is_done]

    def _make_ready(self, work: ImageRequest) -> Events:
        text = self._text_of(work.job)
        is_repeated = text is not None and hash(text) in self._repeated
        self._stages.end_text(work, is_repeated=is_repeated)
        if self._stages.draws:
            self._ready.append(work)
        else:
            yield work

    def _next_batch(self) -> deque[ImageRequest]:
        """The jobs that can draw together with the one that has waited longest."""
        key = self._ready[0].draws_with
        fits = [work for work in self._ready if work.draws_with == key]
        batch = fits[: self.memory.most.drawing]
        self._ready = deque(work for work in self._ready if work not in batch)
        return deque(batch)

    def _draw(self, batch: deque[ImageRequest]) -> Events:
        """Branches for as many as there is memory for, then their pictures; the others wait on."""
        standing: list[ImageRequest] = []
        while batch:
            # Each leaves the batch: nothing holds a context whose branches stand.
            work = batch.popleft()
            with Attempt() as tried:
                self._stages.build_branches(work)
                standing.append(work)
            if tried.error is None:
                continue
            # What waits to draw may give its context back.
            others = batch or self._ready
            match self.memory.remedy(tried.error, [work], company=standing, can_wait=bool(others)):
                case Remedy.SPLIT:
                    self._ready.extendleft(reversed([work, *batch]))
                    break
                case Remedy.RETRY:
                    batch.appendleft(work)
                case Remedy.REQUEUE:
                    self._preempt(others.pop(), "branches")
                    batch.appendleft(work)
                case _:
                    yield work.as_lost(tried.error)
        if standing:
            yield from self.memory.attempt(standing, self._denoise, self._lose)

    def _denoise(self, *batch: ImageRequest) -> Events:
        for work in batch:
            work.batch["denoise"] = len(batch)
            yield Progress(work.job.custom_id, "denoise", 0, work.track.schedule.count)
        _enter(batch, "denoise_first")
        tracks = [work.track for work in batch]
        caches = [work.track.velocity_cache(work.job.step_cache) for work in batch]

        def velocities(
            numbers: Sequence[int], latents: Sequence[Tensor], steps: Sequence[Step]
        ) -> list[Tensor]:
            live = []
            for number, x_CYX, step in zip(numbers, latents, steps, strict=True):
                work = batch[number]
                branches = work.branches[: None if work.track.is_guided(step) else 1]
                live.append(LivePicture(x_CYX, step, work.job.guidance_scale, branches))
            return self._stages.model.velocities(live)

        moved = denoise(tracks, caches, velocities)
        for step, latents in enumerate(moved, 1):
            if step == 1:
                _enter(batch, "denoise_rest")
            for work, latents_CYX in zip(batch, latents, strict=True):
                work.latents_CYX, work.denoise_steps = latents_CYX, step
                yield Progress(work.job.custom_id, "denoise", step, work.track.schedule.count)
        _enter(batch, "queue")
        for work, cache in zip(batch, caches, strict=True):
            work.branches, work.step_cache = (), cache.report()
        for work in batch:
            yield from self._finish(work)

    def _finish(self, work: ImageRequest) -> Events:
        requeue = self._finish_later if self._is_waiting or self._holds_memory else None
        yield from self.memory.attempt([work], self._decode, self._lose, requeue=requeue)

    def _decode(self, work: ImageRequest) -> Events:
        self._stages.decode(work)
        yield work

    def _finish_later(self, work: ImageRequest) -> None:
        self.memory.put_off(work, "decode")
        self._undecoded.append(work)

    def _lose(self, lost: ImageRequest, error: Exception) -> Events:
        if lost.decoding in self._thinking:
            del self._thinking[lost.decoding]
            self._wake(lost)
        yield lost.as_lost(error)

    def _wake(self, writer: ImageRequest) -> None:
        """The jobs that waited for a job's text are next."""
        waited = self._awaited.pop(self._text_of(writer.job), [])
        self._waiting.extendleft(reversed(waited))

    def _text_of(self, job: ImageJob) -> Hashable | None:
        """Equal for jobs that would write the same text, or were given it."""
        return self._stages.shared_text(job) or job.cot_token_ids


def _enter(batch: Sequence[ImageRequest], phase: str) -> None:
    for work in batch:
        work.clock.enter(phase)
