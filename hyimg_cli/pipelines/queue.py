"""Jobs waiting for a loaded model.

A run puts all of its jobs at once and takes them itself. Of a server, many callers' threads put
jobs, and the engine takes them.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.job import Job


@dataclass(frozen=True)
class Dropped:
    """The end of a job that is no longer wanted; it holds nothing any more."""

    custom_id: str


# What a ticket is told.
EngineEvent = Event | Request[Any] | Lost[Any] | Dropped


@dataclass(eq=False)
class Ticket:
    """A job that waits or is at work, identified by the ticket and not by its custom_id.

    `scope`: jobs of the same scope may share texts and prefixes. `folder`: where its result goes.
    `tell` gets the job's events, then exactly one end: a finished Request, Lost or Dropped. It must
    not block. `submitted`: the `time.perf_counter()` reading at which the job's clock begins.
    `is_dropped`: set by `TicketQueue.drop`; the pipeline checks it in each pass. `phase`: of a job
    at work, as the service counts it.
    """

    job: Job
    scope: str = ""
    caller: str = ""
    is_online: bool = False
    folder: JobFolder | None = None
    tell: Callable[[EngineEvent], object] = lambda told: None
    submitted: float = 0.0
    is_dropped: bool = False
    phase: str = ""


class TicketQueue:
    """Waiting tickets: online ones first, and callers take turns within each kind.

    `is_whole`: all tickets are in it from the start, so that nobody waits for more.
    """

    def __init__(self, tickets: Iterable[Ticket] = (), *, is_whole: bool = False) -> None:
        # By kind and then by caller: the waiting tickets. The caller whose turn it is comes first.
        self._waiting: dict[bool, dict[str, deque[Ticket]]] = {True: {}, False: {}}
        self._changed = threading.Condition()
        self.is_closed, self.is_whole = False, is_whole
        self.put(tickets)

    def put(self, tickets: Iterable[Ticket]) -> None:
        """Add tickets; a closed queue drops them."""
        with self._changed:
            refused = [*tickets] if self.is_closed else []
            for ticket in () if self.is_closed else tickets:
                callers = self._waiting[ticket.is_online]
                callers.setdefault(ticket.caller, deque()).append(ticket)
            self._changed.notify_all()
        _tell_dropped(refused)

    def take(
        self, room: int = sys.maxsize, *, wait: bool = False, is_online: bool | None = None
    ) -> list[Ticket]:
        """Return up to `room` tickets; none if none waits or the queue is closed.

        `is_online`: take only this kind. `wait`: block until a ticket waits or no more will come.
        """
        kinds = [of for kind, of in self._waiting.items() if is_online in (None, kind)]
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.is_closed or self.is_whole or any(kinds))
            taken: list[Ticket] = []
            for callers in () if self.is_closed else kinds:
                while callers and len(taken) < room:
                    caller = next(iter(callers))
                    own = callers.pop(caller)
                    taken.append(own.popleft())
                    if own:
                        callers[caller] = own  # after the other callers
            return taken

    def take_alike(self, room: int, is_alike: Callable[[Ticket], bool]) -> list[Ticket]:
        """Return up to `room` of the waiting tickets that are alike, without waiting for more."""
        with self._changed:
            queues = [own for callers in self._waiting.values() for own in callers.values()]
            alike = (ticket for own in queues for ticket in own if is_alike(ticket))
            taken = [*islice(alike, room)]
            self._remove(taken)
        return taken

    def drop(self, tickets: Iterable[Ticket]) -> None:
        """Drop tickets: waiting ones at once, others in the engine's next pass."""
        leaving = [*tickets]
        with self._changed:
            for ticket in leaving:
                ticket.is_dropped = True
            left = self._remove(leaving)
        _tell_dropped(left)

    def _remove(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Remove tickets, and return those of them that were waiting."""
        leaving, found = set(tickets), list[Ticket]()
        for callers in self._waiting.values():
            for caller, own in [*callers.items()]:
                found += [ticket for ticket in own if ticket in leaving]
                callers[caller] = deque(ticket for ticket in own if ticket not in leaving)
                if not callers[caller]:
                    del callers[caller]
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of waiting tickets, by kind."""
        with self._changed:
            return {
                "online" if is_online else "batch": sum(map(len, callers.values()))
                for is_online, callers in self._waiting.items()
            }

    def close(self) -> None:
        """Close the queue: drop all waiting tickets and wake every thread in `take`."""
        with self._changed:
            self.is_closed = True
            waiting = [
                ticket
                for callers in self._waiting.values()
                for own in callers.values()
                for ticket in own
            ]
            self._changed.notify_all()
        self.drop(waiting)


def _tell_dropped(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        ticket.tell(Dropped(ticket.job.custom_id))
