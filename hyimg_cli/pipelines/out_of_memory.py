"""Out of memory: how the remedies that `failures` chooses are applied, and what a line records.

Tiling changes pixels, so pictures are decoded in tiles only if the user asks for it. A video may
have taken hours before its decode; rather than lose it, its decode uses smaller tiles, and its line
says so. Any other fault of a batch is also located by halving, until it belongs to a single job.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from weakref import WeakSet

import torch

from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.failures import Remedy, choose_remedy, is_out_of_memory
from hyimg_cli.pipelines.request import Request

logger = logging.getLogger(__name__)
Requests = Sequence[Request[Any]]
Event = TypeVar("Event")
Form = TypeVar("Form", bound=Request[Any])
_ALONE = Together(1, 1)
SharedStage = Literal["thinking", "drawing"]
# Notes for a job that gets REQUEUE, by the stage that ran out of memory.
_WAITS = {
    "prefill": "not enough memory to start together with other jobs; started after them",
    "text": "started again: not enough memory to write longer texts together",
    "branches": "started again: not enough memory for its context and another job's branches",
    "decode": "not enough memory to decode together with other jobs; decoded after them",
}


class Attempt:
    """Context manager around a stage that catches its exception.

    `with Attempt() as tried` keeps the exception as `tried.error`, for `MemoryPolicy.remedy` to
    judge.
    """

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None


class MemoryPolicy:
    """The remedies of one run, and the limits that it learns.

    `most`: the number of jobs that may think and draw together from now on.
    """

    def __init__(self, drop: Callable[[], object], kept: str, most: Together = _ALONE) -> None:
        """`drop` frees what is kept for other jobs; `kept` names it in messages."""
        self.most = most
        self._drop, self._kept = drop, kept
        # Requests for which `drop` was called, and which have neither got on nor waited since.
        self._dropped_for = WeakSet[Request[Any]]()

    def attempt(
        self,
        batch: Sequence[Form],
        stage: Callable[..., Iterable[Event]],
        lose: Callable[[Form, Exception], Iterable[Event]],
        *,
        kind: SharedStage = "drawing",
        requeue: Callable[[Form], object] | None = None,
    ) -> Iterator[Event]:
        """Run `stage(*batch)`, and apply the remedies if it fails.

        The remedies are halves, a retry, or `requeue` if other jobs will free memory. `lose` gets
        the job that is at fault.
        """
        with Attempt() as tried:
            yield from stage(*batch)
        if tried.error is None:
            # What is kept by now, may be of the batch itself, can be dropped for it again.
            self._dropped_for -= {*batch}
            return
        half = len(batch) // 2
        remedy = self.remedy(tried.error, batch, kind=kind, can_wait=requeue is not None)
        if remedy is Remedy.SPLIT:
            for part in (batch[:half], batch[half:]):
                yield from self.attempt(part, stage, lose, kind=kind, requeue=requeue)
        elif remedy is Remedy.RETRY:
            yield from self.attempt(batch, stage, lose, kind=kind, requeue=requeue)
        elif remedy is Remedy.REQUEUE and requeue is not None:
            requeue(batch[0])
        else:
            yield from lose(batch[0], tried.error)

    def remedy(
        self,
        error: Exception,
        requests: Requests,
        *,
        kind: SharedStage | None = "drawing",
        company: Requests = (),
        can_wait: bool = False,
    ) -> Remedy:
        """Return the next attempt at `requests` that have failed together, and free memory for it.

        `kind`: the stage in which fewer work together from now on, if memory was short. `company`:
        the requests that use the memory; `can_wait`: other requests will free some.
        """
        is_short, count = is_out_of_memory(error), len(requests)
        remedy = choose_remedy(
            count,
            is_short=is_short,
            has_company=len(company) > 0,
            has_dropped=requests[0] in self._dropped_for,
            can_wait=can_wait,
        )
        if remedy is Remedy.SPLIT and is_short and company:
            self.note(company, f"not enough memory to draw more than {len(company)} together")
            self.limit("drawing", len(company))
        elif remedy is Remedy.SPLIT:
            what = "out of memory" if is_short else repr(error)
            self.note(requests, f"a batch of {count} failed ({what}); continued in halves")
            if is_short and kind is not None:
                self.limit(kind, count // 2)
        elif remedy is Remedy.RETRY:
            self.note(requests, f"out of memory; continued after dropping {self._kept}")
            self._dropped_for.add(requests[0])
            self._drop()
        if is_short or remedy is not Remedy.FAIL:
            # Its frames keep activations alive. Other errors of lost jobs keep theirs, to show the
            # fault.
            error.__traceback__ = error.__context__ = None
        if is_short:
            torch.cuda.empty_cache()
        return remedy

    def was_short_for(self, request: Request[Any]) -> bool:
        """True if a request alone ran out of memory, and has neither got on nor waited since."""
        return request in self._dropped_for

    def limit(self, kind: SharedStage, count: int) -> None:
        """Let at most `count` jobs work together from now on."""
        self.most = self.most._replace(**{kind: count})

    def put_off(self, request: Request[Any], stage: str) -> None:
        """Let a request wait until others have drawn.

        The prefixes that they leave may be in its way again, so they may be dropped for it once
        more.
        """
        self.note([request], _WAITS[stage])
        self._dropped_for.discard(request)
        request.clock.enter("queue")

    def note(self, requests: Requests, note: str) -> None:
        """Record a remedy in the log and in the requests' lines."""
        logger.warning("%s: %s", ", ".join(one.job.custom_id for one in requests), note)
        for request in requests:
            request.warnings.append(note)
