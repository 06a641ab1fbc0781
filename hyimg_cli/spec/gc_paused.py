"""Pause garbage collection while many lasting objects are made.

For example a million jobs, or a model's libraries, whose import would take a fifth longer.
"""

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# Blocks in all threads, each with whether it found the collection enabled. After the last block,
# the collection is as the first block found it.
_turn, _found_on = threading.Lock(), list[bool]()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable cyclic garbage collection in a block or a decorated function, in all threads."""
    with _turn:
        _found_on.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _turn:
            was_on = _found_on.pop()
            if was_on and not _found_on:
                gc.enable()


@cache
def freeze_libraries(which: str = "torch") -> None:
    """Exempt all live objects from later collections, once per process for each `which`.

    The libraries' own objects make each collection half a second longer. Frozen objects are never
    collected, so call it before a model is made.
    """
    gc.freeze()


# Libraries in C++ report objects that are never collected as leaked when the process ends.
atexit.register(gc.unfreeze)
