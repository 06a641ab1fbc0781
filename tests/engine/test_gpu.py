"""What only a GPU can show: no synchronisation inside the denoise loop, and the CPU's picture."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import studio_of

from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.group import Drawn, GroupRun
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


def test_the_same_picture_as_on_the_cpu(on_gpu: Any, family: Any, job: ImageJob) -> None:
    """float32 on both: rounding alone, a few levels at most."""
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=8)
    pictures = [_drawn(job, model).picture.pixels.astype(int) for model in (on_gpu, family)]
    assert np.abs(pictures[0] - pictures[1]).max() <= 8
