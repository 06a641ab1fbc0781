"""Medians with their spread: CUDA events on a GPU, the clock on a CPU; warm-up apart."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
_WARMUPS, _LEAST_RUNS, _SHOWN = 2, 3, 12


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one call. `warmup_ms`: the first call's, kernels compiled and all.

    `peak_bytes`: the most that was allocated during the runs; `base_bytes`: before them. None
    without a GPU.
    """

    median: float
    least: float
    most: float
    runs: int
    warmups: int
    warmup_ms: float
    base_bytes: int | None
    peak_bytes: int | None


class Deadline:
    """How long a run may still go on."""

    def __init__(self, seconds: float) -> None:
        self._started, self._seconds = time.perf_counter(), seconds

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self._started

    @property
    def left_s(self) -> float:
        return self._seconds - self.spent_s


def timed(call: Call, device: torch.device, *, seconds: float, most_runs: int) -> Timed:
    """As many runs as `seconds` allow: three at least, `most_runs` at most."""
    is_gpu = device.type == "cuda"
    started = time.perf_counter()
    call()
    finish(device)
    warmup_ms = (time.perf_counter() - started) * 1e3
    for _ in range(_WARMUPS - 1):
        call()
    finish(device)
    base = torch.cuda.memory_allocated(device) if is_gpu else None
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    took: list[float] = []
    started = time.perf_counter()
    while len(took) < most_runs and (
        len(took) < _LEAST_RUNS or time.perf_counter() - started < seconds
    ):
        took.append(_once(call, device))
    peak = torch.cuda.max_memory_allocated(device) if is_gpu else None
    return Timed(
        statistics.median(took), min(took), max(took), len(took), _WARMUPS, warmup_ms, base, peak
    )


def finish(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profiled(call: Call, device: torch.device) -> list[tuple[str, float, int]]:
    """The kernels that take longest in one call: name, milliseconds in all, how often."""
    is_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    # Older versions of torch warn where they are not told.
    with profile(activities=kinds, acc_events=True) as found:
        call()
        finish(device)
    own = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, own))
    return [(e.key[:120], getattr(e, own) / 1e3, e.count) for e in events[:_SHOWN]]


def _once(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
