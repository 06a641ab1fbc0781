"""Wait for a model's devices, and measure their memory and the link to them."""

import resource
import sys
from collections.abc import Iterable
from timeit import repeat

import torch

# The size and number of the copies that measure a link.
_TRIAL_BYTES, _TRIALS = 1 << 28, 3


def gpus_among(devices: Iterable[torch.device]) -> set[torch.device]:
    """Return the GPUs of a model, each once."""
    return {device for device in devices if device.type == "cuda"}


def starts_slowly(device: torch.device) -> bool:
    """Return True if a shape's first forward takes much longer on this device than later ones."""
    return device.type != "cpu"


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for a model's GPUs, so a phase's clock stops when its work is done."""
    for gpu in gpus_among(devices):
        # Only this thread's work: other threads have streams of their own.
        torch.cuda.current_stream(gpu).synchronize()


def peak_memory_mb(devices: Iterable[torch.device]) -> float:
    """Return the largest allocation on a model's GPUs together, or the process's size, in MB."""
    if gpus := gpus_among(devices):
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 1e6
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def measure_link(gpu: torch.device) -> float:
    """Return the bytes per second to a GPU, measured by a few copies of locked memory."""
    host = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=gpu)
    # A blocking copy: it returns when all bytes have arrived.
    return _TRIAL_BYTES / min(repeat(lambda: there.copy_(host), number=1, repeat=_TRIALS))
