"""Calls of a capture to the GPU, their order, and the clean-up after one that fails.

torch's own parts are stand-ins that note their calls: no graph is captured without a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hyimg_cli.kernels import captures
from hyimg_cli.kernels.captures import GpuCapture

POOL = (0, 7)


class Gpu:
    """The calls of a capture. `ends_badly`: torch's context raises where it ends."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ends_badly = False
        self.is_allocating = self.is_drawing = False
        self.current = "main"
        self.sync = 0

    def stream(self, _device: Any, priority: int) -> Any:
        self.calls.append(f"stream of priority {priority}")
        return SimpleNamespace(name="own", wait_stream=lambda other: self.calls.append("after"))

    def main(self) -> Any:
        return SimpleNamespace(name=self.current, wait_stream=lambda _: self.calls.append("back"))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert (pool, stream.name, capture_error_mode) == (POOL, "own", "thread_local")
        self.calls.append("capture")
        self.is_allocating = self.is_drawing = True
        try:
            yield
        finally:
            if self.ends_badly:
                # As torch 2.11: its stream, its allocator and its random numbers do not come back.
                self.current = "lost"
                raise RuntimeError("operation not permitted when stream is capturing")
            self.is_allocating = self.is_drawing = False
            self.calls.append("captured")

    def end(self, device: int, pool: Any) -> None:
        assert (device, pool) == (0, POOL)
        if not self.is_allocating:
            raise RuntimeError("not currently recording to the pool")
        self.is_allocating = False
        self.calls.append("end allocating")

    def draw_anew(self, state: str) -> None:
        assert state == "a copy"
        self.is_drawing = False

    def set_sync(self, mode: Any) -> None:
        self.sync = mode
        self.calls.append(f"waits {mode}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    captures._own_stream.cache_clear()
    for name, stand_in in {
        "graph_pool_handle": lambda: POOL,
        "Stream": found.stream,
        "current_stream": found.main,
        "current_device": lambda: 0,
        "stream": found.on,
        "device": lambda _: found.on(SimpleNamespace(name=found.current)),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: found.calls.append("replay")),
        "graph": found.graph,
        "default_generators": (
            SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=found.draw_anew),
        ),
        "get_sync_debug_mode": lambda: found.sync,
        "set_sync_debug_mode": found.set_sync,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    yield found
    captures._own_stream.cache_clear()


def computing(gpu: Gpu, fails: str = "", sync: Any = 0) -> Any:
    """A computation that notes where it runs; `fails`: at which of its calls."""

    def compute() -> Tensor:
        assert gpu.current == "own"
        gpu.calls.append("compute")
        name = ("warm", "tried", "captured")[gpu.calls.count("compute") - 1]
        assert gpu.sync == ("error" if name == "tried" else 0)
        if name == fails:
            raise torch.OutOfMemoryError("no room")
        return torch.ones(2)

    return compute


def test_what_is_captured_has_run_before(gpu: Gpu) -> None:
    replay = GpuCapture(torch.device("cuda:0"))(computing(gpu))
    first = replay()
    assert replay() is first
    assert gpu.calls == [
        *("stream of priority -1", "after", "compute"),
        *("waits error", "compute", "waits 0"),
        *("capture", "compute", "captured", "back", "replay", "replay"),
    ]
    assert gpu.current == "main"


@pytest.mark.parametrize("fails", ["warm", "tried", "captured"])
def test_an_error_leaves_streams_and_modes_as_they_were(gpu: Gpu, fails: str) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        GpuCapture(torch.device("cuda:0"))(computing(gpu, fails))
    assert (gpu.current, gpu.sync, gpu.is_allocating) == ("main", 0, False)
    assert ("capture" in gpu.calls) == (fails == "captured")


def test_a_capture_that_cannot_even_end_is_over_for_torch(gpu: Gpu) -> None:
    gpu.ends_badly = True
    with pytest.raises(RuntimeError, match="not permitted"):
        GpuCapture(torch.device("cuda:0"))(computing(gpu))
    assert (gpu.current, gpu.sync, gpu.is_allocating) == ("main", 0, False)
    assert not gpu.is_drawing
    assert gpu.calls[-1] == "end allocating"
