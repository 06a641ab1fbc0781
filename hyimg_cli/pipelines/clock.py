"""Where a job's seconds go: disjoint wall segments by phase, and its share of each."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from hyimg_cli.spec.events import PHASES

# A job waits in them, or is passed over: they take no share while another is in another phase.
_WAITS = ("queue",)
_YIELDS = ("think",)


class Shares:
    """Deals wall time to the jobs that are at work at that moment, in equal parts.

    All shares of one object together are never more than the time that passed. A job that writes
    text waits while another is prefilled or drawn: then that other one has all of it.
    """

    def __init__(self) -> None:
        self._at_work: dict[PhaseClock, str] = {}
        self._dealt_until = 0.0
        # A server's jobs are written in threads of their own.
        self._lock = Lock()

    def move(self, clock: "PhaseClock", phase: str | None, now: float) -> None:
        """A job's clock enters `phase`, or none; what passed until `now` is dealt first."""
        with self._lock:
            firm = [one for one, name in self._at_work.items() if name not in _YIELDS]
            sharers = firm or list(self._at_work)
            passed = max(0.0, now - self._dealt_until)
            for one in sharers:
                one.dealt_s[self._at_work[one]] += passed / len(sharers)
            self._dealt_until += passed
            self._at_work.pop(clock, None)
            if phase is not None and phase not in _WAITS:
                self._at_work[clock] = phase


class PhaseClock:
    """Adds wall time to one phase at a time, from `since` on. `synchronize` waits for the device,
    so that a phase is charged for its own work.

    `overlapped_s`: by phase, work of this job that ran during another phase, outside the sum;
    `dealt_s`: its part of the time in which it and others worked.
    """

    def __init__(
        self, since: float, synchronize: Callable[[], None], shares: Shares | None = None
    ) -> None:
        """`since` is a `time.perf_counter()` reading: what passed until now is the queue phase.
        `shares`: one for all jobs that are at work in turn or together; by default the job's own.
        """
        self._start = since
        self._synchronize = synchronize
        self._shares = shares or Shares()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["queue"] = time.perf_counter() - since
        self.overlapped_s: dict[str, float] = defaultdict(float)
        self.dealt_s: dict[str, float] = defaultdict(float)
        self._phase: str | None = None
        self._entered = 0.0

    def enter(self, phase: str) -> None:
        """Close the phase that runs and open `phase`; one may be entered several times."""
        assert phase in self._seconds, f"{phase} is not a phase"
        if phase != self._phase:
            self._move(phase)

    def timings_s(self) -> dict[str, float]:
        """Seconds of every phase, what no phase claims, and the total that they add up to."""
        self._move(None)
        total = time.perf_counter() - self._start
        unattributed = total - sum(self._seconds.values())
        return {**self._seconds, "unattributed": unattributed, "total": total}

    def share_s(self) -> dict[str, float]:
        """The job's part of the seconds in which jobs worked together, by phase, and its sum."""
        self._move(None)
        return {**self.dealt_s, "total": sum(self.dealt_s.values())}

    def _move(self, phase: str | None) -> None:
        if self._phase is not None:
            self._synchronize()
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._entered
        self._shares.move(self, phase, now)
        self._phase, self._entered = phase, now


@contextmanager
def compiling_apart(clock: PhaseClock, phase: str, *, is_on: bool) -> Iterator[None]:
    """Charge what is compiled inside to a phase of its own, everything else to `phase`, which runs.
    Whatever is compiled later, for another shape, counts there too.
    """
    if not is_on:
        yield
        return
    # Imported here: it takes a second, and only those who compile need it.
    from torch._dynamo.callback import callback_handler

    def begun(_: object) -> None:
        clock.enter("compile")

    def ended(_: object) -> None:
        clock.enter(phase)

    callback_handler.register_start_callback(begun)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begun)
        callback_handler.remove_end_callback(ended)
