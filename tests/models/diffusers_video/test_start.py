"""Image-to-video equals the library's own pipelines, latents and pixels, for every family.

The library is given the picture and a fresh pipeline from the same folder; both sides start from
disk, with random weights, so any slip (order of channels, mask, fit, tokens) moves every value.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_video import START_KINDS, write_start
from torch import Tensor

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.media.images import read_image
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.latent_video import PromptEmbedding
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.run import ModelChoice

FOLDERS = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FOLDERS:
    """The checkpoint of a kind, written at its first use."""
    top = tmp_path_factory.mktemp("start")
    return cache(lambda kind: write_start(top / kind, kind))


@pytest.fixture(scope="module")
def model_of(folder_of: FOLDERS) -> Callable[[str], DiffusersVideo]:
    """Whole decodes and encodes, and the library's own forward: to the bit."""

    def loaded(kind: str) -> DiffusersVideo:
        choice = ModelChoice(str(folder_of(kind)), dtype="float32", device="cpu")
        return registry.load_video(choice, is_fast=False, is_tiled=False)

    return cache(loaded)


@pytest.fixture(scope="module")
def pipeline_of(folder_of: FOLDERS) -> Callable[[str], Any]:
    """The library's, from the same folder."""

    def loaded(kind: str) -> Any:
        is_hunyuan = kind in ("hunyuan", "distilled")
        name = "HunyuanVideo15" if is_hunyuan else "Wan"
        cls = getattr(diffusers, f"{name}ImageToVideoPipeline")
        pipeline = cls.from_pretrained(folder_of(kind), dtype=torch.float32, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return cache(loaded)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A first and a last frame, of another shape than any video."""
    folder, dice = tmp_path_factory.mktemp("pictures"), np.random.default_rng(3)
    paths = []
    for name in ("first", "last"):
        coarse = Image.fromarray(dice.integers(0, 256, (6, 9, 3), dtype=np.uint8))
        coarse.resize((90, 70)).save(folder / f"{name}.png")
        paths.append(str(folder / f"{name}.png"))
    return paths[0], paths[1]


def start_job(kind: str, folder: Path, pictures: tuple[str, str], **changes: Any) -> VideoJob:
    card = registry.video_card(str(folder))
    assert card.start is not None
    facts: dict[str, Any] = {
        "size": card.start.size_for(Size(70, 90)) if card.start.sizes else Size(32, 64),
        "guidance_scale": 1.0 if kind == "distilled" else 4.0,
        "guidance_scale_2": 3.0 if kind == "a14b" else None,
        "images": pictures if kind == "flf" else pictures[:1],
        "fit": card.start.fit,
        "num_frames": 9,
        "num_inference_steps": 3,
    }
    return VideoJob(
        custom_id="job", task="i2v", prompt="the ball rolls", negative_prompt="blurry",
        model=str(folder), seed=3, fps=8, flow_shift=5.0, **(facts | changes),
    )  # fmt: skip


def encoded(model: DiffusersVideo, job: VideoJob) -> dict[str, PromptEmbedding]:
    digests = [source_digest(path) for path in job.images]
    views = model.pictures.views(job, digests)
    return {view.kind: model.pictures.encode(view) for view in views}


def latents_of(model: DiffusersVideo, job: VideoJob) -> Tensor:
    embeddings = {text: model.prompts.encode(text) for text in model.texts(job)}
    start = {kind: view.tensors[kind] for kind, view in encoded(model, job).items()}
    denoiser = model.denoiser(job, embeddings, start)
    latents = denoiser.initial_latents()
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    return latents


def embeddings_of(model: DiffusersVideo, job: VideoJob) -> dict[str, Any]:
    """The prompts as Wan's pipeline takes them; its own cleaning needs ftfy."""
    made: dict[str, Any] = {}
    for name, text in zip(
        ("prompt_embeds", "negative_prompt_embeds"), model.texts(job), strict=False
    ):
        valid = model.prompts.encode(text).tensors["text"]
        padded = valid.new_zeros(1, 512, valid.shape[1])
        padded[0, : len(valid)] = valid
        made[name] = padded
    return made


def plain(pipeline: Any, model: DiffusersVideo, job: VideoJob, output: str = "latent") -> Any:
    """What the library makes of a job."""
    first, *last = [Image.fromarray(read_image(Path(path)).pixels) for path in job.images]
    options: dict[str, Any] = {}
    if "Hunyuan" in type(pipeline).__name__:
        pipeline.guider = pipeline.guider.new(guidance_scale=job.guidance_scale)
        shift = {"shift": job.flow_shift}
        options = {"prompt": job.prompt, "negative_prompt": job.negative_prompt}
    else:
        shift = {"flow_shift": job.flow_shift}
        options = embeddings_of(model, job) | {
            "height": job.size.height,
            "width": job.size.width,
            "guidance_scale": job.guidance_scale,
            "guidance_scale_2": job.guidance_scale_2,
            "last_image": last[0] if last else None,
        }
    pipeline.scheduler = pipeline.scheduler.from_config(pipeline.scheduler.config, **shift)
    return pipeline(
        image=first,
        num_frames=job.num_frames,
        num_inference_steps=job.num_inference_steps,
        generator=torch.Generator().manual_seed(job.seed),
        output_type=output,
        **options,
    ).frames


@pytest.mark.parametrize("kind", START_KINDS)
def test_latents_are_the_pipelines(
    kind: str, folder_of: FOLDERS, model_of: Any, pipeline_of: Any, pictures: tuple[str, str]
) -> None:
    """Two sizes and two lengths each."""
    model, pipeline = model_of(kind), pipeline_of(kind)
    job = start_job(kind, folder_of(kind), pictures)
    assert torch.equal(latents_of(model, job), plain(pipeline, model, job))
    other = replace(job, num_frames=5, num_inference_steps=2, seed=8)
    if kind not in ("hunyuan", "distilled"):
        # HunyuanVideo's pipeline takes the picture's own size alone.
        other = replace(other, size=Size(64, 32))
    assert torch.equal(latents_of(model, other), plain(pipeline, model, other))
