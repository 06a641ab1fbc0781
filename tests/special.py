"""Names of pipes, sockets and devices, and a watchdog over tests that open them."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What is made under a name, and what a message calls it. The link to /dev/null is as good a device
# as one to /dev/zero, and does no harm where it is read after all.
MAKE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path: path.symlink_to("/dev/null"),
}
NAMES = {"pipe": "a named pipe", "socket": "a socket", "device": "a device"}


def put(path: Path, kind: str) -> Path:
    """Makes it, in place of what stood there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    MAKE[kind](path)
    return path


class Hung(BaseException):
    """No Exception: whatever catches those must not catch this."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Ends what waits for longer. Opening a pipe can be ended so, and reading one."""

    def bite(*_: object) -> None:
        raise Hung(f"not done in {seconds:g} s")

    former = signal.signal(signal.SIGALRM, bite)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
