"""What only a GPU can show: no synchronisation inside the two loops, and the CPU's picture."""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import studio_of
from engine.fake_video import video_job
from event_kinds import is_done, is_step

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kernels.captures import waits_are_errors
from hyimg_cli.kernels.choice import ANY_ROWS, rows_unread
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.available import free_bytes, limit_gpu_memory
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models import registry
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.image.think import DecodeLoop
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.quality.metrics import psnr
from hyimg_cli.settings.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest

NO_CACHE = CacheConfig()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    """As it runs by default, its graphs captured: a capture waits for the device."""
    model = registry.load(ModelChoice(device="cuda:0"))
    assert model.graphs is None or model.graphs.prepare(3) == 3
    assert model.graphs is None or model.graphs.degraded(3) == ""
    return model


@pytest.fixture
def _never_waits() -> None:
    """torch reads the sizes of experts' groups on the host in float32, and on most GPUs."""
    capability = torch.cuda.get_device_capability()
    if rows_unread(capability, torch.bfloat16, "none") != ANY_ROWS:
        pytest.skip("this GPU's grouped products wait")


@pytest.fixture
def _has_video() -> None:
    for library in ("diffusers", "av"):
        pytest.importorskip(library, reason=f"{library} is not installed")


def _filmed(out: Path, *, stop: int = 0, cache: CacheConfig = NO_CACHE) -> Outcome | None:
    """The line of a small video; None where the run ends behind a denoise step."""
    job = video_job("film", size=Size(64, 96), num_inference_steps=6)
    output = OutputConfig(out, checkpoint_every=1 if stop else 0)
    config = RunConfig(output, model=ModelChoice(device="cuda:0"), cache=cache)
    with RunFolder(out) as folder:
        for event in Session(config).run(make_plan([job], registry.model_card), folder):
            if is_step(event) and event.done == stop:
                return None
            if is_done(event):
                return event.outcome
    raise AssertionError("the job failed")


@pytest.mark.usefixtures("_has_video")
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


@pytest.mark.usefixtures("_has_video")
def test_networks_that_take_turns_make_the_same_video_in_less_memory(tmp_path: Path) -> None:
    job = video_job("film", size=Size(64, 96), num_inference_steps=3)
    made, held = [], []
    for offload in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        choice = ModelChoice(device="cuda:0", cpu_offload="model" if offload else "none")
        config = RunConfig(OutputConfig(tmp_path / str(offload)), model=choice)
        with RunFolder(config.output.folder) as folder, Session(config) as session:
            events = list(session.run(make_plan([job], registry.model_card), folder))
            held.append(torch.cuda.memory_allocated() - before)
        made += [e.outcome.outputs[0].pixel_sha256 for e in events if is_done(e)]
    assert len(made) == 2
    assert made[0] == made[1]
    sizes = dict(registry.video_card("tiny-video").component_bytes)
    assert held[1] <= held[0] - sizes["transformer"] // 2, "the VAE alone was left there"


def test_a_part_of_the_gpu_is_kept_to() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        limit_gpu_memory(
            RunConfig(OutputConfig(Path()), batch=BatchConfig(gpu_memory_utilization=0.05))
        )
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 10, dtype=torch.uint8, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def _events(jobs: list[ImageJob], model: Any, **options: Any) -> Iterator[Any]:
    """What a group tells on its way; the error that a job is lost by is raised."""
    clock = partial(PhaseClock, synchronize=lambda: None)
    together = Together(len(jobs), len(jobs))
    run = ContinuousBatch(
        WholeBatches(map(Ticket, jobs), studio_of(model), clock), together, **options
    )
    for event in run.run():
        if isinstance(event, Lost):
            raise event.error
        yield event


def _drawn(
    job: ImageJob, model: Any, looping: AbstractContextManager[None] | None = None
) -> ImageRequest:
    """The job's end; all denoise steps but the first are done inside `looping`."""
    events = _events([job], model)
    step = next(event for event in events if is_step(event))
    with looping or nullcontext():
        while step.step < step.total:
            step = next(events)
    (end,) = (event for event in events if isinstance(event, ImageRequest))
    return end


@pytest.mark.usefixtures("_never_waits")
def test_the_denoise_loop_never_waits_for_the_device(on_gpu: Any, job: ImageJob) -> None:
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=4)
    _drawn(job, on_gpu)
    _drawn(job, on_gpu, waits_are_errors())


@pytest.mark.usefixtures("_never_waits")
def test_the_think_loop_waits_for_nothing_but_its_own_copy(
    on_gpu: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several texts with draws of their own; waiting on the copy's event is no synchronisation."""
    jobs = [replace(job, custom_id=f"{n}", num_inference_steps=1, ar_seed=n) for n in range(3)]
    step, steps = DecodeLoop.step, []

    def watched(self: DecodeLoop, writers: Any) -> Any:
        steps.append(len(writers))
        with waits_are_errors() if len(steps) > 2 else nullcontext():
            return step(self, writers)

    monkeypatch.setattr(DecodeLoop, "step", watched)
    ends = [event for event in _events(jobs, on_gpu) if isinstance(event, ImageRequest)]
    assert len(ends) == 3
    assert len(steps) > 5


def test_the_same_text_whether_read_at_once_or_late(on_gpu: Any, job: ImageJob) -> None:
    written = []
    for lag in (0, 1):
        events = _events([replace(job, num_inference_steps=1)], on_gpu, read_lag=lag)
        (end,) = (event for event in events if isinstance(event, ImageRequest))
        written.append(end.text)
    assert written[0] == written[1]


def test_the_same_picture_as_on_the_cpu(family: Any, job: ImageJob) -> None:
    """float32 on both: rounding alone, convolutions in TF32 included, a few levels at most."""
    model = registry.load(ModelChoice(device="cuda:0", dtype="float32"))
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=8)
    pictures = [_drawn(job, each).pixels.astype(int) for each in (model, family)]
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
    ours, released = (_drawn(job, each).pixels for each in (model, family))
    assert psnr(ours, released) > 30


@pytest.mark.parametrize("form", ["none", "fp8"])
def test_the_weights_take_what_the_plan_says(form: Any) -> None:
    # What models before this one left in cycles must not be let go meanwhile.
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = registry.load(ModelChoice(device="cuda:0", quantization=form))
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(model.card.loaded_bytes("bfloat16", form), rel=0.1)


def test_memory_of_tensors_that_are_gone_is_free(on_gpu: Any) -> None:
    before = free_bytes(on_gpu)
    torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.memory_reserved() > 2 * 10**9, "the allocator keeps it"
    assert free_bytes(on_gpu) == pytest.approx(before, abs=10**8)
