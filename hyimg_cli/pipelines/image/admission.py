"""Which jobs come to a continuous batch, and what of it goes on in a pass of its loop.

WholeBatches   all jobs are known: a batch draws when it is full, or nothing can fill it, and
               everybody waits until it is through
EachStep       jobs come at any time, and join the drawing at any step; while an online one is
               at work those of a server's batches take every eighth step with it
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.image.think import DecodeRequest, repeated_texts
from hyimg_cli.pipelines.out_of_memory import MemoryPolicy
from hyimg_cli.pipelines.queue import Dropped, JobQueue, Ticket
from hyimg_cli.spec.job import ImageJob

Item = TypeVar("Item")
# Places that a server's batches leave free for online jobs, and the part of all that is at most.
_FREE, _FREE_PART = 2, 4


class AtWork:
    """A batch's requests by where they are.

    `preempted`: begun, and without K/V again; they come before those that wait. `undecoded`: their
    decode waits for memory. `is_full`: no memory to admit another one, until some have drawn.
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
        """Hold a request no more, wherever it is."""
        self.thinking = {of: one for of, one in self.thinking.items() if one is not work}
        for place in (self.preempted, self.ready, self.drawing, self.undecoded):
            if work in place:
                place.remove(work)


class Admission(ABC, Generic[Item]):
    """Who comes, and what goes on. `waiting`: those that are next, in their order."""

    def __init__(self, stages: ImageStages) -> None:
        """`stages`: of nobody's scope."""
        self.stages = stages
        self.waiting: deque[Item] = deque()

    @property
    def is_open(self) -> bool:
        """True if others may come than those that wait."""
        return False

    def next_pass(self, at: AtWork) -> Sequence[ImageRequest]:
        """Begin a pass; the requests that nobody wants any more."""
        return ()

    @abstractmethod
    def text_of(self, item: Item) -> Hashable | None:
        """Equal for jobs that would write the same text, or were given it."""

    @abstractmethod
    def is_repeated(self, text: Hashable | None) -> bool:
        """True if another job may have the same text."""

    @abstractmethod
    def begin(self, item: Item) -> ImageRequest:
        """The request of one that begins."""

    @abstractmethod
    def has_next(self, at: AtWork) -> bool:
        """True if the next one begins now: a preempted one, or the first of those that wait."""

    @abstractmethod
    def tokens(self, at: AtWork) -> int:
        """Decode steps of this pass."""

    @abstractmethod
    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        """Those that are ready and draw from now on."""

    def moves(self, work: ImageRequest) -> bool:
        """True if a request goes on in this pass."""
        return True

    @abstractmethod
    def through(self, at: AtWork) -> list[ImageRequest]:
        """Those that have drawn and are decoded now."""

    def _text_of(self, job: ImageJob, stages: ImageStages) -> Hashable | None:
        text = stages.shared_text(job) or job.cot_token_ids
        return text and (stages.scope, text)


class WholeBatches(Admission[ImageJob]):
    """Known jobs, in their order. A decode step gains from every row, a denoise step is full with
    few pictures; a job that needs no text draws as soon as nobody of its kind is next in line.
    """

    def __init__(
        self,
        jobs: Iterable[ImageJob],
        stages: ImageStages,
        new_clock: Callable[[], PhaseClock],
    ) -> None:
        super().__init__(stages)
        self.waiting.extend(jobs)
        self._new_clock = new_clock
        self._repeated = repeated_texts(map(self.text_of, self.waiting))

    def text_of(self, item: ImageJob) -> Hashable | None:
        return self._text_of(item, self.stages)

    def is_repeated(self, text: Hashable | None) -> bool:
        return text is not None and hash(text) in self._repeated

    def begin(self, item: ImageJob) -> ImageRequest:
        work = ImageRequest(item, self._new_clock())
        work.stages = self.stages
        return work

    def has_next(self, at: AtWork) -> bool:
        # A batch that is ready to draw lets go of its contexts first; see `footprint.Needs`.
        has_room = len(at.thinking) < at.most.thinking and len(at.ready) < at.most.drawing
        is_able = has_room and not (at.drawing or at.is_full)
        return is_able and self._is_waiting(at) and not self._is_due(at)

    def tokens(self, at: AtWork) -> int:
        return 0 if at.drawing else 1

    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        """Those that can draw together with the one that has waited longest."""
        if at.drawing or not self._is_due(at):
            return ()
        bucket = at.ready[0].canvas.bucket
        return [work for work in at.ready if work.canvas.bucket == bucket][: at.most.drawing]

    def through(self, at: AtWork) -> list[ImageRequest]:
        # A picture is decoded when no branches stand; see `footprint.Needs`.
        return at.drawing if all(work.drawing.is_done for work in at.drawing) else []

    def _is_waiting(self, at: AtWork) -> bool:
        return bool(at.preempted or self.waiting)

    def _is_due(self, at: AtWork) -> bool:
        """True if a batch draws now: it is full, or nothing is left that could fill it."""
        if not at.ready or len(at.ready) >= at.most.drawing:
            return bool(at.ready)
        can_come = self._is_waiting(at) and not at.is_full
        if at.ready[0].job.writes_text:
            return not (at.thinking or can_come)
        return (
            not can_come or (at.preempted[0].job if at.preempted else self.waiting[0]).writes_text
        )


