"""Loading a checkpoint in the released layout: every key, no other, safetensors only.

Names and shapes are checked from the files' headers before a byte of weight is read; then each
tensor is put into a network without weights. The VAE stays float32.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.kernels.choice import require_bitsandbytes
from hyimg_cli.kernels.quantized import QuantizedLinear, hold
from hyimg_cli.loading.checkpoint import (
    TensorInfo,
    check_against,
    check_floating,
    tensor_index,
    weight_files,
)
from hyimg_cli.loading.packed import Stored
from hyimg_cli.loading.readers import StoredTensor, read_all
from hyimg_cli.models.bagel.config import VAE_WEIGHTS, WEIGHTS, BagelShape, read_architecture
from hyimg_cli.models.bagel.network import BagelNetwork
from hyimg_cli.models.bagel.vae import autoencoder, stored_name, stored_shape
from hyimg_cli.settings.run import Quantization

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


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
    arch = checked(folder)
    if quantization == "nf4" and device.type == "cuda":
        require_bitsandbytes()
    network, vae = without_weights(arch)
    names = _vae_names(vae, arch)
    own = {name: name for name in network.state_dict()}
    if quantization != "none":
        for layer in network.decoder.layers:
            hold(layer, quantization, device)
    fill(network, folder, WEIGHTS, dtype, device, own)
    fill(vae, folder, VAE_WEIGHTS, torch.float32, device, names)
    network.choose_kernels()
    return network, vae


def checked(folder: Path) -> BagelShape:
    """The architecture of `folder`, whose files hold every tensor of it and no other.

    Raises CheckpointError, for the VAE with its file in `where`.
    """
    arch = read_architecture(folder)
    for stem, expected in zip((WEIGHTS, VAE_WEIGHTS), _expected(arch), strict=True):
        _check(folder, stem, tensor_index(folder, stem), expected)
    return arch


@lru_cache(maxsize=4)
def _expected(arch: BagelShape) -> tuple[Shapes, Shapes]:
    """Shapes of every stored tensor, of the network and of the autoencoder."""
    network, vae = without_weights(arch)
    values = vae.state_dict()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    return shapes, {
        stored: stored_shape(stored, tuple(values[name].shape))
        for stored, name in _vae_names(vae, arch).items()
    }


def _check(
    folder: Path,
    stem: str,
    found: Mapping[str, TensorInfo],
    expected: Shapes,
) -> None:
    try:
        check_against(found, expected)
        check_floating(found)
    except CheckpointError as error:
        raise CheckpointError(
            error.what,
            where=f"{folder.name}/{stem}.safetensors",
            hint=error.hint,
            code=error.code,
        ) from None


def without_weights(arch: BagelShape) -> tuple[BagelNetwork, Any]:
    """Both networks on the meta device."""
    with torch.device("meta"):
        return BagelNetwork(arch), autoencoder(arch.vae)


def fill(
    network: nn.Module,
    folder: Path,
    stem: str,
    dtype: torch.dtype,
    device: torch.device,
    names: Mapping[str, str],
) -> None:
    """Every tensor of the files into the network; `names`: its own, by those that are stored."""
    missing = dict(names)

    def put(stored: StoredTensor) -> None:
        path, _, own = missing.pop(stored.name).rpartition(".")
        module = network.get_submodule(path)
        if isinstance(module, QuantizedLinear) and own == "weight":
            for first, rows in stored.rows(device):
                module.put(rows, first)
            return
        kept = stored.on(device, dtype).view(getattr(module, own).shape)
        setattr(module, own, nn.Parameter(kept, requires_grad=False))

    read_all(weight_files(folder, stem), Stored(tensor_index(folder, stem), {}), put)
    if missing:
        what = f"loading left missing keys: {', '.join(sorted(missing)[:5])}"
        raise CheckpointError(what, code="checkpoint.not-strict")
    network.eval()


def _vae_names(vae: Any, arch: BagelShape) -> dict[str, str]:
    """diffusers' names by those of the checkpoint."""
    levels = len(arch.vae.ch_mult)
    return {stored_name(name, levels): name for name in vae.state_dict()}
