"""Who has stopped, and who hangs: two watches for processes that work for this one; no torch.

A process tells every few seconds that it goes on: silence is a process that is stopped. It tells
too what it is at and for how long: far longer than ever before is a kernel that hangs.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

BEAT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a process may say nothing (`silence_s`; `start_s` until it is up),
    or be at one step: `times` the longest of its kind, at least `step_s`, `first_s` for the first
    of its kind.
    """

    silence_s: float = 60.0
    start_s: float = 60.0
    times: float = 20.0
    step_s: float = 600.0
    first_s: float = 3600.0


LIMITS = Limits()


class AwakeClock:
    """Seconds in which this process ran: while it is stopped, or its machine sleeps, the clock
    stands. It is to be read at least every `most_s`.
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
    """A process goes on. `kind` of step that it is at, empty where none is timed; for how long;
    and the longest one of that kind that it has done.
    """

    kind: str = ""
    for_s: float = 0.0
    longest_s: float | None = None


@dataclass
class Steps:
    """The step that a process is at, told by itself: one ends where the next begins."""

    clock: Callable[[], float] = field(default_factory=AwakeClock)
    _kind: str = ""
    _since: float = 0.0
    _longest_s: dict[str, float] = field(default_factory=dict)

    def begin(self, kind: str = "") -> None:
        """A step of this kind begins; of none, what follows may take as long as it likes."""
        now = self.clock()
        if self._kind:
            done_s = now - self._since
            self._longest_s[self._kind] = max(done_s, self._longest_s.get(self._kind, 0.0))
        self._kind, self._since = kind, now

    def beat(self) -> Beat:
        kind = self._kind
        return Beat(kind, self.clock() - self._since, self._longest_s.get(kind))


class StepWatch:
    """The longest steps of all processes that do such work."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._longest_s: dict[str, float] = {}

    def overdue(self, beat: Beat) -> str:
        """Say in what a process hangs by its own word; empty where it does not."""
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
