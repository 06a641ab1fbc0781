"""Capture one computation on one GPU as a CUDA graph.

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

    Replays run on the caller's stream, one after another: they share memory. A failed capture
    raises its error and leaves the caller's stream as it was; its memory stays with the pool.

    Other threads may use the GPU during a capture, but a wait in one of them raises during the
    second run, because that check is process-wide. Such threads must be ready to try again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = _own_stream(device)

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        with torch.cuda.device(self._device), torch.no_grad():
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # Set outside torch's own context, which does not return after a broken capture.
            with torch.cuda.stream(self._stream):
                compute()
                with waits_are_errors():
                    compute()
                graph = torch.cuda.CUDAGraph()
                # Calls that are forbidden in a capture are forbidden in this thread only.
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
        """End a broken capture for the allocator and the random numbers of the device.

        Up to torch 2.11 the allocator never ends one: it frees no memory and fails when asked to
        (pytorch/pytorch#180395). torch then refuses to draw random numbers, which nothing here
        does.
        """
        device = torch.cuda.current_device()
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            # Raised although nothing is wrong: nothing is being allocated to the pool.
            with suppress(RuntimeError):
                end(device, self._pool)
        generator = torch.cuda.default_generators[device]
        # A copy of the state is not part of any capture.
        generator.graphsafe_set_state(generator.clone_state())


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device; libraries keep a workspace per stream.

    torch hands out a few streams per priority in turn, and would capture another thread's work on
    this one. Nothing else uses this priority.
    """
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise RuntimeError inside the block if the host waits for the device.

    Such as reading a value, or copying from memory that is not pinned.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns once that it does not detect every such call.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
