"""Time in which a process does nothing, as in a sleep or a timeout of any thread."""

import threading
import time
from typing import Self

_INTERVAL_S = 0.005
# An interval in which the process was on a core for less than this share of it is idle.
_BUSY_SHARE = 0.1


class IdleWatch:
    """Sum of the intervals of a few milliseconds in which no thread of this process had work.

    Waiting for another thread's work is none of it, nor is waiting for a GPU: the driver polls. On
    a machine that is busy with other programs, waiting for a core looks the same as sleeping.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        wall, busy = time.perf_counter(), time.process_time()
        while not self._is_over.wait(_INTERVAL_S):
            wall_now, busy_now = time.perf_counter(), time.process_time()
            if busy_now - busy < _BUSY_SHARE * (wall_now - wall):
                self.idle_s += wall_now - wall
            wall, busy = wall_now, busy_now
