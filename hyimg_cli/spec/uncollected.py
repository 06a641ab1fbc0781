"""Garbage collection put off while many objects are made: a million jobs are looked through again
and again, and none of them is garbage.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Cycles are not looked for inside; for functions too, as a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
