"""Medians with their spread: CUDA events on a GPU, the clock on a CPU; warm-up separate."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
_SHOWN = 12


@dataclass(frozen=True)
class Pace:
    """How often a call is run: `warmups` before it counts, then `least` to `most` times."""

    warmups: int = 2
    least: int = 3
    most: int = 20


EVERY = Pace()


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one call. `first_ms`: the very first call, including compilation.

    `peak_bytes`: the maximum that was allocated during the runs; `base_bytes`: before them. None
    without a GPU.
    """

    median: float
    least: float
    most: float
    runs: int
    warmups: int
    first_ms: float
    base_bytes: int | None = None
    peak_bytes: int | None = None


class Deadline:
    """The time that a run may still take."""

    def __init__(self, seconds: float) -> None:
        self._started, self._seconds = time.perf_counter(), seconds

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self._started

    @property
    def left_s(self) -> float:
        return self._seconds - self.spent_s

    def share(self, parts: int) -> "Deadline":
        """Return an equal share of the remaining time, for the first of this many parts."""
        return Deadline(self.left_s / parts)


def timed(call: Call, device: torch.device, *, seconds: float, pace: Pace) -> Timed:
    """Run as often as `seconds` and `pace` allow."""
    is_gpu = device.type == "cuda"
    warm = [_by_clock(call, device) for _ in range(pace.warmups)]
    base = torch.cuda.memory_allocated(device) if is_gpu else None
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    took: list[float] = []
    started = time.perf_counter()
    while len(took) < pace.most and (
        len(took) < pace.least or time.perf_counter() - started < seconds
    ):
        took.append(_once(call, device))
    peak = torch.cuda.max_memory_allocated(device) if is_gpu else None
    first = (warm or took)[0]
    median = statistics.median(took)
    return Timed(median, min(took), max(took), len(took), pace.warmups, first, base, peak)


def taken(seconds: float) -> Timed:
    """Return a result that was timed once, by its caller."""
    took = 1e3 * seconds
    return Timed(took, took, took, runs=1, warmups=0, first_ms=took)


def finish(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def let_go() -> None:
    """Free the memory of unreferenced tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def profiled(call: Call, device: torch.device) -> list[tuple[str, float, int]]:
    """Return the slowest kernels of one call: name, total milliseconds, count.

    On a CPU, operations.
    """
    is_gpu = device.type == "cuda"
    seen = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    # Older versions of torch warn without this setting.
    with profile(activities=[seen], acc_events=True) as found:
        call()
        finish(device)
    own = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    # Launching a kernel is a CPU event.
    kind = DeviceType.CUDA if is_gpu else DeviceType.CPU
    events = [event for event in found.key_averages() if event.device_type == kind]
    events.sort(key=lambda event: -getattr(event, own))
    return [(e.key[:120], getattr(e, own) / 1e3, e.count) for e in events[:_SHOWN]]


def _by_clock(call: Call, device: torch.device) -> float:
    started = time.perf_counter()
    call()
    finish(device)
    return (time.perf_counter() - started) * 1e3


def _once(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        return _by_clock(call, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
