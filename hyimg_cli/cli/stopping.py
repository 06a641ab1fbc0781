"""SIGINT and SIGTERM: the first stops after the current denoise step, or the edit that is being
finished again; the second at once.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hyimg_cli.errors import Interrupted


@contextmanager
def stoppable(request_stop: Callable[[int], bool]) -> Iterator[None]:
    """Hand the first signal to `request_stop`; where that has nothing to stop in order, Interrupted
    leaves the block. The former handlers come back at the end.
    """
    asked: list[int] = []

    def handle(signal_number: int, _frame: FrameType | None) -> None:
        if asked:
            os._exit(128 + signal_number)
        asked.append(signal_number)
        if not request_stop(signal_number):
            # NOTE: readers of pictures catch every Exception, so it is none until it is out here.
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(asked[0] if asked else signal.SIGINT) from None
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
