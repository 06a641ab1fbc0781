"""What only a GPU can show: no synchronisation inside the two loops, and the CPU's picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import studio_of
from engine.fake_video import video_job

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.room import confine, free_bytes
from hyimg_cli.models import registry
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.group import Drawn, GroupRun
from hyimg_cli.pipelines.image.think import TextLoop
from hyimg_cli.quality.metrics import psnr
from hyimg_cli.spec.events import DenoiseStep, JobDone, Outcome
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig

NO_CACHE = CacheConfig()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    """With its graphs captured: a capture waits for the device."""
    model = registry.load(ModelChoice(device="cuda:0", dtype="float32"))
    assert model.prepare_decode(3) == 3 * model.has_graphs
    assert model.decode_note(3) == ""
    return model


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


def test_networks_that_take_turns_make_the_same_video_in_less_memory(tmp_path: Path) -> None:
    job = video_job("film", size=Size(64, 96), num_inference_steps=3)
    made, held = [], []
    for offload in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        choice = ModelChoice(device="cuda:0", cpu_offload=offload)
        config = RunConfig(OutputConfig(tmp_path / str(offload)), model=choice)
        with RunFolder(config.output.folder) as folder, Session(config) as session:
            events = list(session.run(make_plan([job], registry.model_card), folder))
            held.append(torch.cuda.memory_allocated() - before)
        made += [e.outcome.outputs[0].pixel_sha256 for e in events if isinstance(e, JobDone)]
    assert len(made) == 2
    assert made[0] == made[1]
    sizes = dict(registry.video_card("tiny-video").component_bytes)
    assert held[1] <= held[0] - sizes["transformer"] // 2, "the VAE alone was left there"


def test_a_part_of_the_gpu_is_kept_to() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        confine(RunConfig(OutputConfig(Path()), batch=BatchConfig(gpu_memory_utilization=0.05)))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 10, dtype=torch.uint8, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


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


@pytest.mark.parametrize("form", ["fp8", "nf4"])
def test_quantised_experts_draw_the_same_picture(family: Any, job: ImageJob, form: Any) -> None:
    """bfloat16 and fewer bits on the GPU against float32 on the CPU: other pixels, no other
    picture.
    """
    if form == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = registry.load(ModelChoice(device="cuda:0", quantization=form))
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=8)
    ours, released = (_drawn(job, each).picture.pixels for each in (model, family))
    assert psnr(ours, released) > 15


@pytest.mark.parametrize("form", ["none", "fp8"])
def test_the_weights_take_what_the_plan_says(form: Any) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = registry.load(ModelChoice(device="cuda:0", quantization=form))
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(model.card.loaded_bytes("bfloat16", form), rel=0.1)


def test_memory_of_tensors_that_are_gone_is_free(on_gpu: Any) -> None:
    before = free_bytes(on_gpu)
    torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.memory_reserved() > 2 * 10**9, "the allocator keeps it"
    assert free_bytes(on_gpu) == pytest.approx(before, abs=10**8)
