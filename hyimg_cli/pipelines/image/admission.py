"""Decide which jobs join a continuous batch, and which advance in each pass.

WholeBatches   jobs of a run, all known. They write their texts together and draw together once
               a batch is full or nothing can fill it. Then the next jobs begin.
Served         jobs of a server. Batch jobs work like those of a run. Online jobs begin as soon
               as there is room, and join the drawing at any step. While an online job is at
               work, batch jobs advance in only one of `background_pass` passes.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain

from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.image.think import DecodeRequest, repeated_texts
from hyimg_cli.pipelines.out_of_memory import MemoryPolicy
from hyimg_cli.pipelines.queue import Dropped, Ticket, TicketQueue
from hyimg_cli.settings.run import BatchConfig
from hyimg_cli.spec.job import ImageJob

# Places that a server adds for online jobs to a full batch. Where memory is short, online jobs get
# at most one place in `_ONLINE_PART`.
ONLINE_PLACES, _ONLINE_PART = 2, 4


class AtWork:
    """The requests of a batch, by stage.

    `preempted`: begun, but without K/V now; they come before the waiting jobs. `beginning`: about
    to be prefilled together. `undecoded`: waiting for the memory that their decode needs.
    `is_full`: no memory to admit another request until some have drawn.
    """

    def __init__(self, memory: MemoryPolicy) -> None:
        self.memory = memory
        self.preempted: deque[ImageRequest] = deque()
        self.beginning: list[ImageRequest] = []
        self.thinking: dict[DecodeRequest, ImageRequest] = {}
        self.ready: deque[ImageRequest] = deque()
        self.drawing: list[ImageRequest] = []
        self.undecoded: deque[ImageRequest] = deque()
        self.is_full = False

    def __iter__(self) -> Iterator[ImageRequest]:
        begun = (self.preempted, self.beginning, self.thinking.values())
        return chain(*begun, self.ready, self.drawing, self.undecoded)

    @property
    def most(self) -> Together:
        """Maximum number of jobs that think and draw together.

        This is less than the configured number if memory was short.
        """
        return self.memory.most

    @property
    def to_think(self) -> list[ImageRequest]:
        """Requests that think, or will once they are prefilled."""
        return [*self.thinking.values(), *(one for one in self.beginning if one.writes_text)]

    @property
    def to_draw(self) -> list[ImageRequest]:
        """Requests that are ready to draw, or will be once they are prefilled."""
        return [*self.ready, *(one for one in self.beginning if not one.writes_text)]

    @property
    def holds_memory(self) -> bool:
        return bool(self.thinking or self.ready or self.drawing)

    def remove(self, work: ImageRequest) -> None:
        """Remove a request, whatever its stage."""
        self.thinking = {of: one for of, one in self.thinking.items() if one is not work}
        for place in (self.preempted, self.beginning, self.ready, self.drawing, self.undecoded):
            if work in place:
                place.remove(work)


class WholeBatches:
    """Jobs that are all known from the start, in order.

    Every additional row makes a decode step more efficient, while a few pictures already fill a
    denoise step. A job that needs no text draws as soon as the next job in line does need one.
    """

    def __init__(
        self,
        tickets: Iterable[Ticket],
        stages: ImageStages,
        new_clock: Callable[[float], PhaseClock],
    ) -> None:
        """`new_clock`: makes a clock that begins at a given time."""
        self.stages = stages
        self._waiting, self._new_clock = deque(tickets), new_clock
        self._repeated = repeated_texts(map(self.text_of, self._waiting))

    @property
    def can_come(self) -> bool:
        """True if more jobs may come."""
        return bool(self._waiting)

    def next_pass(self, at: AtWork) -> Sequence[ImageRequest]:
        """Begin a pass; return the requests that have been dropped."""
        return [work for work in at if work.ticket.is_dropped]

    def text_of(self, item: Ticket) -> Hashable | None:
        """Return a key that is equal for jobs that would write, or were given, the same text."""
        return _text_of(_job(item), self.stages)

    def is_repeated(self, text: Hashable | None) -> bool:
        """True if another job may have the same text."""
        return text is not None and hash(text) in self._repeated

    def take(self, at: AtWork) -> ImageRequest | Ticket | None:
        """Return the request or ticket that begins now, preempted ones first; None if none can."""
        thinks, draws = len(at.to_think), len(at.to_draw)
        has_places = thinks < at.most.thinking and draws < at.most.drawing
        if not has_places or at.drawing or at.is_full or self._is_due(at):
            return None
        if at.preempted:
            return at.preempted.popleft()
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, items: Iterable[Ticket]) -> None:
        """Put taken tickets back at the front of the line."""
        self._waiting.extendleft(reversed([*items]))

    def begin(self, item: Ticket) -> ImageRequest:
        """Return the request of a job that begins."""
        work = ImageRequest(_job(item), self._new_clock(item.submitted))
        work.stages, work.ticket = self.stages, item
        return work

    def tokens(self, at: AtWork) -> int:
        """Number of decode steps in this pass."""
        return 0 if at.drawing else 1

    def writing(self, at: AtWork) -> list[ImageRequest]:
        """Return the requests that take the next decode step."""
        return [*at.thinking.values()]

    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        """Return the ready requests that start to draw now."""
        is_due = not at.drawing and self._is_due(at)
        return _alike(at.ready, at.most.drawing) if is_due else ()

    def stepping(self, at: AtWork) -> list[ImageRequest]:
        """Return the drawing requests that take a denoise step in this pass."""
        return at.drawing

    def through(self, at: AtWork) -> list[ImageRequest]:
        """Return the requests that have been drawn and are decoded now."""
        # A picture is decoded when no branches exist; see `footprint.Needs`.
        return at.drawing if all(work.denoise_state.is_done for work in at.drawing) else []

    def _is_due(self, at: AtWork) -> bool:
        """True if a batch draws now: it is full, or nothing is left that could fill it."""
        ready = at.to_draw
        if not ready or len(ready) >= at.most.drawing:
            return bool(ready)
        following = at.preempted[0].job if at.preempted else next(map(_job, self._waiting), None)
        if following is None or at.is_full:
            return not (at.to_think and ready[0].job.writes_text)
        return following.writes_text and not ready[0].job.writes_text


class Served:
    """Jobs of a server, from a queue; waits for the queue if nothing is at work.

    The methods have the same meaning as those of `WholeBatches`.
    """

    def __init__(
        self,
        queue: TicketQueue,
        stages: ImageStages,
        new_clock: Callable[[float], PhaseClock],
        config: BatchConfig,
    ) -> None:
        """`stages`: stages without a scope. `new_clock`: as of `WholeBatches`.

        `config` sets the number of decode steps between two denoise steps, and how rarely batch
        jobs advance while an online job is at work.
        """
        self.stages = stages
        self._queue, self._new_clock, self._config = queue, new_clock, config
        # Tickets taken from the queue but not begun, by `is_online`.
        self._waiting: dict[bool, deque[Ticket]] = {True: deque(), False: deque()}
        self._passes = 0
        # True if a batch job has begun in this pass while online jobs were at work.
        self._has_begun = False
        # If both kinds compete for every place, they alternate: an online job, then a batch.
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
        return [work for work in at if work.ticket.is_dropped]

    def text_of(self, item: Ticket) -> Hashable | None:
        return _text_of(_job(item), self.stages.within(item.scope))

    def is_repeated(self, text: Hashable | None) -> bool:
        return text is not None  # future jobs are unknown

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
        """Return the requests that take the next decode step.

        Online jobs write only while there is a place for one more to draw. Until then rows
        accumulate, which makes each decode step more efficient.
        """
        can_draw = len(at.drawing) + sum(map(_is_online, at.ready)) < at.most.drawing
        can_batch = self._batch_moves(at) and not any(map(_is_batch, at.drawing))
        return [one for one in at.thinking.values() if (can_batch if _is_batch(one) else can_draw)]

    def joining(self, at: AtWork) -> Sequence[ImageRequest]:
        batch, online = list[ImageRequest](), [*filter(_is_online, at.ready)]
        if not any(map(_is_batch, at.drawing)) and self._is_batch_due(at):
            batch = _alike([*filter(_is_batch, at.ready)], self._most_of_batch(at).drawing)
        # One batch job goes first; otherwise online jobs would fill every place.
        return [*batch[:1], *online, *batch[1:]][: max(0, at.most.drawing - len(at.drawing))]

    def stepping(self, at: AtWork) -> list[ImageRequest]:
        return at.drawing if self._batch_moves(at) else [*filter(_is_online, at.drawing)]

    def through(self, at: AtWork) -> list[ImageRequest]:
        """Return the requests that are decoded now.

        At most one of them is a batch job, so that an arriving online job waits for one decode at
        most.
        """
        done = [work for work in at.drawing if work.denoise_state.is_done]
        batch = [*filter(_is_batch, done)] if self._batch_moves(at) else []
        return [*filter(_is_online, done), *batch[:1]]

    def _batch_moves(self, at: AtWork) -> bool:
        """True if batch jobs begin, write, step and are decoded in this pass."""
        return self._passes % self._config.background_pass == 0 or not any(map(_is_online, at))

    def _can_batch_begin(self, at: AtWork) -> bool:
        """True if `WholeBatches.take` would begin a job, counting batch jobs alone."""
        if self._has_begun or not self._batch_moves(at) or any(map(_is_batch, at.drawing)):
            return False
        most = self._most_of_batch(at)
        thinking = sum(map(_is_batch, at.to_think))
        ready = sum(map(_is_batch, at.to_draw))
        return thinking < most.thinking and ready < most.drawing

    def _is_batch_due(self, at: AtWork) -> bool:
        """True if a batch draws now: it is full, or nothing can fill it."""
        ready = sum(map(_is_batch, at.ready))
        is_thinking = any(map(_is_batch, at.thinking.values()))
        is_waiting = bool(self._waiting[False]) or any(map(_is_batch, at.preempted))
        can_fill = is_thinking or (is_waiting and self._has_room(at))
        return ready >= self._most_of_batch(at).drawing or not can_fill

    def _has_room(self, at: AtWork) -> bool:
        """True if another job may begin.

        The limit is the number of requests that `WholeBatches` has while a batch draws and others
        wait.
        """
        thinking = len(at.to_think)
        alive = thinking + len(at.to_draw) + len(at.drawing)
        has_places = alive < sum(at.most) - 1 and thinking < at.most.thinking
        return has_places and not (at.is_full or at.undecoded)

    def _most_of_batch(self, at: AtWork) -> Together:
        return Together(*(most - min(ONLINE_PLACES, most // _ONLINE_PART) for most in at.most))

    def _look_at_queue(self, at: AtWork) -> None:
        """Take one waiting ticket of each kind; wait for a ticket if nothing is at work."""
        if not (any(at) or any(self._waiting.values())):
            for ticket in self._queue.take(1, wait=True):
                self._waiting[ticket.is_online].append(ticket)
        for is_online, waiting in self._waiting.items():
            if not waiting:
                waiting += self._queue.take(1, wait=False, is_online=is_online)


# The policy that decides which jobs join a batch and which advance in a pass.
Admission = WholeBatches | Served


def _text_of(job: ImageJob, stages: ImageStages) -> Hashable | None:
    text = stages.shared_text(job) or job.cot_token_ids
    return text and (stages.scope, text)


def _alike(ready: Sequence[ImageRequest], most: int) -> list[ImageRequest]:
    """Return the requests that can draw together with the one that has waited longest."""
    bucket = ready[0].canvas.bucket if ready else None
    return [work for work in ready if work.canvas.bucket == bucket][:most]


def _is_online(work: ImageRequest) -> bool:
    return work.ticket.is_online


def _is_batch(work: ImageRequest) -> bool:
    return not work.ticket.is_online


def _job(ticket: Ticket) -> ImageJob:
    assert isinstance(ticket.job, ImageJob), "a model of pictures is given pictures"
    return ticket.job