class EachStep(Admission[Ticket]):
    """Jobs of a server, from a queue that is waited for where nothing is at work."""

    def __init__(
        self,
        queue: JobQueue,
        stages: ImageStages,
        of_scope: Callable[[str], ImageStages],
        new_clock: Callable[[float], PhaseClock],
        *,
        tokens: int,
        background_every: int,
    ) -> None:
        """`new_clock`: one that begins at a time. `tokens`: decode steps between two denoise steps;
        `background_every`: of so many passes jobs of batches go on in one, while an online one is
        at work.
        """
        super().__init__(stages)
        self._queue, self._of_scope, self._new_clock = queue, of_scope, new_clock
        self._tokens, self._background_every = tokens, background_every
        self._passes, self._background_moves = 0, True
        # The next free place is for a batch's job: online ones would fill every one of them.
        self._is_behind_due = True

    @property
    def is_open(self) -> bool:
        return not self._queue.is_closed

    def next_pass(self, at: AtWork) -> Sequence[ImageRequest]:
        self._passes += 1
        # An online one that waits for a place gets it sooner where all go on.
        going = [*at.thinking.values(), *at.drawing]
        is_its_turn = self._passes % self._background_every == 0
        self._background_moves = is_its_turn or not any(map(_is_online, going))
        self._is_behind_due = self._is_behind_due or self._background_moves
        gone = [ticket for ticket in self.waiting if ticket.is_dropped]
        for ticket in gone:
            self.waiting.remove(ticket)
            ticket.tell(Dropped(ticket.job.custom_id))
        return [work for work in at if _ticket(work).is_dropped]

    def text_of(self, item: Ticket) -> Hashable | None:
        return self._text_of(_job(item), self._of_scope(item.scope))

    def is_repeated(self, text: Hashable | None) -> bool:
        return text is not None  # nobody knows who comes

    def begin(self, item: Ticket) -> ImageRequest:
        work = ImageRequest(_job(item), self._new_clock(item.submitted))
        work.stages, work.ticket = self._of_scope(item.scope), item
        return work

    def has_next(self, at: AtWork) -> bool:
        if at.is_full or at.undecoded:
            return False
        is_idle = not (self.waiting or any(at))
        self._background_moves = self._background_moves or is_idle
        is_due = self._is_behind_due = self._is_behind_due and all(map(_is_online, at))
        can_come = self._has_room(at)
        can_come_behind = self._background_moves or is_due
        can_come_behind = can_come_behind and self._has_room(at, is_free=is_due)
        if can_come and not at.preempted and not (self.waiting and self.waiting[0].is_online):
            take, taken = partial(self._queue.take, 1), list[Ticket]()
            if is_due and not is_idle and not self.waiting:
                taken = take(wait=False, batch_only=True)
            only = bool(self.waiting) or not can_come_behind
            self.waiting.extendleft(taken or take(wait=is_idle, online_only=only))
        first = _ticket(at.preempted[0]) if at.preempted else next(iter(self.waiting), None)
        return first is not None and (can_come if first.is_online else can_come_behind)

    def tokens(self, at: AtWork) -> int:
        return self._tokens if at.drawing else 1

    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        online = [work for work in at.ready if _is_online(work)]
        drawn_behind = sum(not _is_online(work) for work in at.drawing)
        first = 0 if drawn_behind else 1  # see `_is_behind_due`
        behind = [work for work in at.ready if not _is_online(work)]
        most_behind = at.most.drawing - _free(at.most.drawing) - drawn_behind
        behind = behind[: max(0, most_behind) if self._background_moves else first]
        places = max(0, at.most.drawing - len(at.drawing))
        return [*behind[:first], *online, *behind[first:]][:places]

    def moves(self, work: ImageRequest) -> bool:
        return self._background_moves or _is_online(work)

    def through(self, at: AtWork) -> list[ImageRequest]:
        return [work for work in at.drawing if work.drawing.is_done]

    def _has_room(self, at: AtWork, *, is_free: bool = True) -> bool:
        """As many are alive as `WholeBatches` has while a batch draws and others wait. Not all of
        the places are `is_free` to a batch's jobs.
        """
        thinking, drawing = at.most
        alive = len(at.thinking) + len(at.ready) + len(at.drawing)
        most_alive = thinking + drawing - 1
        if not is_free:
            thinking, most_alive = thinking - _free(thinking), most_alive - _free(drawing)
        return alive < most_alive and len(at.thinking) < thinking


def _free(most: int) -> int:
    """Of so many places those that are left to online jobs."""
    return min(_FREE, most // _FREE_PART)


def _ticket(work: ImageRequest) -> Ticket:
    assert work.ticket is not None, "a server knows its requests by their tickets"
    return work.ticket


def _is_online(work: ImageRequest) -> bool:
    return _ticket(work).is_online


def _job(ticket: Ticket) -> ImageJob:
    assert isinstance(ticket.job, ImageJob), "a model of pictures is given pictures"
    return ticket.job
