"""Wan 2.2's 5B checkpoint, whole: 16-pixel cells of 48 channels, 2 x 2 patches out of the decoder,
a timestep for every patch, stored in float32 and in shards.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanTransformer3DModel
from library_weights import copy_weights
from tiny_video import write_wan

from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import Size, VideoJob

CHANNELS = 48
VAE: dict[str, Any] = {
    "base_dim": 8, "decoder_base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [False, True, True],
    "latents_mean": [index / 50 - 0.5 for index in range(CHANNELS)],
    "latents_std": [0.5 + index / 60 for index in range(CHANNELS)],
    "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2,
    "scale_factor_spatial": 16, "scale_factor_temporal": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_wan(tmp_path_factory.mktemp("wan") / "5b")
    (folder / "card.json").unlink()
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"expand_timesteps": True}))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config |= {"in_channels": CHANNELS, "out_channels": CHANNELS}
    for file in [*folder.glob("vae/*"), *folder.glob("transformer/*")]:
        file.unlink()
    torch.manual_seed(5)
    AutoencoderKLWan(**VAE).save_pretrained(folder / "vae")
    own = {key: value for key, value in config.items() if not key.startswith("_")}
    WanTransformer3DModel(**own).save_pretrained(folder / "transformer", max_shard_size="60KB")
    assert len(list(folder.glob("transformer/*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frames_are_the_pipelines(folder: Path, job: VideoJob, dtype: str) -> None:
    """From the prompt to the pixels of a decode in four tiles."""
    job = replace(job, size=Size(288, 320), num_frames=5, num_inference_steps=3, flow_shift=3.0)
    vae = AutoencoderKLWan.from_pretrained(folder / "vae", dtype=torch.float32)
    pipeline = DiffusionPipeline.from_pretrained(
        folder, vae=vae, dtype=getattr(torch, dtype), local_files_only=True
    )
    copy_weights(pipeline).set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling()
    video = pipeline(
        prompt=job.prompt,
        negative_prompt=job.negative_prompt,
        height=288,
        width=320,
        num_frames=5,
        num_inference_steps=3,
        guidance_scale=job.guidance_scale,
        generator=torch.Generator().manual_seed(job.seed),
    ).frames[0]
    model = registry.load_video(ModelChoice(str(folder), dtype=dtype, device="cpu"))
    denoiser = model.denoiser(job, {text: model.prompts.encode(text) for text in model.texts(job)})
    latents = denoiser.latents
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    own = np.concatenate(list(model.decode_latents(latents)))
    assert own.std() > 10
    assert np.array_equal(own, (video * 255).round().astype(np.uint8))


def test_its_card(folder: Path) -> None:
    card = registry.video_card(str(folder))
    assert (card.size_multiple, card.pixels_per_cell, card.latent_channels) == (32, 16, CHANNELS)
    assert (card.defaults.size, card.defaults.num_frames, card.defaults.fps) == (
        Size(704, 1280), 121, 24,
    )  # fmt: skip
