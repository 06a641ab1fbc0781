"""One computation on one GPU, captured as a CUDA graph: what a capture needs, and what it leaves.

    warm       run once on the capture's own stream: kernels are compiled and loaded, workspaces
               and constants made, none of them inside a graph
    tried      run again where a wait for the device is an error: a capture would break on it
    captured   run a third time, launching nothing; memory comes from a pool that all graphs share

The rules are those of torch 2.11 (`torch.cuda.graph`, "CUDA semantics: CUDA Graphs").
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]


class GpuCapture:
    """Turns a computation on a GPU into its replay, which returns the same tensor each time.

    Replays run on the caller's stream, one after another: they share memory. One that fails to be
    captured raises whatever was wrong and leaves the caller's stream as it was; the memory that it
    took stays with the pool.

    Other threads may go on using the GPU during a capture, but beside the second run a wait of
    theirs raises as well: what makes it an error is the process's. So whoever waits beside must be
    ready to try again, as the encoding of source images ahead is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = _own_stream(device)

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        with torch.cuda.device(self._device), torch.no_grad():
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # Around torch's own context, which does not come back from a capture that was broken.
            with torch.cuda.stream(self._stream):
                compute()
                with waits_are_errors():
                    compute()
                graph = torch.cuda.CUDAGraph()
                # A call that is forbidden in a capture is so in this thread alone.
                inside = torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                )
                try:
                    with inside:
                        out = compute()
                except BaseException:
                    self._end()
                    raise
            before.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _end(self) -> None:
        """Up to torch 2.11 a broken capture is never over for the allocator: it frees no memory any
        more, and fails when it is asked to (pytorch/pytorch#180395). Nor is it for random numbers
        on the device, which nothing here draws: torch refuses to draw any.
        """
        device = torch.cuda.current_device()
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            # Raised where all is well: nothing is being allocated to the pool.
            with suppress(RuntimeError):
                end(device, self._pool)
        generator = torch.cuda.default_generators[device]
        # A copy of its state is part of no capture.
        generator.graphsafe_set_state(generator.clone_state())


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: libraries keep a workspace for each stream for ever.

    torch hands out the same few streams of a priority in turn, and another thread's work on this
    very one would be captured. Nobody here asks for this priority.
    """
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Inside, what makes the host wait for the device raises RuntimeError: a value that is read,
    a copy from memory that is not pinned.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch says once that it does not know every such call.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
