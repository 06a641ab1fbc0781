"""Garbage collection put off while many objects are made that are no garbage: a million jobs, or
the libraries of a model, whose import it makes a fifth longer.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable cyclic garbage collection in a block or a decorated function."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def freeze_libraries() -> None:
    """Have no later collection look through what is there now, once in a process: the libraries'
    own objects, which take it a third of a second each time.
    """
    gc.freeze()
    # What is never collected, libraries in C++ report as leaked when the process ends.
    atexit.register(gc.unfreeze)
