"""A tiny BAGEL with the golden weights of everything but the VAE, and runs of it by the engine."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_bagel
import torch
from PIL import Image
from safetensors.torch import load_file

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.media.images import SourceImage, read_view
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models import registry
from hyimg_cli.models.bagel.config import read_architecture
from hyimg_cli.models.bagel.family import Bagel
from hyimg_cli.models.bagel.guidance import unpacked
from hyimg_cli.models.bagel.sequence import Size
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import ModelChoice, ReuseConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest, View
from hyimg_cli.spec.options import TextSampling

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text())
JOB = ImageJob(
    custom_id="job",
    task="t2i",
    prompt="a small red house by the sea",
    images=(),
    model="bagel",
    seed=1,
    size=SizeRequest(64, 96),
    num_inference_steps=4,
    guidance_scale=4.0,
    flow_shift=3.0,
    bot_task="none",
    ar_seed=1,
    text=TextSampling(0.0, 0, 1.0, 64),
    image_guidance_scale=1.5,
    guidance_interval=(0.4, 1.0),
    guidance_renorm="global",
)


@pytest.fixture(scope="session")
def bagel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint with another VAE."""
    folder = tmp_path_factory.mktemp("bagel") / "golden"
    shutil.copytree(GOLDEN / "checkpoint", folder)
    tiny_bagel.write_vae(folder, read_architecture(folder).vae)
    return folder


@pytest.fixture(scope="session")
def loaded(bagel_folder: Path) -> Bagel:
    model = registry.load(ModelChoice(str(bagel_folder), device="cpu"))
    assert isinstance(model, Bagel)
    return model


@pytest.fixture
def bagel(loaded: Bagel) -> Iterator[Bagel]:
    """The same with its counters at zero; what a test sets on it is gone behind the test."""
    own = dict(vars(loaded)), dict(vars(loaded.codec))
    loaded.network.branch_forwards = 0
    yield loaded
    for one, before in zip((loaded, loaded.codec), own, strict=True):
        vars(one).clear()
        vars(one).update(before)


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    """Numbers of the published code, float32, on the CPU."""
    return load_file(GOLDEN / "cases.safetensors")


@pytest.fixture(scope="session")
def pictures(golden: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Paths of the golden source pictures, by mode."""
    folder = tmp_path_factory.mktemp("pictures")
    for mode in ("RGB", "RGBA"):
        pixels = golden[f"source.{mode.lower()}.pixels"].numpy()
        Image.fromarray(pixels).save(folder / f"{mode}.png")
    return lambda mode: str(folder / f"{mode}.png")


class Runs:
    """Jobs through the engine's stages, as a session has them run."""

    def __init__(self, model: Bagel, *, tree_bytes: int = 10**8, kv_reuse: bool = True) -> None:
        self.model, self.events = model, []
        self._images: dict[View, SourceImage] = {}
        self._stages = ImageStages(
            model,
            ReuseConfig(kv_reuse=kv_reuse),
            Prefixes(KVTree(tree_bytes), "tests"),
            lambda view: (self._read(view), 0.0),
            lambda image: (model.encode_source(image.pixels, image.digest), 0.0),
        )

    def all(self, jobs: Sequence[ImageJob], batch_size: int = 8) -> dict[str, ImageRequest]:
        """What each job became, by name."""
        batch = ContinuousBatch(
            WholeBatches(
                map(Ticket, jobs), self._stages, lambda since: PhaseClock(since, lambda: None)
            ),
            Together(batch_size, batch_size),
        )
        self.events = list(batch.run())
        for event in self.events:
            if isinstance(event, Lost):
                raise event.error
        return {one.job.custom_id: one for one in self.events if isinstance(one, ImageRequest)}

    def one(self, job: ImageJob) -> ImageRequest:
        return self.all([job])[job.custom_id]

    def _read(self, view: View) -> SourceImage:
        return self._images.setdefault(view, read_view(view))


def latents(done: ImageRequest) -> torch.Tensor:
    return done.denoise_state.latents


def golden_job(run: dict[str, Any], picture: Callable[[str], str]) -> ImageJob:
    """A golden run as a job; its last text is the prompt."""
    images = tuple(picture(mode) for mode in run["modes"])
    height, width = run["output_hw"]
    return replace(
        JOB,
        task="it2i" if images else "t2i",
        prompt=run["inputs"][-1],
        images=images,
        size=SizeRequest() if images else SizeRequest(height, width),
        num_inference_steps=run["num_timesteps"],
        guidance_scale=run["text_scale"],
        flow_shift=run["timestep_shift"],
        bot_task="think" if run["think"] else "none",
        ar_seed=1,
        text=TextSampling(0.0, 0, 1.0, run.get("max_length", 64)),
        image_guidance_scale=run["image_scale"],
        guidance_interval=tuple(run["cfg_interval"]),
        guidance_renorm=run["renorm_type"],
        guidance_renorm_min=run["renorm_min"],
    )


def give_golden(bagel: Bagel, golden: dict[str, torch.Tensor], name: str) -> None:
    """Have the model draw the golden noise, and encode sources into the golden latents."""
    run = CASES["runs"][name]
    known = [
        golden.get(f"{name}.vae_latent{k}", golden[f"source.{mode.lower()}.vae_latent"])
        for k, mode in enumerate(run["modes"])
    ]
    given = iter(known)

    def latents_of(size: Size, digest: str) -> torch.Tensor:
        return next(given)

    vars(bagel)["posterior_noise"] = latents_of
    vars(bagel.codec)["encode"] = lambda levels, noise: noise
    noise = unpacked(golden[f"{name}.noise"], *run["grid"])
    vars(bagel)["initial_latents"] = lambda size, seed: noise


def pixels_of(folder: Path) -> dict[str, Any]:
    """By job, what a run's folder says of its pixels and text."""
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {
        line["custom_id"]: (line["outputs"][0]["pixel_sha256"], line["cot_token_ids"])
        for line in lines
        if line["status"] == "done"
    }


def noise_picture(path: Path, height: int, width: int) -> str:
    """A picture of random pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)
