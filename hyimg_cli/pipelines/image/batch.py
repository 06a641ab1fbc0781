"""Continuous batching of one model's jobs: some think while others draw.

    waiting ─ prefill ─▶ thinking ─ a token each ─▶ ready ─▶ drawing ─ a step each ─▶ decoded
              (joins as soon as a row is free)   (leaves when its text ends)
    K/V                  context                    context  branches

The numbers of jobs that think and that draw are limited separately. Every additional row makes a
decode step more efficient, a few pictures already fill a denoise step, and branches take more
memory than contexts. An `Admission` decides which jobs come when, and what happens in each pass of
the loop.

A job that fails leaves the batch, and the others continue as if it had never been in it.
`failures` decides which remedies are tried before a job is lost. If several jobs would write
the same text, one of them thinks and the others wait for it. If it fails, the next one takes over.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoiseState, denoise_step
from hyimg_cli.errors import JobError
from hyimg_cli.manifest.planner import group_by
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models.protocols import DenoiseInput
from hyimg_cli.pipelines.failures import Remedy
from hyimg_cli.pipelines.image.admission import Admission, AtWork
from hyimg_cli.pipelines.image.prefill import prefill_together
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.image.think import DecodeLoop, DecodeRequest, Read
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy
from hyimg_cli.pipelines.queue import Dropped
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.events import JobStarted, Progress
from hyimg_cli.spec.job import ImageJob

BatchEvent = JobStarted | Progress | ImageRequest | Lost[ImageJob] | Dropped
# Events, each with the request that it belongs to.
Events = Iterator[tuple[ImageRequest, BatchEvent]]


class ContinuousBatch:
    """Requests at work, with limits on how many think and how many draw `together`."""

    def __init__(
        self, admission: Admission, together: Together, *, read_lag: int | None = None
    ) -> None:
        """`read_lag`: see `DecodeLoop`; chosen for the model's device by default."""
        self._admission, stages = admission, admission.stages
        self._model = stages.model
        self._prefixes = stages.prefixes
        self.memory = MemoryPolicy(
            self._drop_prefixes, "the prefixes kept for other jobs", together
        )
        self._at = AtWork(self.memory)
        # By text that is being written: the items that wait for it.
        self._awaited: dict[Hashable, list[Any]] = {}
        if read_lag is None:
            # A GPU works on while the host reads. On a CPU, ids are known when the step is done.
            read_lag = int(any(device.type == "cuda" for device in stages.model.layer_devices))
        self._loop = DecodeLoop(stages.model, lag=read_lag)

    def run(self) -> Iterator[JobStarted | Progress | ImageRequest | Lost[ImageJob]]:
        """Yield the events of every job, in as few forwards as the batch sizes allow."""
        for _, told in self.events():
            if not isinstance(told, Dropped):
                yield told

    def events(self) -> Events:
        """Yield the events, each with its request."""
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
        """Remove requests at any stage, and free what they hold."""
        if any(work.decoding in self._at.thinking for work in unwanted):
            yield from self._heed(self._loop.settle())
        for work in unwanted:
            if work in [*self._at]:  # a request whose last token could not be read is lost already
                self._remove(work)
                work.clock.enter("queue")
                yield work, Dropped(work.job.custom_id)

    def _admit(self) -> Events:
        """Give the free rows to waiting jobs."""
        at = self._at
        at.is_full = at.is_full and at.holds_memory
        while True:
            yield from self._take()
            if not at.beginning:
                return
            yield from self._begin([*at.beginning])

    def _take(self) -> Events:
        """Read the sources of the jobs that begin now; they are `beginning` then."""
        at, admission = self._at, cast(Any, self._admission)  # each has its own kind of item
        # Texts that the new jobs will leave, and jobs that will wait for one of them.
        texts, waiting = set[Hashable](), []
        while (item := admission.take(at)) is not None:
            if isinstance(item, ImageRequest):
                work = item
            else:
                if (text := admission.text_of(item)) in self._awaited:
                    self._awaited[text].append(item)
                    continue
                if text in texts:
                    waiting.append(item)
                    continue
                work = admission.begin(item)
                work.text_key = text
                yield work, JobStarted(work.job.custom_id)
                yield work, Progress(work.job.custom_id, "prefill")
            requeue = self._requeue if at.holds_memory else None
            yield from self.memory.attempt([work], self._read, self._lose, requeue=requeue)
            if work in at.beginning and work.leaves_text:
                texts.add(work.text_key)
        admission.put_back(waiting)

    def _read(self, work: ImageRequest) -> Events:
        work.stages.read(work)
        self._at.beginning.append(work)
        yield from ()

    def _begin(self, works: Sequence[ImageRequest]) -> Events:
        """Prefill requests together; in halves if that fails."""
        at = self._at
        if len(works) == 1 and at.is_full:  # another one waits for memory already
            self._remove(works[0])
            at.preempted.append(works[0].anew())
        elif len(works) == 1:
            requeue = self._requeue if at.holds_memory else None
            yield from self.memory.attempt(works, self._prefill, self._lose, requeue=requeue)
        elif works:
            with Attempt() as tried:
                yield from self._prefill(*works)
            if tried.error is not None:
                left = [work for work in works if work in at.beginning]
                if len(left) > 1:
                    self.memory.remedy(tried.error, left, kind=None)
                half = len(left) // 2
                for part in (left[:half], left[half:]):
                    yield from self._begin(part)

    def _prefill(self, *works: ImageRequest) -> Events:
        prefills = [work.stages.prefill(work) for work in works]
        for number, failure in prefill_together(self._model, prefills, self._most_rows(works)):
            work = works[number]
            if failure is not None:
                yield from self._lose(work, failure)
                continue
            self._at.beginning.remove(work)
            if work.decoding is None:
                yield from self.memory.attempt([work], self._make_ready, self._lose)
                continue
            yield work, Progress(work.job.custom_id, "think")
            work.clock.enter("think")
            self._at.thinking[work.decoding] = work
            if work.text_key is not None:
                self._awaited.setdefault(work.text_key, [])

    def _most_rows(self, works: Sequence[ImageRequest]) -> int:
        """Return the most rows of a prefill: those of a full denoise step, which have memory.

        A request for which memory was short gets a forward for each prefill.
        """
        if any(map(self.memory.was_short_for, works)):
            return 0
        return self._at.most.drawing * max(work.stages.step_rows(work.job) for work in works)

    def _drop_prefixes(self) -> None:
        self._prefixes.release()
        self._model.arena.shrink()

    def _requeue(self, work: ImageRequest, lacking: str = "prefill") -> None:
        self._preempt(work, lacking)
        if self._at.thinking:
            self.memory.limit("thinking", len(self._at.thinking))

    def _preempt(self, work: ImageRequest, lacking: str) -> None:
        """Start a request again after others have drawn.

        It writes the same text as before, because its random numbers are its own.
        """
        self.memory.put_off(work, lacking)
        self._at.preempted.appendleft(work.anew())
        self._remove(work)
        self._at.is_full = True

    def _decode_text(self) -> Events:
        """Write a token for every thinking job; jobs whose text has ended leave."""
        at = self._at
        thinking, size = self._admission.writing(at), at.most.thinking
        for first in range(0, len(thinking), size):
            batch = thinking[first : first + size]
            has_others = len(at.thinking) > 1 or at.ready or at.drawing
            requeue = partial(self._requeue, lacking="text") if has_others else None
            yield from self.memory.attempt(
                batch, self._decode_step, self._lose, kind="thinking", requeue=requeue
            )
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
        """Yield the progress of texts whose tokens were read; lose jobs that failed."""
        for decoding, work in list(self._at.thinking.items()):
            if error := read.get(decoding):
                yield from self._lose(work, error)
            elif decoding in read:
                said = work.stages.answer_so_far(work.job, decoding)
                yield work, Progress(work.job.custom_id, "think", decoding.count, answer=said)

    def _unfinished(self, batch: Sequence[ImageRequest]) -> list[DecodeRequest]:
        going = self._at.thinking.items()
        return [decoding for decoding, work in going if work in batch and not decoding.is_done]

    def _make_ready(self, work: ImageRequest) -> Events:
        work.stages.end_text(work, is_repeated=self._admission.is_repeated(work.text_key))
        if work.draws:
            self._at.ready.append(work)
        else:
            work.stages.end(work)
            yield work, work

    def _join(self, batch: deque[ImageRequest]) -> Events:
        """Build branches for as many of `batch` as fit into memory; the others keep waiting."""
        at, joined = self._at, list[ImageRequest]()
        at.ready = deque(work for work in at.ready if work not in batch)
        most = len(batch)
        while batch:
            # Contexts are held until the branches that are built together exist. As branches take
            # more memory, half of the rest has room for its own at the same time.
            has_contexts = any(work.context.buffer is not None for work in batch)
            count = min(most, -(-len(batch) // 2) if has_contexts else len(batch))
            # Requests leave the deque here: no context is held once its branches exist.
            left = [batch.popleft() for _ in range(count)]
            with Attempt() as tried:
                for work, failure in self._built([*left]):
                    left.remove(work)
                    if failure is not None:
                        yield from self._lose(work, failure)
                        continue
                    joined.append(work)
                    at.drawing.append(work)
            if tried.error is None:
                continue
            if len(left) > 1:
                self.memory.remedy(tried.error, left, kind=None)
                batch.extendleft(reversed(left))
                most = len(left) // 2
                continue
            (work,) = left
            # A job that waits to draw may free its context; otherwise a thinking job may.
            others, can_wait = batch or at.ready, bool(batch or at.ready or at.thinking)
            match self.memory.remedy(tried.error, left, company=at.drawing, can_wait=can_wait):
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
                    yield from self._lose(work, tried.error)
        for work in joined:
            yield work, Progress(work.job.custom_id, "denoise", 0, work.denoise_state.steps)

    def _built(
        self, works: Sequence[ImageRequest]
    ) -> Iterator[tuple[ImageRequest, JobError | None]]:
        """Build branches together; yield each request as it is done, with its error if any."""
        builds = [work.stages.build_branches(work) for work in works]
        for number, failure in prefill_together(self._model, builds, self._most_rows(works)):
            yield works[number], failure

    def _denoise(self) -> Events:
        """Take a step of each picture that advances in this pass, grouped by size."""
        at = self._at
        stepping = self._admission.stepping(at)
        left = [work for work in at.drawing if not work.denoise_state.is_done]
        for work in left:
            phase = "denoise_rest" if work.denoise_steps else "denoise_first"
            work.clock.enter(phase if work in stepping else "queue")
        now_stepping = (work for work in left if work in stepping)
        for batch in group_by(now_stepping, lambda work: work.canvas.bucket).values():
            while batch:
                size = at.most.drawing
                now, batch = batch[:size], batch[size:]
                yield from self.memory.attempt(now, self._denoise_step, self._lose)

    def _denoise_step(self, *batch: ImageRequest) -> Events:
        # If a batch failed, some pictures may have taken the step already.
        left = {one.denoise_state: one for one in batch if one.denoise_state.done == one.steps_done}

        def velocities(states: Sequence[DenoiseState]) -> list[Tensor]:
            live = []
            for state in states:
                work, step = left[state], state.step
                branches = work.branches[: None if work.denoise_plan.is_guided(step) else 1]
                scale = work.job.guidance_scale
                live.append(DenoiseInput(state.latents, step, scale, branches))
            return self._model.velocities(live)

        denoise_step([*left], velocities)
        for work in batch:
            state = work.denoise_state
            work.denoise_steps = state.done - work.first_step
            work.batch["denoise"] = max(work.batch["denoise"], len(batch))
            if state.is_done:
                work.clock.enter("queue")
                work.branches, work.step_cache = (), state.velocities.report()
        # All are saved before any is reported: no reported step is ever run again.
        for work in batch:
            work.stages.keep_latents(work)
        for work in batch:
            done, steps = work.steps_done, work.denoise_state.steps
            yield work, Progress(work.job.custom_id, "denoise", done, steps)

    def _leave(self, through: Sequence[ImageRequest]) -> Events:
        """Decode the pictures that have been drawn, or let them wait for memory."""
        at = self._at
        at.drawing = [work for work in at.drawing if work not in through]
        at.is_full = at.is_full and not through
        if through:  # a decode may need the memory of their branches
            self._model.arena.shrink()
        for work in through:
            requeue = self._decode_later if at.holds_memory else None
            yield from self.memory.attempt([work], self._decode, self._lose, requeue=requeue)

    def _decode(self, work: ImageRequest) -> Events:
        work.stages.decode(work)
        work.stages.end(work)
        yield work, work

    def _decode_later(self, work: ImageRequest) -> None:
        self.memory.put_off(work, "decode")
        self._at.undecoded.append(work)

    def _lose(self, lost: ImageRequest, error: Exception) -> Events:
        self._remove(lost)
        lost.stages.end(lost)
        yield lost, lost.as_lost(error)

    def _remove(self, work: ImageRequest) -> None:
        is_writing = work.decoding in self._at.thinking
        self._at.remove(work)
        if is_writing:
            self._wake(work)
        work.release()

    def _wake(self, writer: ImageRequest) -> None:
        """Put the items that waited for a request's text at the front of the line."""
        waited = self._awaited.pop(writer.text_key, [])
        self._admission.put_back(waited)
