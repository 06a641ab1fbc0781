"""Denoising equals diffusers' pipeline, resumes, keeps no state between jobs, reads nothing
back.
"""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import diagonal
from library_weights import copy_weights
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo, LocalBranches
from hyimg_cli.models.latent import LatentDenoiser
from hyimg_cli.models.latent_video import BranchInputs
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import VideoJob

Draw = Callable[[DiffusersVideo, VideoJob], Tensor]
# Measured on a CPU, float32, 24 jobs of 4 steps at scale 6: 1.6e-5 at most, of latents that reach
# 5.3; benchmarks/results/video-plain-loop-2core-cpu.json.
FAST_TOLERANCE = 5e-5


def embedded(model: DiffusersVideo, job: VideoJob) -> LatentDenoiser:
    return model.denoiser(job, {text: model.prompts.encode(text) for text in model.texts(job)})


# --- against the pipeline --------------------------------------------------------------------


@pytest.mark.parametrize("scale", [4.0, 1.0])
def test_the_stock_way_is_the_pipeline_to_the_bit(
    models: dict[str, DiffusersVideo], plain: Any, draw: Draw, job: VideoJob, scale: float
) -> None:
    job = replace(job, guidance_scale=scale, num_inference_steps=2, flow_shift=7.0)
    assert torch.equal(draw(models["hunyuan-stock"], job), plain("hunyuan", job))


@pytest.mark.parametrize(
    ("scale", "prompt"), diagonal([6.0, 1.0], ['a red ball with "HI"', "a red ball", ""])
)
def test_the_fast_way_is_the_pipeline_but_for_rounding(
    tiny: DiffusersVideo, plain: Any, draw: Draw, job: VideoJob, prompt: str, scale: float
) -> None:
    job = replace(job, prompt=prompt, guidance_scale=scale, num_inference_steps=2)
    difference = (draw(tiny, job) - plain("hunyuan", job)).abs().max()
    assert 0 < difference < FAST_TOLERANCE


def test_the_fast_way_in_bfloat16_rounds_no_worse(
    models: dict[str, DiffusersVideo], draw: Draw, plain: Any, job: VideoJob
) -> None:
    """Two roundings of one job differ by more than a step of bfloat16; what counts is how far each
    is from float32, which starts here from the same noise: drawn in bfloat16. Measured over 12
    jobs: 0.91 to 1.07 of the stock way's distance, and 0.026 to 0.040 (RMS) apart from each other.
    """
    job = replace(job, num_inference_steps=2)
    fast = registry.load_video(ModelChoice("tiny-video", dtype="bfloat16", device="cpu"))
    own, stock = draw(fast, job), plain("hunyuan", job, dtype="bfloat16")
    assert own.dtype == torch.bfloat16
    denoiser = embedded(models["hunyuan"], job)
    exact = embedded(fast, job).latents.float()
    for index in range(denoiser.steps):
        exact = denoiser.step(index, exact)
    distance = (stock.float() - exact).std()
    assert (own.float() - exact).std() < 1.25 * distance
    assert 0 < (own.float() - stock.float()).std() < 0.08


