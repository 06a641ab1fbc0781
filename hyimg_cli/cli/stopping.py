"""SIGINT and SIGTERM: the first stops after the current denoise step, the second at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from hyimg_cli.errors import Interrupted


class Stoppable(Protocol):
    """A session's stop: a request that `run` answers by raising Interrupted."""

    def request_stop(self, signal_number: int) -> None: ...


class Stopper:
    """Passes the first signal on, or raises Interrupted where no session runs yet."""

    def __init__(self) -> None:
        self.session: Stoppable | None = None
        self._asked = False

    def __call__(self, signal_number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os._exit(128 + signal_number)
        self._asked = True
        if self.session is None:
            raise Interrupted(signal_number)
        self.session.request_stop(signal_number)


@contextmanager
def stoppable() -> Iterator[Stopper]:
    """Both signals go to the yielded stopper; the former handlers come back at the end."""
    stopper = Stopper()
    numbers = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.signal(number, stopper) for number in numbers}
    try:
        yield stopper
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
