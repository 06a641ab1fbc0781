"""Load a checkpoint in the released layout: every key and no other, safetensors only.

Names and shapes are checked from the files' headers before a byte of weight is read. Then each
tensor is put into a network without weights. The VAE is diffusers' own, with weights under the
names of the checkpoint's layout; it stays float32.
"""

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL

from hyimg_cli.kernels.choice import require_bitsandbytes
from hyimg_cli.kernels.formats import quantize_linear
from hyimg_cli.loading.checkpoint import check_tensors, tensor_index
from hyimg_cli.loading.unfilled import refuse_unfilled
from hyimg_cli.models.bagel.config import (
    TILE_PIXELS,
    VAE_WEIGHTS,
    WEIGHTS,
    AutoencoderShape,
    BagelShape,
    read_architecture,
)
from hyimg_cli.models.bagel.network import BagelNetwork
from hyimg_cli.models.common.weights import fill, tensor_shapes
from hyimg_cli.settings.run import Quantization

_MID = {"resnets.0": "block_1", "resnets.1": "block_2", "attentions.0": "attn_1"}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_LEVEL = re.compile(r"(\w+)\.(down|up)_blocks\.(\d+)\.(resnets|\w+samplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"(\w+)\.mid_block\.(\w+\.\d)\.(.+)\.(\w+)")


def load(
    folder: Path, *, dtype: torch.dtype, device: torch.device, quantization: Quantization = "none"
) -> tuple[BagelNetwork, Any]:
    """Return the network in `dtype` and the autoencoder, ready for inference.

    `quantization` stores decoder matrices in fewer bits. Raises CheckpointError, or MachineError if
    a package is missing.
    """
    network, vae = checked(folder)
    if quantization == "nf4" and device.type == "cuda":
        require_bitsandbytes()
    names = _vae_names(vae)
    own = {name: name for name in network.state_dict()}
    if quantization != "none":
        for layer in network.decoder.layers:
            quantize_linear(layer, quantization, device)
    fill(network, folder, WEIGHTS, own, dtype_of=lambda name: dtype, device=device)
    fill(vae, folder, VAE_WEIGHTS, names, dtype_of=lambda name: torch.float32, device=device)
    network.decoder.choose_kernels()
    return network, vae


def checked(folder: Path) -> tuple[BagelNetwork, Any]:
    """Return network and autoencoder of `folder` without values, after checking the files.

    Raises CheckpointError unless they have exactly the expected tensors; for the VAE with its file
    in `where`.
    """
    network, vae = without_weights(read_architecture(folder))
    shapes = tensor_shapes(vae)
    of_vae = {stored: stored_shape(stored, shapes[own]) for stored, own in _vae_names(vae).items()}
    for stem, expected in ((WEIGHTS, tensor_shapes(network)), (VAE_WEIGHTS, of_vae)):
        where = f"{folder.name}/{stem}.safetensors"
        found = tensor_index(folder, stem)
        check_tensors(found, expected, where)
        refuse_unfilled(folder, found)
    return network, vae


def without_weights(arch: BagelShape) -> tuple[BagelNetwork, Any]:
    """Return both networks on the meta device."""
    with torch.device("meta"):
        return BagelNetwork(arch), autoencoder(arch.vae)


def _vae_names(vae: Any) -> dict[str, str]:
    """Return diffusers' names by the checkpoint's names."""
    levels = len(vae.decoder.up_blocks)
    return {stored_name(name, levels): name for name in vae.state_dict()}


def autoencoder(arch: AutoencoderShape) -> Any:
    """Return the autoencoder without values."""
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
        # Of a tile, if latents are decoded in tiles.
        sample_size=TILE_PIXELS,
    )


def stored_name(name: str, levels: int) -> str:
    """Return the stored name of diffusers' tensor `name`; levels count from the finest."""
    if match := _LEVEL.fullmatch(name):
        side, way, level, kind, block, rest = match.groups()
        at = f"{side}.{way}.{level if way == 'down' else levels - 1 - int(level)}"
        if kind == "resnets":
            return f"{at}.block.{block}.{rest.replace('conv_shortcut', 'nin_shortcut')}"
        return f"{at}.{way}sample.{rest}"
    if match := _MIDDLE.fullmatch(name):
        side, part, inner, own = match.groups()
        return f"{side}.mid.{_MID[part]}.{_ATTENTION.get(inner, inner)}.{own}"
    return name.replace("conv_norm_out", "norm_out")


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape in the checkpoint, where attention products are convolutions."""
    return (*shape, 1, 1) if ".mid.attn_1." in name and len(shape) == 2 else shape