@pytest.mark.parametrize("name", ["wan", "wan22"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_wan_is_the_pipeline_to_the_bit(
    folders: dict[str, Path],
    plain: Any,
    draw: Draw,
    job: VideoJob,
    name: str,
    dtype: Any,
    scale: float,
) -> None:
    second = 3.0 if name == "wan22" else None
    job = replace(
        job, guidance_scale=scale, guidance_scale_2=second, num_inference_steps=6, flow_shift=3.0
    )
    model = registry.load_video(ModelChoice(str(folders[name]), dtype=dtype, device="cpu"))
    latents = draw(model, job)
    assert latents.dtype == torch.float32
    assert torch.equal(latents, plain(name, job, dtype))


def test_both_wan_networks_are_used(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob
) -> None:
    model = models["wan22"]
    seen: list[int] = []
    handles = [
        network.register_forward_hook(lambda *_, i=i: seen.append(i))
        for i, network in enumerate(model.networks)
    ]
    draw(model, replace(job, num_inference_steps=6, flow_shift=3.0))
    for handle in handles:
        handle.remove()
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}


def test_a_second_scale_steers_the_second_network(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob
) -> None:
    job = replace(job, num_inference_steps=6, flow_shift=3.0)
    same = replace(job, guidance_scale_2=job.guidance_scale)
    model = models["wan22"]
    assert torch.equal(draw(model, job), draw(model, same))
    assert not torch.equal(draw(model, job), draw(model, replace(job, guidance_scale_2=1.5)))


def test_the_5b_models_timesteps_by_patch(wan_folder: Path, tmp_path: Path, job: VideoJob) -> None:
    """`expand_timesteps` of Wan 2.2 5B: every patch has its own timestep, here all the same."""
    from diffusers import DiffusionPipeline

    folder = Path(shutil.copytree(wan_folder, tmp_path / "5b"))
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"expand_timesteps": True}))
    job = replace(job, num_inference_steps=3, flow_shift=3.0)
    model = registry.load_video(ModelChoice(str(folder), device="cpu"))
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    copy_weights(pipeline).set_progress_bar_config(disable=True)
    latents = pipeline(
        prompt=job.prompt,
        negative_prompt=job.negative_prompt,
        height=48,
        width=80,
        num_frames=9,
        num_inference_steps=3,
        guidance_scale=job.guidance_scale,
        generator=torch.Generator().manual_seed(job.seed),
        output_type="latent",
    ).frames
    denoiser = embedded(model, job)
    own = denoiser.latents
    for index in range(3):
        own = denoiser.step(index, own)
    assert torch.equal(own, latents)


# --- one job at a time, whatever came before -------------------------------------------------


@pytest.mark.parametrize("name", ["hunyuan", "wan22"])
def test_order_does_not_matter(
    models: dict[str, DiffusersVideo], draw: Draw, mixed: list[VideoJob], name: str
) -> None:
    model = models[name]
    forward = {job: draw(model, job) for job in mixed}
    for job in [*reversed(mixed), mixed[2], mixed[0]]:
        assert torch.equal(draw(model, job), forward[job])


FRESH = """
import json, sys
from safetensors.torch import save_file
from hyimg_cli.models import registry
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.settings.run import ModelChoice
values = json.loads(sys.argv[1])
job = VideoJob(**values | {"size": Size(**values["size"]), "user_fields": frozenset()})
found = {}
for folder in sys.argv[3:]:
    model = registry.load_video(ModelChoice(folder, device="cpu"))
    texts = model.texts(job)
    denoiser = model.denoiser(job, {text: model.prompts.encode(text) for text in texts})
    latents = denoiser.latents
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    found[folder] = latents
save_file(found, sys.argv[2])
"""


@pytest.mark.thorough
def test_alone_in_a_fresh_process(
    models: dict[str, DiffusersVideo],
    folders: dict[str, Path],
    draw: Draw,
    job: VideoJob,
    tmp_path: Path,
) -> None:
    """Beside jobs that this process ran before: a process that has only this one."""
    names, path = ("hunyuan", "wan"), tmp_path / "latents.safetensors"
    values = json.dumps(asdict(job) | {"user_fields": []})
    arguments = [values, str(path), *(str(folders[name]) for name in names)]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    alone = load(path.read_bytes())
    for name in names:
        assert torch.equal(alone[str(folders[name])], draw(models[name], job))


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_a_failing_job_leaves_nothing(
    folders: dict[str, Path], draw: Draw, job: VideoJob, name: str
) -> None:
    """An exception inside step 3: the next job is a clean run's."""
    job = replace(job, num_inference_steps=6)
    model = registry.load_video(ModelChoice(str(folders[name]), device="cpu"))
    clean, network = draw(model, job), model.networks[0]
    broken = embedded(model, replace(job, seed=9))
    latents = broken.step(1, broken.step(0, broken.latents))

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of step 3")

    blocks = network.transformer_blocks if name == "hunyuan" else network.blocks
    handle = blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        broken.step(2, latents)
    handle.remove()
    assert torch.equal(draw(model, job), clean)


