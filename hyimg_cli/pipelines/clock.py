"""Where a job's seconds go: disjoint wall segments, one per phase."""

import time
from collections.abc import Callable

from hyimg_cli.spec.events import PHASES


class PhaseClock:
    """Adds wall time to one phase at a time, from `since` on. `synchronize` waits for the device,
    so that a phase is charged for its own work."""

    def __init__(self, since: float, synchronize: Callable[[], None]) -> None:
        """`since` is a `time.perf_counter()` reading: what passed until now is the queue phase."""
        self._start = since
        self._synchronize = synchronize
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["queue"] = time.perf_counter() - since
        self.overlapped_s: dict[str, float] = {}
        self._phase: str | None = None
        self._entered = 0.0

    def enter(self, phase: str) -> None:
        """Close the phase that runs and open `phase`; one may be entered several times."""
        self.leave()
        assert phase in self._seconds, f"{phase} is not a phase"
        self._phase, self._entered = phase, time.perf_counter()

    def leave(self) -> None:
        """Close the phase that runs."""
        if self._phase is not None:
            self._synchronize()
            self._seconds[self._phase] += time.perf_counter() - self._entered
            self._phase = None

    def overlapped(self, phase: str, seconds: float) -> None:
        """Note work of this job that ran beside another phase: outside the sum."""
        self.overlapped_s[phase] = self.overlapped_s.get(phase, 0.0) + seconds

    def timings_s(self) -> dict[str, float]:
        """Seconds of every phase, what no phase claims, and the total that they add up to."""
        self.leave()
        total = time.perf_counter() - self._start
        unattributed = total - sum(self._seconds.values())
        return {**self._seconds, "unattributed": unattributed, "total": total}
