"""Pause garbage collection while many lasting objects are made: a million jobs, or a model's
libraries, whose import it makes a fifth longer.
"""

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# Of blocks in all threads: whether each found the collection on. Behind the last one it is as the
# first found it.
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
    """Exempt every object alive now from later collections, once in a process for each `which`: the
    libraries' own make each of them half a second longer. What is frozen is never collected, so
    call it before a model is made.
    """
    gc.freeze()


# What is never collected, libraries in C++ report as leaked when the process ends.
atexit.register(gc.unfreeze)
