"""Loading a checkpoint in the released layout: every key, no other, safetensors only.

Names and shapes are checked from the files' headers before a byte of weight is read; then each
tensor is put into a network without weights. The VAE stays float32.
"""

from pathlib import Path
from typing import Any

import torch

from hyimg_cli.kernels.experts import require_bitsandbytes
from hyimg_cli.kernels.formats import quantize_linear
from hyimg_cli.loading.checkpoint import tensor_index
from hyimg_cli.models.bagel.config import VAE_WEIGHTS, WEIGHTS, BagelShape, read_architecture
from hyimg_cli.models.bagel.network import BagelNetwork
from hyimg_cli.models.bagel.vae import autoencoder, stored_name, stored_shape
from hyimg_cli.models.common.weights import check_tensors, fill, tensor_shapes
from hyimg_cli.settings.run import Quantization


def load(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
) -> tuple[BagelNetwork, Any]:
    """The network in `dtype` and the autoencoder, ready for inference. `quantization` holds the
    matrices of the decoder's layers in fewer bits. Raises CheckpointError, and MachineError where a
    package is missing.
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
    network.choose_kernels()
    return network, vae


def checked(folder: Path) -> tuple[BagelNetwork, Any]:
    """The network and the autoencoder of `folder` without values, whose files hold every tensor of
    them and no other.

    Raises CheckpointError, for the VAE with its file in `where`.
    """
    network, vae = without_weights(read_architecture(folder))
    shapes = tensor_shapes(vae)
    of_vae = {stored: stored_shape(stored, shapes[own]) for stored, own in _vae_names(vae).items()}
    for stem, expected in ((WEIGHTS, tensor_shapes(network)), (VAE_WEIGHTS, of_vae)):
        where = f"{folder.name}/{stem}.safetensors"
        check_tensors(tensor_index(folder, stem), expected, where)
    return network, vae


def without_weights(arch: BagelShape) -> tuple[BagelNetwork, Any]:
    """Both networks on the meta device."""
    with torch.device("meta"):
        return BagelNetwork(arch), autoencoder(arch.vae)


def _vae_names(vae: Any) -> dict[str, str]:
    """diffusers' names by those of the checkpoint."""
    levels = len(vae.decoder.up_blocks)
    return {stored_name(name, levels): name for name in vae.state_dict()}
