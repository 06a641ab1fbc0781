"""What only a GPU can show: no synchronisation inside the two loops, and the CPU's picture."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import studio_of

from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.group import Drawn, GroupRun
from hyimg_cli.engine.think import TextLoop
from hyimg_cli.models import registry
from hyimg_cli.spec.events import DenoiseStep
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.run import ModelChoice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    return registry.load(ModelChoice(device="cuda:0", dtype="float32"))


def _drawn(job: ImageJob, model: Any, *, forbids_sync: bool = False) -> Drawn:
    run = GroupRun(
        [job], studio_of(model), batch_size=1, new_clock=lambda: PhaseClock(0.0, lambda: None)
    )
    last: Any = None
    try:
        for last in run.run():
            is_looping = isinstance(last, DenoiseStep) and last.step < last.total
            torch.cuda.set_sync_debug_mode("error" if forbids_sync and is_looping else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(last, Drawn)
    return last


def test_the_denoise_loop_never_waits_for_the_device(on_gpu: Any, job: ImageJob) -> None:
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=4)
    _drawn(job, on_gpu)
    _drawn(job, on_gpu, forbids_sync=True)


def test_the_think_loop_waits_for_nothing_but_its_own_copy(
    on_gpu: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several texts with draws of their own; waiting on the copy's event is no synchronisation."""
    jobs = [
        replace(job, custom_id=f"{n}", num_inference_steps=1, text=replace(job.text, seed=n))
        for n in range(3)
    ]
    step, steps = TextLoop.step, []

    def watched(self: TextLoop, writers: Any) -> Any:
        steps.append(len(writers))
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
        try:
            return step(self, writers)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TextLoop, "step", watched)
    run = GroupRun(
        jobs, studio_of(on_gpu), batch_size=3, new_clock=lambda: PhaseClock(0.0, lambda: None)
    )
    ends = [event for event in run.run() if isinstance(event, Drawn)]
    assert len(ends) == 3
    assert len(steps) > 5


def test_the_same_text_whether_read_at_once_or_late(on_gpu: Any, job: ImageJob) -> None:
    written = []
    for lag in (0, 1):
        run = GroupRun(
            [replace(job, num_inference_steps=1)],
            studio_of(on_gpu),
            batch_size=1,
            new_clock=lambda: PhaseClock(0.0, lambda: None),
            read_lag=lag,
        )
        (end,) = [event for event in run.run() if isinstance(event, Drawn)]
        written.append(end.picture.written)
    assert written[0] == written[1]


def test_the_same_picture_as_on_the_cpu(on_gpu: Any, family: Any, job: ImageJob) -> None:
    """float32 on both: rounding alone, a few levels at most."""
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=8)
    pictures = [_drawn(job, model).picture.pixels.astype(int) for model in (on_gpu, family)]
    assert np.abs(pictures[0] - pictures[1]).max() <= 8
