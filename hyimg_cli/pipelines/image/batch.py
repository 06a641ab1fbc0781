"""Continuous batching: jobs of one model, of which some think while others draw.

    waiting ─ prefill ─▶ thinking ─ a token each ─▶ ready ─▶ drawing ─ a step each ─▶ decoded
              (joins as soon as a row is free)   (leaves when its text ends)
    K/V                  context                    context  branches

As many think as one size says and as many draw as another: a decode step gains from every row, a
denoise step is full with few pictures, and branches take more memory than contexts. Who comes when,
and what goes on in a pass of the loop, is an `Admission`'s to say. A job that fails leaves the
batch; the others go on as if it had never been there. What is tried before it is lost, and in which
order, is `out_of_memory`'s to say. Of jobs that would write the same text one thinks, and the
others wait for it, each in turn where it fails.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hyimg_cli.diffusion.denoise import Drawing, denoise_step
from hyimg_cli.manifest.planner import group_by
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models.protocols import LivePicture
from hyimg_cli.pipelines.image.admission import Admission, AtWork
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.image.think import DecodeLoop, DecodeRequest, Read
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy, Remedy
from hyimg_cli.pipelines.queue import Dropped
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import ImageJob

Told = JobStarted | Progress | ImageRequest | Lost[ImageJob] | Dropped
# Each with the request that it tells of.
Events = Iterator[tuple[ImageRequest, Told]]


class ContinuousBatch:
    """Jobs on their way, of which so many think and so many draw `together`."""

    def __init__(
        self, admission: Admission, together: Together, *, read_lag: int | None = None
    ) -> None:
        """`read_lag`: see `DecodeLoop`; by default what suits the model's device."""
        self._admission, stages = admission, admission.stages
        self._model = stages.model
        self.memory = MemoryPolicy(
            stages.prefixes.release, "the prefixes kept for other jobs", together
        )
        self._at = AtWork(self.memory)
        # By text that is being written, those that wait for it.
        self._awaited: dict[Hashable, list[Any]] = {}
        if read_lag is None:
            # A GPU works on while the host reads; on a CPU ids are there when the step is done.
            read_lag = int(any(device.type == "cuda" for device in stages.model.layer_devices))
        self._loop = DecodeLoop(stages.model, lag=read_lag)

    def run(self) -> Iterator[JobStarted | Progress | ImageRequest | Lost[ImageJob]]:
        """Every job's way, in as few forwards as the batch sizes allow."""
        for _, told in self.events():
            if not isinstance(told, Dropped):  # who is told of no ticket drops none
                yield told

    def events(self) -> Events:
        """The same, with the request that each event is of."""
        at, admission = self._at, self._admission
        while any(at) or admission.can_come:
            yield from self._drop(admission.next_pass(at))
            yield from self._admit()
            for _ in range(admission.tokens(at)):
                yield from self._decode_text()
            yield from self._join(deque(admission.joining(at)))
            yield from self._denoise()
            yield from self._leave(admission.through(at))
            while at.undecoded and not at.holds_memory:
                last = at.undecoded.popleft()
                yield from self.memory.attempt([last], self._decode, self._lose)

    def _drop(self, unwanted: Sequence[ImageRequest]) -> Events:
        """Requests leave, wherever they are, and give back what they hold."""
        if any(work.decoding in self._at.thinking for work in unwanted):
            yield from self._heed(self._loop.settle())
        for work in unwanted:
            if work in [*self._at]:  # one whose last token could not be read is lost already
                self._remove(work)
                work.clock.enter("queue")
                yield work, Dropped(work.job.custom_id)

    def _admit(self) -> Events:
        """Those that wait take the free rows."""
        at = self._at
        at.is_full = at.is_full and at.holds_memory
        admission: Any = self._admission  # each has items of its own kind
        while (item := admission.take(at)) is not None:
            if isinstance(item, ImageRequest):
                work = item
            else:
                if (text := admission.text_of(item)) in self._awaited:
                    self._awaited[text].append(item)
                    continue
                work = admission.begin(item)
                work.text_key = text
                yield work, JobStarted(work.job.custom_id)
                yield work, Progress(work.job.custom_id, "prefill")
            requeue = self._requeue if at.holds_memory else None
            yield from self.memory.attempt([work], self._prefill, self._lose, requeue=requeue)

    def _prefill(self, work: ImageRequest) -> Events:
        work.stages.prefill(work)
        if work.decoding is None:
            yield from self._make_ready(work)
        else:
            yield work, Progress(work.job.custom_id, "think")
            work.clock.enter("think")
            self._at.thinking[work.decoding] = work
            if work.text_key is not None:
                self._awaited.setdefault(work.text_key, [])

    def _requeue(self, work: ImageRequest) -> None:
        self._preempt(work, "prefill")
        if self._at.thinking:
            self.memory.limit("thinking", len(self._at.thinking))

    def _preempt(self, work: ImageRequest, lacking: str) -> None:
        """It begins anew when some have drawn, and writes the same text: its draws are its own."""
        self.memory.put_off(work, lacking)
        self._at.preempted.appendleft(work.anew())
        self._remove(work)
        self._at.is_full = True

    def _decode_text(self) -> Events:
        """A token for every job that thinks; those whose text has ended leave."""
        at = self._at
        thinking, size = self._admission.writing(at), at.most.thinking
        for first in range(0, len(thinking), size):
            batch = thinking[first : first + size]
            yield from self.memory.attempt(batch, self._decode_step, self._lose, kind="thinking")
        for decoding in [decoding for decoding in at.thinking if decoding.is_done]:
            work = at.thinking.pop(decoding)
            yield from self.memory.attempt([work], self._make_ready, self._lose)
            self._wake(work)

    def _decode_step(self, *batch: ImageRequest) -> Events:
        going = self._unfinished(batch)
        for decoding in going:
            counts = self._at.thinking[decoding].batch
            counts["think"] = max(counts["think"], len(going))
        with Attempt() as tried:
            read = self._loop.step(going)
        if tried.error is not None:
            read = self._loop.settle()
        yield from self._heed(read)
        if tried.error is not None and self._unfinished(batch):
            raise tried.error

    def _heed(self, read: Read) -> Events:
        """Tell of the tokens that were read, and of what could not be."""
        for decoding, work in list(self._at.thinking.items()):
            if error := read.get(decoding):
                yield from self._lose(work, error)
            elif decoding in read:
                yield work, Progress(work.job.custom_id, "think", decoding.count)

    def _unfinished(self, batch: Sequence[ImageRequest]) -> list[DecodeRequest]:
        going = self._at.thinking.items()
        return [decoding for decoding, work in going if work in batch and not decoding.is_done]

    def _make_ready(self, work: ImageRequest) -> Events:
        work.stages.end_text(work, is_repeated=self._admission.is_repeated(work.text_key))
        if work.stages.draws:
            self._at.ready.append(work)
        else:
            yield work, work

    def _join(self, batch: deque[ImageRequest]) -> Events:
        """Branches for as many of `batch` as there is memory for; the others wait on."""
        at, joined = self._at, list[ImageRequest]()
        at.ready = deque(work for work in at.ready if work not in batch)
        while batch:
            # Each leaves the batch: nothing holds a context whose branches stand.
            work = batch.popleft()
            with Attempt() as tried:
                work.stages.build_branches(work)
                work.drawing = Drawing(work.track, work.job.step_cache)
                joined.append(work)
                at.drawing.append(work)
            if tried.error is None:
                continue
            # What waits to draw may give its context back, or else what thinks.
            others, can_wait = batch or at.ready, bool(batch or at.ready or at.thinking)
            match self.memory.remedy(tried.error, [work], company=at.drawing, can_wait=can_wait):
                case Remedy.SPLIT:
                    at.ready.extendleft(reversed([work, *batch]))
                    break
                case Remedy.RETRY:
                    batch.appendleft(work)
                case Remedy.REQUEUE:
                    if not others:
                        yield from self._heed(self._loop.settle())
                        others = deque(at.thinking.values())
                    if others:
                        self._preempt(others.pop(), "branches")
                    batch.appendleft(work)
                case _:
                    yield work, work.as_lost(tried.error)
        for work in joined:
            yield work, Progress(work.job.custom_id, "denoise", 0, work.track.schedule.count)

    def _denoise(self) -> Events:
        """A step of every picture that goes on in this pass; those of one size take it together."""
        at = self._at
        stepping = self._admission.stepping(at)
        left = [work for work in at.drawing if not work.drawing.is_done]
        for work in left:
            phase = "denoise_rest" if work.drawing.done else "denoise_first"
            work.clock.enter(phase if work in stepping else "queue")
        now_stepping = (work for work in left if work in stepping)
        for batch in group_by(now_stepping, lambda work: work.canvas.bucket).values():
            while batch:
                size = at.most.drawing
                now, batch = batch[:size], batch[size:]
                yield from self.memory.attempt(now, self._denoise_step, self._lose)

    def _denoise_step(self, *batch: ImageRequest) -> Events:
        # Where a batch has failed some may have taken the step already.
        left = {one.drawing: one for one in batch if one.drawing.done == one.denoise_steps}

        def velocities(drawings: Sequence[Drawing]) -> list[Tensor]:
            live = []
            for drawing in drawings:
                work, step = left[drawing], drawing.step
                branches = work.branches[: None if work.track.is_guided(step) else 1]
                scale = work.job.guidance_scale
                live.append(LivePicture(drawing.latents_CYX, step, scale, branches))
            return self._model.velocities(live)

        denoise_step([*left], velocities)
        for work in batch:
            drawing = work.drawing
            work.latents_CYX, work.denoise_steps = drawing.latents_CYX, drawing.done
            work.batch["denoise"] = max(work.batch["denoise"], len(batch))
            if drawing.is_done:
                work.clock.enter("queue")
                work.branches, work.step_cache = (), drawing.cache.report()
        for work in batch:
            done, count = work.denoise_steps, work.track.schedule.count
            yield work, Progress(work.job.custom_id, "denoise", done, count)

    def _leave(self, through: Sequence[ImageRequest]) -> Events:
        """Pictures that have drawn are decoded, or wait with that for memory."""
        at = self._at
        at.drawing = [work for work in at.drawing if work not in through]
        at.is_full = at.is_full and not through
        for work in through:
            requeue = self._decode_later if at.holds_memory else None
            yield from self.memory.attempt([work], self._decode, self._lose, requeue=requeue)

    def _decode(self, work: ImageRequest) -> Events:
        work.stages.decode(work)
        yield work, work

    def _decode_later(self, work: ImageRequest) -> None:
        self.memory.put_off(work, "decode")
        self._at.undecoded.append(work)

    def _lose(self, lost: ImageRequest, error: Exception) -> Events:
        self._remove(lost)
        yield lost, lost.as_lost(error)

    def _remove(self, work: ImageRequest) -> None:
        is_writing = work.decoding in self._at.thinking
        self._at.remove(work)
        if is_writing:
            self._wake(work)
        work.release()

    def _wake(self, writer: ImageRequest) -> None:
        """Those that waited for a request's text are next."""
        waited = self._awaited.pop(writer.text_key, [])
        self._admission.put_back(waited)
