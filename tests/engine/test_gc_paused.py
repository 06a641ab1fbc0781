"""Garbage collection stays paused until the last of several threads ends its pause."""

import gc
from contextlib import ExitStack

from hyimg_cli.spec.gc_paused import gc_paused


def test_it_comes_back_behind_the_last_block_in_any_order() -> None:
    assert gc.isenabled()
    first, second = ExitStack(), ExitStack()
    first.enter_context(gc_paused())
    second.enter_context(gc_paused())
    first.close()
    assert not gc.isenabled(), "another one is in"
    second.close()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
