"""SIGINT and SIGTERM: the first stops after the current denoise step, or the edit that is being
finished again; the second at once.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from hyimg_cli.errors import Interrupted
from hyimg_cli.spec.events import Outcome


class Stoppable(Protocol):
    """A session's stop: a request that `run` answers by raising Interrupted."""

    def request_stop(self, signal_number: int) -> None: ...


class Stopper:
    """Passes the first signal on, or raises Interrupted where no session runs yet."""

    def __init__(self) -> None:
        self.session: Stoppable | None = None
        self._asked = 0
        self._waits = False

    def __call__(self, signal_number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os._exit(128 + signal_number)
        self._asked = signal_number
        if self.session is not None:
            self.session.request_stop(signal_number)
        elif not self._waits:
            raise Interrupted(signal_number)

    def between(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Each of these; a signal waits for the one that is being made. Readers of pictures, which
        catch every Exception, would take it for a damaged file.
        """
        self._waits = True
        try:
            for outcome in outcomes:
                yield outcome
                if self._asked:
                    break
        finally:
            self._waits = False
        if self._asked:
            raise Interrupted(self._asked)


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
