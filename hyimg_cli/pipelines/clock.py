"""Timing of a job: separate wall time per phase, and the job's share of each phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from hyimg_cli.spec.events import PHASES

# Phases that take no share: always for a waiting job, and for a job that writes text while another
# job is in any other phase.
_WAITS = ("queue",)
_YIELDS = ("think",)


class Shares:
    """Divides wall time equally among the jobs that are at work at that moment.

    The shares of one object never add up to more than the time that passed. A job that writes text
    waits while another job is prefilled or drawn, so that other job gets all of that time.
    """

    def __init__(self) -> None:
        self._at_work: dict[PhaseClock, str] = {}
        self._dealt_until = 0.0
        # A server's jobs are recorded in separate threads.
        self._lock = Lock()

    def move(self, clock: "PhaseClock", phase: str | None, now: float) -> None:
        """Move a job's clock to `phase`, or to none, after dividing the time up to `now`."""
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
    """Adds wall time to one phase at a time, starting at `since`.

    `synchronize` waits for the device, so that each phase is charged for its own work.
    `overlapped_s`: by phase, work of this job that ran during another phase, not part of the sum.
    `dealt_s`: the job's share of the time in which jobs were at work.
    """

    def __init__(
        self, since: float, synchronize: Callable[[], None], shares: Shares | None = None
    ) -> None:
        """`since`: a `time.perf_counter()` reading; time before now counts as the queue phase.

        `shares`: one object for all jobs that work in turn or together; the job's own by default.
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
        """End the current phase and begin `phase`; a phase may be entered several times."""
        assert phase in self._seconds, f"{phase} is not a phase"
        if phase != self._phase:
            self._move(phase)

    @contextmanager
    def apart(self, phase: str) -> Iterator[None]:
        """Charge what is inside to `phase`, then continue the current one."""
        current = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self._move(current)

    def add(self, other: "PhaseClock") -> None:
        """Count the work of another clock, of the same job, in the time that this one waited."""
        current = self._phase
        other._move(None)
        self._move(current)
        work = {name: s for name, s in other._seconds.items() if name not in _WAITS}
        waited, worked = sum(self._seconds[name] for name in _WAITS), sum(work.values())
        # What they did at the same time is in this clock already.
        part = min(1.0, waited / worked) if worked else 0.0
        for name, seconds in work.items():
            self._seconds[name] += part * seconds
        for name in _WAITS:
            self._seconds[name] *= 1 - part * worked / waited if waited else 1.0
        for own, others in ((self.dealt_s, other.dealt_s), (self.overlapped_s, other.overlapped_s)):
            for name, seconds in others.items():
                own[name] += seconds

    def timings_s(self) -> dict[str, float]:
        """Return seconds by phase, the unattributed seconds, and the total of them all."""
        self._move(None)
        total = time.perf_counter() - self._start
        unattributed = total - sum(self._seconds.values())
        return {**self._seconds, "unattributed": unattributed, "total": total}

    def share_s(self) -> dict[str, float]:
        """Return the job's share of the working seconds, by phase, and the sum."""
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
    """Charge compilation inside the context to its own phase, other work to `phase`.

    Later compilation, for another shape, counts as compilation too.
    """
    if not is_on:
        yield
        return
    # Imported here: it takes a second, and is needed only for compilation.
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
