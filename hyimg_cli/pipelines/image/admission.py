"""Which jobs join a continuous batch, and which of them move in a pass of its loop.

WholeBatches   jobs of a run, all known: they write their texts together, draw together once a batch
               is full or nothing can fill it, and then the next ones begin
Served         jobs of a server. Those of its batches work as those of a run do. Online ones begin
               as soon as there is room, and join the drawing at any step. While one of them is at
               work, the batches' jobs move in one pass of eight
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain

from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.image.think import DecodeRequest, repeated_texts
from hyimg_cli.pipelines.out_of_memory import MemoryPolicy
from hyimg_cli.pipelines.queue import Dropped, JobQueue, Ticket
from hyimg_cli.settings.run import BatchConfig
from hyimg_cli.spec.job import ImageJob

# Places that a server has for online jobs beside a full batch, and the part of all places that they
# are at most where memory is short.
ONLINE_PLACES, _ONLINE_PART = 2, 4


class AtWork:
    """A batch's requests, by stage.

    `preempted`: begun, but without K/V now; they come before those that wait. `undecoded`: their
    decode waits for memory. `is_full`: no memory to admit another one until some have drawn.
    """

    def __init__(self, memory: MemoryPolicy) -> None:
        self.memory = memory
        self.preempted: deque[ImageRequest] = deque()
        self.thinking: dict[DecodeRequest, ImageRequest] = {}
        self.ready: deque[ImageRequest] = deque()
        self.drawing: list[ImageRequest] = []
        self.undecoded: deque[ImageRequest] = deque()
        self.is_full = False

    def __iter__(self) -> Iterator[ImageRequest]:
        parts = (self.preempted, self.thinking.values(), self.ready, self.drawing, self.undecoded)
        return chain(*parts)

    @property
    def most(self) -> Together:
        """How many may think and draw: fewer than were asked for where memory was short."""
        return self.memory.most

    @property
    def holds_memory(self) -> bool:
        return bool(self.thinking or self.ready or self.drawing)

    def remove(self, work: ImageRequest) -> None:
        """Let go of a request, whatever its stage."""
        self.thinking = {of: one for of, one in self.thinking.items() if one is not work}
        for place in (self.preempted, self.ready, self.drawing, self.undecoded):
            if work in place:
                place.remove(work)


class WholeBatches:
    """Known jobs, in their order. An item is a job that has not begun.

    A decode step gains from every row, a denoise step is full with few pictures; a job that needs
    no text draws as soon as nobody of its kind is next in line.
    """

    def __init__(
        self,
        jobs: Iterable[ImageJob],
        stages: ImageStages,
        new_clock: Callable[[], PhaseClock],
    ) -> None:
        self.stages = stages
        self._waiting, self._new_clock = deque(jobs), new_clock
        self._repeated = repeated_texts(map(self.text_of, self._waiting))

    @property
    def can_come(self) -> bool:
        """True if another job may come."""
        return bool(self._waiting)

    def next_pass(self, at: AtWork) -> Sequence[ImageRequest]:
        """Begin a pass; return the requests that nobody wants any more."""
        return ()

    def text_of(self, item: ImageJob) -> Hashable | None:
        """Equal for jobs that would write, or were given, the same text."""
        return _text_of(item, self.stages)

    def is_repeated(self, text: Hashable | None) -> bool:
        """True if another job may have the same text."""
        return text is not None and hash(text) in self._repeated

    def take(self, at: AtWork) -> ImageRequest | ImageJob | None:
        """The next one that begins now: preempted, or new."""
        has_places = len(at.thinking) < at.most.thinking and len(at.ready) < at.most.drawing
        if not has_places or at.drawing or at.is_full or self._is_due(at):
            return None
        if at.preempted:
            return at.preempted.popleft()
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, items: Iterable[ImageJob]) -> None:
        """Have items that were taken be the next ones."""
        self._waiting.extendleft(reversed([*items]))

    def begin(self, item: ImageJob) -> ImageRequest:
        """The request of an item that begins."""
        work = ImageRequest(item, self._new_clock())
        work.stages = self.stages
        return work

    def tokens(self, at: AtWork) -> int:
        """Number of decode steps in this pass."""
        return 0 if at.drawing else 1

    def writing(self, at: AtWork) -> list[ImageRequest]:
        """Those that take the next decode step."""
        return [*at.thinking.values()]

    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        """Those that are ready and draw from now on."""
        is_due = not at.drawing and self._is_due(at)
        return _alike(at.ready, at.most.drawing) if is_due else ()

    def stepping(self, at: AtWork) -> list[ImageRequest]:
        """Those that draw and take a denoise step in this pass."""
        return at.drawing

    def through(self, at: AtWork) -> list[ImageRequest]:
        """Those that have drawn and are decoded now."""
        # A picture is decoded when no branches stand; see `footprint.Needs`.
        return at.drawing if all(work.drawing.is_done for work in at.drawing) else []

    def _is_due(self, at: AtWork) -> bool:
        """True if a batch draws now: it is full, or nothing is left that could fill it."""
        if not at.ready or len(at.ready) >= at.most.drawing:
            return bool(at.ready)
        following = at.preempted[0].job if at.preempted else next(iter(self._waiting), None)
        if following is None or at.is_full:
            return not (at.thinking and at.ready[0].job.writes_text)
        return following.writes_text and not at.ready[0].job.writes_text


class Served:
    """Jobs of a server, from a queue that is waited for where nothing is at work. An item is the
    ticket of one that has not begun; the methods answer what those of `WholeBatches` do.
    """

    def __init__(
        self,
        queue: JobQueue,
        stages: ImageStages,
        new_clock: Callable[[float], PhaseClock],
        config: BatchConfig,
    ) -> None:
        """`stages`: of nobody's scope. `new_clock`: one that begins at a time. `config` says how
        many decode steps come between two denoise steps, and how seldom batches move while an
        online job is at work.
        """
        self.stages = stages
        self._queue, self._new_clock, self._config = queue, new_clock, config
        # Taken from the queue and not begun, by `is_online`.
        self._waiting: dict[bool, deque[Ticket]] = {True: deque(), False: deque()}
        self._passes = 0
        # A batch's job has begun in this pass beside online ones.
        self._has_begun = False
        # Where the kinds compete for every place: online jobs have one, and then batches.
        self._is_batch_next = False

    @property
    def can_come(self) -> bool:
        return any(self._waiting.values()) or not self._queue.is_closed

    def next_pass(self, at: AtWork) -> Sequence[ImageRequest]:
        self._passes, self._has_begun = self._passes + 1, False
        for waiting in self._waiting.values():
            for ticket in [ticket for ticket in waiting if ticket.is_dropped]:
                waiting.remove(ticket)
                ticket.tell(Dropped(ticket.job.custom_id))
        return [work for work in at if _ticket(work).is_dropped]

    def text_of(self, item: Ticket) -> Hashable | None:
        return _text_of(_job(item), self.stages.within(item.scope))

    def is_repeated(self, text: Hashable | None) -> bool:
        return text is not None  # nobody knows who comes

    def take(self, at: AtWork) -> ImageRequest | Ticket | None:
        self._look_at_queue(at)
        if not self._has_room(at):
            return None
        is_batch_due = self._is_batch_next and not any(map(_is_batch, at))
        for is_batch in (True, False) if is_batch_due else (False, True):
            preempted = [work for work in at.preempted if _is_batch(work) == is_batch]
            waiting = self._waiting[not is_batch]
            if not (preempted or waiting):
                continue
            if is_batch:
                if not (is_batch_due or self._can_batch_begin(at)):
                    continue
                self._has_begun = any(map(_is_online, at))
            self._is_batch_next = not is_batch
            if preempted:
                at.preempted.remove(preempted[0])
                return preempted[0]
            return waiting.popleft()
        return None

    def put_back(self, items: Iterable[Ticket]) -> None:
        for item in reversed([*items]):
            self._waiting[item.is_online].appendleft(item)

    def begin(self, item: Ticket) -> ImageRequest:
        work = ImageRequest(_job(item), self._new_clock(item.submitted))
        work.stages, work.ticket = self.stages.within(item.scope), item
        return work

    def tokens(self, at: AtWork) -> int:
        return self._config.tokens_between_steps if at.drawing else 1

    def writing(self, at: AtWork) -> list[ImageRequest]:
        """Online ones while there is a place for one more to draw: until then rows gather, from
        which a decode step gains.
        """
        can_draw = len(at.drawing) + sum(map(_is_online, at.ready)) < at.most.drawing
        can_batch = self._batch_moves(at) and not any(map(_is_batch, at.drawing))
        return [one for one in at.thinking.values() if (can_batch if _is_batch(one) else can_draw)]

    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        batch, online = list[ImageRequest](), [*filter(_is_online, at.ready)]
        if not any(map(_is_batch, at.drawing)) and self._is_batch_due(at):
            batch = _alike([*filter(_is_batch, at.ready)], self._most_of_batch(at).drawing)
        # One of a batch comes before all: online jobs would fill every place.
        return [*batch[:1], *online, *batch[1:]][: max(0, at.most.drawing - len(at.drawing))]

    def stepping(self, at: AtWork) -> list[ImageRequest]:
        return at.drawing if self._batch_moves(at) else [*filter(_is_online, at.drawing)]

    def through(self, at: AtWork) -> list[ImageRequest]:
        """One of a batch at a time: an online job that comes waits for no more."""
        done = [work for work in at.drawing if work.drawing.is_done]
        batch = [*filter(_is_batch, done)] if self._batch_moves(at) else []
        return [*filter(_is_online, done), *batch[:1]]

    def _batch_moves(self, at: AtWork) -> bool:
        """True if jobs of batches begin, write, step and are decoded in this pass."""
        return self._passes % self._config.background_pass == 0 or not any(map(_is_online, at))

    def _can_batch_begin(self, at: AtWork) -> bool:
        """As `WholeBatches.take`, of the batches' jobs alone."""
        if self._has_begun or not self._batch_moves(at) or any(map(_is_batch, at.drawing)):
            return False
        most = self._most_of_batch(at)
        thinking = sum(map(_is_batch, at.thinking.values()))
        ready = sum(map(_is_batch, at.ready))
        return thinking < most.thinking and ready < most.drawing

    def _is_batch_due(self, at: AtWork) -> bool:
        """True if a batch draws now: it is full, or nothing can fill it."""
        ready = sum(map(_is_batch, at.ready))
        is_thinking = any(map(_is_batch, at.thinking.values()))
        is_waiting = bool(self._waiting[False]) or any(map(_is_batch, at.preempted))
        can_fill = is_thinking or (is_waiting and self._has_room(at))
        return ready >= self._most_of_batch(at).drawing or not can_fill

    def _has_room(self, at: AtWork) -> bool:
        """As many are alive as `WholeBatches` has while a batch draws and others wait."""
        alive = len(at.thinking) + len(at.ready) + len(at.drawing)
        has_places = alive < sum(at.most) - 1 and len(at.thinking) < at.most.thinking
        return has_places and not (at.is_full or at.undecoded)

    def _most_of_batch(self, at: AtWork) -> Together:
        return Together(*(most - min(ONLINE_PLACES, most // _ONLINE_PART) for most in at.most))

    def _look_at_queue(self, at: AtWork) -> None:
        """Have one of each kind here, if any waits; wait for one if nothing is at work."""
        if not (any(at) or any(self._waiting.values())):
            for ticket in self._queue.take(1, wait=True):
                self._waiting[ticket.is_online].append(ticket)
        for is_online, waiting in self._waiting.items():
            if not waiting:
                waiting += self._queue.take(1, wait=False, is_online=is_online)


# What a batch asks who joins, and who moves in a pass.
Admission = WholeBatches | Served


def _text_of(job: ImageJob, stages: ImageStages) -> Hashable | None:
    text = stages.shared_text(job) or job.cot_token_ids
    return text and (stages.scope, text)


def _alike(ready: Sequence[ImageRequest], most: int) -> list[ImageRequest]:
    """Those that can draw together with the one that has waited longest."""
    bucket = ready[0].canvas.bucket if ready else None
    return [work for work in ready if work.canvas.bucket == bucket][:most]


def _ticket(work: ImageRequest) -> Ticket:
    assert work.ticket is not None, "a server knows its requests by their tickets"
    return work.ticket


def _is_online(work: ImageRequest) -> bool:
    return _ticket(work).is_online


def _is_batch(work: ImageRequest) -> bool:
    return not _ticket(work).is_online


def _job(ticket: Ticket) -> ImageJob:
    assert isinstance(ticket.job, ImageJob), "a model of pictures is given pictures"
    return ticket.job
