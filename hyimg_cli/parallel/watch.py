"""Detect stopped and hanging processes: two watches, without torch.

A process reports every few seconds that it is alive: silence means it is stopped. It also reports
its current step and for how long: a step far longer than any before means a kernel hangs.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

BEAT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of silence (`silence_s`; `start_s` until it is up) and of one step, in seconds.

    A step may take `times` the longest of its kind, at least `step_s`; `first_s` for the first.
    """

    silence_s: float = 60.0
    start_s: float = 60.0
    times: float = 20.0
    step_s: float = 600.0
    first_s: float = 3600.0


LIMITS = Limits()


class AwakeClock:
    """Seconds in which this process ran, without stops and sleep.

    Read it at least every `most_s`.
    """

    def __init__(self, most_s: float = 2.0, now: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._now = most_s, now
        self._seen, self._awake_s, self._turn = now(), 0.0, threading.Lock()

    def __call__(self) -> float:
        with self._turn:
            before, self._seen = self._seen, self._now()
            self._awake_s += min(self._seen - before, self._most_s)
            return self._awake_s


@dataclass(frozen=True)
class Beat:
    """A heartbeat: the current step's `kind` (empty: untimed), its duration, the longest one."""

    kind: str = ""
    for_s: float = 0.0
    longest_s: float | None = None


@dataclass
class Steps:
    """The current step of a process, recorded by itself; a step ends where the next begins."""

    clock: Callable[[], float] = field(default_factory=AwakeClock)
    _kind: str = ""
    _since: float = 0.0
    _longest_s: dict[str, float] = field(default_factory=dict)

    def begin(self, kind: str = "") -> None:
        """Begin a step of this kind; without a kind, what follows has no time limit."""
        now = self.clock()
        if self._kind:
            done_s = now - self._since
            self._longest_s[self._kind] = max(done_s, self._longest_s.get(self._kind, 0.0))
        self._kind, self._since = kind, now

    def beat(self) -> Beat:
        kind = self._kind
        return Beat(kind, self.clock() - self._since, self._longest_s.get(kind))


class StepWatch:
    """The longest steps of all processes that do the same work."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._longest_s: dict[str, float] = {}

    def overdue(self, beat: Beat) -> str:
        """Return the step in which a process reports to hang; empty if it does not."""
        if not beat.kind:
            return ""
        seen = [beat.longest_s, self._longest_s.get(beat.kind)]
        longest_s = max((one for one in seen if one is not None), default=None)
        if longest_s is None:
            most_s = self._limits.first_s
        else:
            self._longest_s[beat.kind] = longest_s
            most_s = max(self._limits.step_s, self._limits.times * longest_s)
        if beat.for_s <= most_s:
            return ""
        return f"no progress for {beat.for_s:.0f} s ({beat.kind}); it hangs"
