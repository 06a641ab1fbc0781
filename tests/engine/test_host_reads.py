"""What the two loops read back from the device: nothing, and one copy of new ids a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from event_kinds import is_step
from torch.utils._python_dispatch import TorchDispatchMode

from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.image.think import DecodeLoop
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.spec.job import ImageJob, SizeRequest

HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


class Watch(TorchDispatchMode):
    """Notes, while `is_on`, every call that brings a tensor's value to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.is_on = False
        self.read: list[str] = []
        self.copies = 0
        for name in HOST_READS:
            monkeypatch.setattr(torch.Tensor, name, self._spied(name))

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_on and op is torch.ops.aten._local_scalar_dense.default:
            self.read.append("_local_scalar_dense")
        # `copy_(source, non_blocking=True)`: the one way to the host that does not wait.
        if self.is_on and op is torch.ops.aten.copy_.default and args[2:] == (True,):
            self.copies += 1
        return op(*args, **(kwargs or {}))

    def _spied(self, name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def spy(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if self.is_on:
                self.read.append(name)
            return original(tensor, *arguments, **options)

        return spy

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.is_on = True
        yield
        self.is_on = False


def _jobs(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    square = SizeRequest(64, 64)
    return [
        replace(job, custom_id=f"{n}", images=images, bot_task="none", size=square, seed=n)
        for n, images in enumerate([(), sources[:1], sources[:1], sources[1:], ()])
    ]


def _group(jobs: list[ImageJob], family: Any, read_lag: int) -> ContinuousBatch:
    return ContinuousBatch(
        WholeBatches(
            map(Ticket, jobs), studio_of(family), lambda since: PhaseClock(since, lambda: None)
        ),
        Together(4, 4),
        read_lag=read_lag,
    )


def test_the_denoise_loop_reads_nothing_back(
    family: Any, job: ImageJob, sources: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first step and the last no value of a tensor reaches the host, by any call."""
    watch, steps = Watch(monkeypatch), 0
    jobs = [replace(one, num_inference_steps=5) for one in _jobs(job, sources)]
    with watch:
        for event in _group(jobs, family, 0).run():
            if is_step(event):
                steps += 1
                watch.is_on = event.done < event.total
    assert steps == 25
    assert watch.read == []


@pytest.mark.parametrize("lag", [0, 1])
def test_the_think_loop_reads_one_copy_of_all_new_ids_a_step(
    family: Any,
    job: ImageJob,
    sources: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    lag: int,
) -> None:
    """Feeding, choosing, joining and leaving included; read behind the launch of the next step."""
    jobs = [
        replace(one, bot_task="recaption", size=SizeRequest(), ar_seed=n)
        for n, one in enumerate(_jobs(job, sources))
    ]
    watch, order = Watch(monkeypatch), []
    step, launch, read = DecodeLoop.step, DecodeLoop._launch, torch.Tensor.tolist

    def watched(self: DecodeLoop, writers: Any) -> Any:
        with watch.watching():
            return step(self, writers)

    def launched(self: DecodeLoop, writers: Any) -> None:
        order.append("launch")
        launch(self, writers)

    def told(tensor: torch.Tensor) -> Any:
        order.extend(["read"] * watch.is_on)
        return read(tensor)

    monkeypatch.setattr(DecodeLoop, "step", watched)
    monkeypatch.setattr(DecodeLoop, "_launch", launched)
    monkeypatch.setattr(torch.Tensor, "tolist", told)
    with watch:
        ends = [e for e in _group(jobs, family, lag).run() if isinstance(e, ImageRequest)]
    assert len(ends) == 5
    launches = order.count("launch")
    assert launches > 10
    assert watch.copies == order.count("read") == launches
    assert watch.read == ["tolist"] * launches
    expected = ["launch", "read"] if lag == 0 else ["launch", "launch", "read"]
    assert order[: len(expected)] == expected
