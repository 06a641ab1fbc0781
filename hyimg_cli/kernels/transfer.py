"""Move values between host and device without waiting.

On a CPU both ends are one memory: the same calls are plain copies.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def to_device(values: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as a tensor on `device`: int64, or float32 for floats."""
    return sent(torch.tensor(values), device)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of main memory on `device`."""
    if device.type != "cuda":
        return host.to(device)
    # From pageable memory, the host would wait for the device's queue.
    return host.pin_memory().to(device, non_blocking=True)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current, where Triton's kernels start; does nothing if it is the only one."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return nullcontext()
    return torch.cuda.device(device)


def lock(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """Lock tensors' main memory, so that copies overlap with work; return the pointers.

    Stops at the first that the system refuses, with a warning.
    """
    runtime, locked = torch.cuda.cudart(), list[int]()
    for tensor in tensors:
        if tensor.is_pinned():
            continue
        if int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            with suppress(RuntimeError):  # otherwise the next kernel would raise this call's error
                torch.zeros(1, device=device)
            logger.warning(
                "the memory of the weights cannot be locked (see ulimit -l): copies to the GPU are "
                "slower"
            )
            break
        locked.append(tensor.data_ptr())
    return locked


def unlock(link: torch.cuda.Stream, locked: Sequence[int]) -> None:
    """Wait for pending copies, then unlock their sources."""
    link.synchronize()
    for pointer in locked:
        torch.cuda.cudart().cudaHostUnregister(pointer)


class Readback:
    """A tensor on its way to the host, copied now and read later.

    The copy is ordered after the work that fills `source`; nothing waits until `values`.
    """

    def __init__(self, source: Tensor) -> None:
        is_cuda = source.device.type == "cuda"
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_cuda)
        self._host.copy_(source, non_blocking=True)
        self._is_there = torch.cuda.Event() if is_cuda else None
        if self._is_there is not None:
            self._is_there.record(torch.cuda.current_stream(source.device))

    def values(self) -> list[Any]:
        """Return the numbers; waits for the copy alone, not for work queued after it."""
        if self._is_there is not None:
            self._is_there.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return a network's parameters and buffers."""
    return [*chain(network.parameters(), network.buffers())]
