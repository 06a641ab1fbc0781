"""Autoencoders of the official classes with few channels, written to a folder as released ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyimg_cli.models.diffusers_video.vaes import HunyuanVae, WanVae
from hyimg_cli.parallel.ranks import Rank

OURS: dict[str, Any] = {"AutoencoderKLHunyuanVideo15": HunyuanVae, "AutoencoderKLWan": WanVae}


@dataclass(frozen=True)
class VaeLoader:
    """Loads the autoencoder in `folder` on a rank: what every rank of a decode is given.

    All ranks, the writing one too, load from disk: weights built in memory lie elsewhere and may
    round otherwise.
    """

    folder: Path
    dtype: torch.dtype

    def __call__(self, rank: Rank) -> HunyuanVae | WanVae:
        return OURS[self.class_name](self.library().to(rank.device))

    @property
    def class_name(self) -> str:
        return str(json.loads((self.folder / "config.json").read_text())["_class_name"])

    def library(self) -> Any:
        """The official class with its weights."""
        import diffusers

        cls = getattr(diffusers, self.class_name)
        return cls.from_pretrained(self.folder, dtype=self.dtype).requires_grad_(False).eval()


def write_hunyuan_video(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """AutoencoderKLHunyuanVideo15, 16x and 4x as released, 4 latent channels."""
    from diffusers import AutoencoderKLHunyuanVideo15

    torch.manual_seed(7)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
    )
    vae.to(dtype=dtype).save_pretrained(folder)
    return folder


def write_wan(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """AutoencoderKLWan as Wan 2.1 has it: 8x and 4x, 16 latent channels."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(8)
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **_WAN_DOWN
    )
    vae.to(dtype=dtype).save_pretrained(folder)
    return folder


def write_wan_patches(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """AutoencoderKLWan as Wan 2.2 TI2V has it: residual, the decoder puts out patches of 2x2."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(9)
    vae = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        **_WAN_DOWN,
    )
    vae.to(dtype=dtype).save_pretrained(folder)
    return folder


_WAN_DOWN = {"temperal_downsample": [False, True, True]}
