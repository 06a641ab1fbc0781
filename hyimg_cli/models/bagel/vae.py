"""FLUX's autoencoder by diffusers, its weights under the names of the checkpoint's own layout."""

# Legend: B batch, C channel, Y X latent rows and columns, H W pixels
import re
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from hyimg_cli.models.bagel.config import TILE_PIXELS, AutoencoderShape

_MID = {"resnets.0": "block_1", "resnets.1": "block_2", "attentions.0": "attn_1"}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_DOWN = re.compile(r"(encoder)\.down_blocks\.(\d+)\.(resnets|downsamplers)\.(\d+)\.(.+)")
_UP = re.compile(r"(decoder)\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"(\w+)\.mid_block\.(\w+\.\d)\.(.+)\.(\w+)")


def autoencoder(arch: AutoencoderShape) -> Any:
    """The network without values of its own."""
    levels = len(arch.ch_mult)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=arch.widths,
        layers_per_block=arch.num_res_blocks,
        latent_channels=arch.z_channels,
        scaling_factor=arch.scale_factor,
        shift_factor=arch.shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=True,
        # Of a tile, where latents are decoded in tiles.
        sample_size=TILE_PIXELS,
    )


def stored_name(name: str, levels: int) -> str:
    """The name in the checkpoint of diffusers' tensor `name`; it counts the decoder's levels from
    the finest on.
    """
    if match := _DOWN.fullmatch(name) or _UP.fullmatch(name):
        side, level, kind, block, rest = match.groups()
        is_down = side == "encoder"
        at = f"{side}.{'down' if is_down else 'up'}.{level if is_down else levels - 1 - int(level)}"
        if kind == "resnets":
            return f"{at}.block.{block}.{rest.replace('conv_shortcut', 'nin_shortcut')}"
        return f"{at}.{'downsample' if is_down else 'upsample'}.{rest}"
    if match := _MIDDLE.fullmatch(name):
        side, part, inner, own = match.groups()
        return f"{side}.mid.{_MID[part]}.{_ATTENTION.get(inner, inner)}.{own}"
    return name.replace("conv_norm_out", "norm_out")


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape in the checkpoint, where the products of attention are convolutions."""
    return (*shape, 1, 1) if ".mid.attn_1." in name and len(shape) == 2 else shape


class PictureCodec:
    """Pictures to scaled latents and back."""

    def __init__(self, vae: Any, *, in_tiles: bool) -> None:
        """`in_tiles`: large pictures are decoded tile by tile, in bounded memory."""
        self.vae = vae
        vae.use_tiling = in_tiles

    @torch.no_grad()
    def encode(self, levels_CHW: Tensor, noise_CYX: Tensor) -> Tensor:
        """A draw of the posterior, [C, Y, X]. The log-variance is not clamped, as published."""
        weight = self.vae.encoder.conv_in.weight
        moments = self.vae.encoder(levels_CHW[None].to(weight.device, weight.dtype))[0]
        mean_CYX, logvar_CYX = moments.chunk(2)
        drawn_CYX = mean_CYX + (0.5 * logvar_CYX).exp() * noise_CYX.to(mean_CYX)
        return (drawn_CYX - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents_CYX: Tensor) -> Tensor:
        """Pixels [C, H, W], -1 to 1."""
        weight = self.vae.decoder.conv_in.weight
        wide = latents_CYX[None].to(weight.device, weight.dtype)
        wide = wide / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return self.vae.decode(wide, return_dict=False)[0][0]
