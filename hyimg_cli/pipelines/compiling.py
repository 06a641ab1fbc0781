"""Seconds of `torch.compile`, told apart from the phase that waits for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from hyimg_cli.pipelines.clock import PhaseClock

COMPILE = "compile"


@contextmanager
def compiling_apart(clock: PhaseClock, phase: str, *, is_on: bool) -> Iterator[None]:
    """Charge what is compiled inside to a phase of its own, everything else to `phase`, which runs.
    Whatever is compiled later, for another shape, counts there too.
    """
    if not is_on:
        yield
        return
    # Imported here: it takes a second, and only those who compile need it.
    from torch._dynamo.callback import callback_handler

    def begun(_: object) -> None:
        clock.enter(COMPILE)

    def ended(_: object) -> None:
        clock.enter(phase)

    callback_handler.register_start_callback(begun)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begun)
        callback_handler.remove_end_callback(ended)