def test_a_guidance_window_works_for_every_job(
    folders: dict[str, Path], tmp_path: Path, draw: Draw, job: VideoJob
) -> None:
    """A guider that stops early fails the library's second job: it keeps its step counter."""
    folder = Path(shutil.copytree(folders["hunyuan"], tmp_path / "window"))
    path = folder / "guider" / "guider_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stop": 0.5}))
    model = registry.load_video(ModelChoice(str(folder), device="cpu"))
    first, second = draw(model, job), draw(model, job)
    assert model.texts(job) == (job.prompt, job.negative_prompt)
    assert torch.equal(first, second)


def test_a_switched_off_guider_obeys_the_jobs_scale(
    folders: dict[str, Path], tmp_path: Path, tiny: DiffusersVideo, draw: Draw, job: VideoJob
) -> None:
    folder = Path(shutil.copytree(folders["hunyuan"], tmp_path / "off"))
    path = folder / "guider" / "guider_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"enabled": False}))
    model = registry.load_video(ModelChoice(str(folder), device="cpu"))
    assert model.card.defaults.guidance_scale == 1.0
    assert torch.equal(draw(model, job), draw(tiny, job))


def test_the_global_generator_is_left_alone(
    tiny: DiffusersVideo, draw: Draw, job: VideoJob
) -> None:
    before = torch.get_rng_state()
    draw(tiny, job)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["hunyuan", "wan22"])
def test_seeds_and_prompts_matter(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob, name: str
) -> None:
    job = replace(job, num_inference_steps=2)
    base = draw(models[name], job)
    for other in (
        replace(job, seed=4),
        replace(job, prompt="a blue cube"),
        replace(job, negative_prompt="sharp"),
        replace(job, guidance_scale=2.0),
        replace(job, flow_shift=2.0),
    ):
        assert not torch.equal(draw(models[name], other), base), other


# --- checkpoints inside a job ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        pytest.param("hunyuan-stock", 2, marks=pytest.mark.thorough),
        *((name, stop) for name in ("hunyuan", "wan", "wan22") for stop in (1, 2, 3)),
    ],
)
def test_a_killed_job_goes_on_with_the_same_bits(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob, name: str, stop: int
) -> None:
    model = models[name]
    job = replace(job, num_inference_steps=3 if name == "hunyuan-stock" else 5)
    whole = draw(model, job)
    first = embedded(model, job)
    latents = first.latents
    for index in range(stop):
        latents = first.step(index, latents)
    data = save(dict(first.state()) | {"latents": latents})
    kept = load(data)
    again = kept.pop("latents")
    second = embedded(model, job)
    second.restore(stop, again, kept)
    for index in range(stop, second.steps):
        again = second.step(index, again)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("name", ["hunyuan", "wan", "wan22"])
def test_restored_schedulers_forget_no_attribute(
    models: dict[str, DiffusersVideo], job: VideoJob, name: str
) -> None:
    """Every attribute, whatever it is: what a library adds later cannot be missed."""
    whole: Any = embedded(models[name], job)
    latents = whole.latents
    for index in range(3):
        latents = whole.step(index, latents)
    restored: Any = embedded(models[name], job)
    restored.restore(3, latents, whole.state())
    expected, found = vars(whole.schedule.scheduler), vars(restored.schedule.scheduler)
    assert set(expected) == set(found)
    for attribute, value in expected.items():
        assert _same(value, found[attribute]), attribute


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def test_a_state_of_another_step_is_refused(tiny: DiffusersVideo, job: VideoJob) -> None:
    denoiser = embedded(tiny, job)
    latents = denoiser.step(0, denoiser.latents)
    state = denoiser.state()
    with pytest.raises(ValueError, match="step 2"):
        embedded(tiny, job).restore(2, latents, state)
    with pytest.raises(ValueError, match="step 1"):
        embedded(tiny, job).restore(1, latents, {})


