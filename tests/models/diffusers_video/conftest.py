"""Tiny checkpoints loaded once, jobs for them, and diffusers' own pipelines to compare with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from library_weights import copy_weights
from models.diffusers_video.stock import take_stock_forward
from tiny_video import TINY_VIDEO, write_wan
from torch import Tensor

from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import Size, VideoJob

JOB = VideoJob(
    custom_id="ball",
    task="t2v",
    prompt='a red ball with "HI" on it',
    negative_prompt="blurry",
    model="tiny-video",
    seed=3,
    size=Size(48, 80),
    num_frames=9,
    fps=8,
    num_inference_steps=4,
    guidance_scale=4.0,
    flow_shift=5.0,
)


@pytest.fixture
def job() -> VideoJob:
    return JOB


@pytest.fixture(scope="session")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan(tmp_path_factory.mktemp("wan") / "wan-2.1")


@pytest.fixture(scope="session")
def wan22_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan(tmp_path_factory.mktemp("wan") / "wan-2.2", boundary_ratio=0.875)


@pytest.fixture(scope="session")
def folders(wan_folder: Path, wan22_folder: Path) -> dict[str, Path]:
    return {"hunyuan": TINY_VIDEO, "wan": wan_folder, "wan22": wan22_folder}


def load(folder: Path) -> DiffusersVideo:
    return registry.load_video(ModelChoice(str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, DiffusersVideo]:
    """By name: `hunyuan`, `hunyuan-stock`, `wan`, `wan22`; float32. Left as they were found."""
    loaded = {name: load(folder) for name, folder in folders.items()}
    return loaded | {"hunyuan-stock": take_stock_forward(load(TINY_VIDEO))}


@pytest.fixture
def tiny(models: dict[str, DiffusersVideo]) -> DiffusersVideo:
    return models["hunyuan"]


@pytest.fixture
def wan(models: dict[str, DiffusersVideo]) -> DiffusersVideo:
    return models["wan"]


Draw = Callable[[DiffusersVideo, VideoJob], Tensor]


@pytest.fixture
def draw() -> Draw:
    """A job's latents behind its last step."""
    return latents_of


def latents_of(model: DiffusersVideo, job: VideoJob) -> Tensor:
    embeddings = {text: model.prompts.encode(text) for text in model.texts(job)}
    denoiser = model.denoiser(job, embeddings)
    latents = denoiser.latents
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    return latents


@pytest.fixture(scope="session")
def plain(folders: dict[str, Path]) -> Callable[..., Any]:
    """What diffusers' own pipeline, loaded from the same folder, makes of a job."""
    pipelines: dict[tuple[str, str], Any] = {}

    def run(name: str, job: VideoJob, dtype: str = "float32", output: str = "latent") -> Any:
        from diffusers import DiffusionPipeline

        if (name, dtype) not in pipelines:
            pipeline = DiffusionPipeline.from_pretrained(
                folders[name], dtype=getattr(torch, dtype), local_files_only=True
            )
            pipeline.set_progress_bar_config(disable=True)
            pipelines[name, dtype] = copy_weights(pipeline)
        pipeline = pipelines[name, dtype]
        options: dict[str, Any] = {}
        if name == "hunyuan":
            pipeline.guider = pipeline.guider.new(guidance_scale=job.guidance_scale)
            pipeline.scheduler = pipeline.scheduler.from_config(
                pipeline.scheduler.config, shift=job.flow_shift
            )
        else:
            options["guidance_scale"] = job.guidance_scale
            options["guidance_scale_2"] = job.guidance_scale_2
            pipeline.scheduler = pipeline.scheduler.from_config(
                pipeline.scheduler.config, flow_shift=job.flow_shift
            )
        return pipeline(
            prompt=job.prompt,
            negative_prompt=job.negative_prompt,
            height=job.size.height,
            width=job.size.width,
            num_frames=job.num_frames,
            num_inference_steps=job.num_inference_steps,
            generator=torch.Generator().manual_seed(job.seed),
            output_type=output,
            **options,
        ).frames

    return run


@pytest.fixture
def mixed(job: VideoJob) -> list[VideoJob]:
    """Five jobs of different sizes, steps, scales, prompts."""
    return [
        job,
        replace(job, seed=4, size=Size(32, 48), num_frames=5, prompt="a blue cube"),
        replace(job, num_inference_steps=3, guidance_scale=1.0),
        replace(job, seed=5, guidance_scale=6.0, flow_shift=9.0, negative_prompt=""),
        replace(job, size=Size(80, 32), num_frames=1, prompt='“one” and "two"'),
    ]
