"""What only a GPU can show: no synchronisation inside the denoise loop, and the CPU's picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import studio_of
from engine.fake_video import video_job

from hyimg_cli.batch.journal import RunFolder
from hyimg_cli.batch.planner import make_plan
from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.group import Drawn, GroupRun
from hyimg_cli.engine.session import Session
from hyimg_cli.models import registry
from hyimg_cli.spec.events import DenoiseStep, JobDone, Outcome
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.run import CacheConfig, ModelChoice, OutputConfig, RunConfig

NO_CACHE = CacheConfig()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    return registry.load(ModelChoice(device="cuda:0", dtype="float32"))


def _filmed(out: Path, *, stop: int = 0, cache: CacheConfig = NO_CACHE) -> Outcome | None:
    """The line of a small video; None where the run ends behind a denoise step."""
    job = video_job("film", size=Size(64, 96), num_inference_steps=6)
    output = OutputConfig(out, checkpoint_every=1 if stop else 0)
    config = RunConfig(output, model=ModelChoice(device="cuda:0"), cache=cache)
    with RunFolder(out) as folder:
        for event in Session(config).run(make_plan([job], registry.model_card), folder):
            if isinstance(event, DenoiseStep) and event.step == stop:
                return None
            if isinstance(event, JobDone):
                return event.outcome
    raise AssertionError("the job failed")


def test_a_video_of_kept_prompts_or_kept_latents_is_the_same(tmp_path: Path) -> None:
    cache = CacheConfig(tmp_path / "cache")
    fresh = _filmed(tmp_path / "fresh", cache=cache)
    again = _filmed(tmp_path / "again", cache=cache)
    _filmed(tmp_path / "stopped", stop=3)
    resumed = _filmed(tmp_path / "stopped")
    assert fresh is not None
    assert again is not None
    assert resumed is not None
    assert (again.cache["encoder_runs"], resumed.denoise_steps) == ({}, 3)
    assert len({o.outputs[0].pixel_sha256 for o in (fresh, again, resumed)}) == 1


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
