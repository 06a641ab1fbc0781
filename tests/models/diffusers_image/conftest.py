"""Tiny picture editors of diffusers, written once, and sources for them."""

import importlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_editors
from engine.conftest import ray_cluster, ray_environment  # noqa: F401  (fixtures)
from PIL import Image

from hyimg_cli.models.diffusers_video import weights
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

# Modules of diffusers that bring pictures to a size.
FITTING = (
    "modular_pipelines.qwenimage.encoders",
    "pipelines.qwenimage.pipeline_qwenimage_edit",
    "pipelines.qwenimage.pipeline_qwenimage_edit_inpaint",
    "pipelines.qwenimage.pipeline_qwenimage_edit_plus",
    "pipelines.qwenimage.pipeline_qwenimage_layered",
    "pipelines.longcat_image.pipeline_longcat_image_edit",
)
MOST_PIXELS = 96**2


@pytest.fixture(autouse=True)
def small_references(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """References have few pixels, ours as the classic pipelines'; in thorough tests a million."""
    if not request.node.get_closest_marker("thorough"):
        shrink_references(monkeypatch)


def shrink_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give references that the library brings to an area of its own few pixels."""
    for name in FITTING:
        module: Any = importlib.import_module(f"diffusers.{name}")

        def fit(area: int, ratio: float, fit: Any = module.calculate_dimensions) -> Any:
            return fit(min(area, MOST_PIXELS), ratio)

        monkeypatch.setattr(module, "calculate_dimensions", fit)


check_weights = cache(weights.check_weights)


@pytest.fixture(autouse=True)
def little_that_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a folder are checked once, and files need not outlive the machine."""
    monkeypatch.setattr(weights, "check_weights", check_weights)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a kind, written once."""
    folder = tmp_path_factory.mktemp("editors")

    def of(kind: str) -> Path:
        made = folder / kind
        return made if made.is_dir() else tiny_editors.write(made, kind)

    return of


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    numbers = np.random.default_rng(1)
    for number, (height, width) in enumerate(((64, 96), (80, 70))):
        pixels = numbers.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"s{number}.png")
    return ["s0.png", "s1.png"]


@pytest.fixture
def job(sources: list[str], tmp_path: Path) -> ImageJob:
    return ImageJob(
        custom_id="a",
        task="it2i",
        prompt="red",
        model="",
        images=(str(tmp_path / sources[0]),),
        seed=7,
        size=SizeRequest(64, 96),
        text=TextSampling(),
        num_inference_steps=2,
        guidance_scale=4.0,
        flow_shift=1.0,
    )
