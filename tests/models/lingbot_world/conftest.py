"""The golden miniature of LingBot-World fast, loaded once; numbers are of the published code."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.models import registry
from hyimg_cli.models.lingbot_world.denoising import ChunkDenoiser
from hyimg_cli.models.lingbot_world.model import LingBotWorld
from hyimg_cli.models.lingbot_world.network import LingBotNetwork
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import Size, VideoJob

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "checkpoint"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
NUMBERS = load_file(GOLDEN / "cases.safetensors")
SIZE = Size(32, 48)
JOB = VideoJob(
    custom_id="walk",
    task="i2v",
    prompt=CASES["clip"]["prompt"],
    negative_prompt="",
    model=str(CHECKPOINT),
    seed=CASES["clip"]["seed"],
    size=SIZE,
    num_frames=45,
    fps=16,
    num_inference_steps=4,
    guidance_scale=1.0,
    flow_shift=CASES["clip"]["shift"],
    fit="stretch",
    camera="w-10,iw-5,none-3",
)


@pytest.fixture(scope="session")
def golden() -> LingBotWorld:
    loaded = registry.load_video(ModelChoice(str(CHECKPOINT), dtype="float32", device="cpu"))
    assert isinstance(loaded, LingBotWorld)
    return loaded


def write_image(path: Path, pixels_HWC: Tensor) -> str:
    Image.fromarray(pixels_HWC.numpy()).save(path)
    return str(path)


def write_path(folder: Path, poses: Tensor, intrinsics: Tensor) -> str:
    """A folder as the published code reads it; gives the path of the poses."""
    folder.mkdir(parents=True)
    np.save(folder / "poses.npy", poses.numpy())
    np.save(folder / "intrinsics.npy", intrinsics.numpy())
    return str(folder / "poses.npy")


def denoiser_of(model: LingBotWorld, jobs: Sequence[VideoJob]) -> ChunkDenoiser:
    """With what the jobs' prompts and pictures come to."""
    clips = []
    for job in jobs:
        found = model.conditions(job, [source_digest(path) for path in job.images])
        clips.append((job, {one: model.encoders[kind].encode(one) for one, kind in found.items()}))
    return model.denoiser_of(clips)


def run(denoiser: ChunkDenoiser, latents: Tensor | None = None, first: int = 0) -> Tensor:
    latents = denoiser.latents if latents is None else latents
    for index in range(first, denoiser.steps):
        latents = denoiser.step(index, latents)
    return latents


@contextmanager
def passes(network: LingBotNetwork) -> Iterator[list[None]]:
    """One entry for each of the network's passes."""
    made: list[None] = []
    handle = network.register_forward_hook(lambda *_: made.append(None))
    try:
        yield made
    finally:
        handle.remove()


def worst(found: Any, expected: Tensor) -> float:
    return float((torch.as_tensor(np.asarray(found)).double() - expected.double()).abs().max())