# --- the loop ----------------------------------------------------------------------------------

HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")
# What selects rows by a boolean mask, or else tells the host how many there are.
SIZES_READ = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._linalg_check_errors.default,
)


class HostReads(TorchDispatchMode):
    """Operations that a GPU would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = op is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if op in SIZES_READ or is_mask:
            self.read.append(str(op))
        return op(*args, **(kwargs or {}))


def host_reads(
    denoiser: LatentDenoiser, monkeypatch: pytest.MonkeyPatch, steps: Sequence[int]
) -> list[str]:
    watch = HostReads()

    def spied(name: str) -> Any:
        original = getattr(Tensor, name)

        def spy(self: Tensor, *arguments: Any, **options: Any) -> Any:
            watch.read.append(name)
            return original(self, *arguments, **options)

        return spy

    # The first step also makes what the job alone decides, some of it from tables on the host.
    latents = denoiser.step(0, denoiser.latents)
    with monkeypatch.context() as patched:
        for name in HOST_READS:
            patched.setattr(Tensor, name, spied(name))
        with watch:
            for index in steps:
                latents = denoiser.step(index, latents)
    return watch.read


@pytest.mark.parametrize("name", ["hunyuan", "wan", "wan22"])
def test_the_loop_reads_nothing_back(
    models: dict[str, DiffusersVideo],
    job: VideoJob,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = replace(job, num_inference_steps=6, flow_shift=3.0)
    assert host_reads(embedded(models[name], job), monkeypatch, range(1, 6)) == []


def test_the_watch_sees_the_stock_forwards_reads(
    models: dict[str, DiffusersVideo], job: VideoJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 a forward: one test whether the image is zero, twelve selections by a mask."""
    denoiser = embedded(models["hunyuan-stock"], replace(job, num_inference_steps=2))
    read = host_reads(denoiser, monkeypatch, range(1, 2))
    assert len([name for name in read if "index" in name]) == 2 * 12
    assert read.count("__bool__") == 2


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_branches_are_two_forwards_and_may_run_anywhere(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob, name: str
) -> None:
    """In another order, as two ranks would: the same bits."""
    model = models[name]
    expected = draw(model, job)
    begun: list[int] = []

    class Backwards(LocalBranches):
        """Inputs through a pipe, branches in another order, as other ranks would have them."""

        def begin(self, inputs: Sequence[BranchInputs]) -> None:
            begun.append(len(inputs))
            super().begin(pickle.loads(pickle.dumps(list(inputs)))[::-1])

        def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
            return super().velocity(step, latents_BCFYX.clone(), timestep_B.clone())[::-1]

    before, model.branch_runner = model.branch_runner, lambda: Backwards(model.branch)
    try:
        assert torch.equal(draw(model, job), expected)
        draw(model, replace(job, guidance_scale=1.0))
    finally:
        model.branch_runner = before
    assert begun == [2, 1]


@pytest.mark.parametrize("prompt", ["a ball", 'a "ball"'])
def test_the_mask_free_processor_is_the_librarys_where_all_is_valid(
    tiny: DiffusersVideo, prompt: str
) -> None:
    """One block, the same rows, with a mask of ones and with none."""
    network = tiny.networks[0]
    block = network.transformer_blocks[0]
    generator = torch.Generator().manual_seed(len(prompt))
    video, text, time = (
        torch.randn(*shape, block.norm1.linear.in_features, generator=generator)
        for shape in ((1, 15), (1, 7), (1,))
    )
    rotary = network.rope(torch.empty(1, 4, 1, 3, 5))
    with torch.no_grad():
        masked = block(video, text, time, torch.ones(1, 7), rotary)
        free = block(video, text, time, None, rotary)
    for one, other in zip(masked, free, strict=True):
        assert (one - other).abs().max() < 5e-6
