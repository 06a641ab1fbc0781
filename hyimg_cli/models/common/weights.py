"""A network without values, filled from safetensors files that hold every tensor of it and no
other.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.kernels.formats import QuantizedLinear
from hyimg_cli.loading.checkpoint import (
    TensorInfo,
    check_against,
    check_floating,
    tensor_index,
    weight_files,
)
from hyimg_cli.loading.readers import StoredTensor, read_all


def tensor_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of the network holds."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def check_tensors(
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    where: Path | str,
    part: str = "",
) -> None:
    """Passes files whose headers have these tensors, as floats, and no other. Raises
    CheckpointError with `where`.
    """
    try:
        check_against(found, expected)
        check_floating(found)
    except CheckpointError as error:
        what = f"{part}: {error.what}" if part else error.what
        raise CheckpointError(what, where=where, hint=error.hint, code=error.code) from None


def fill(
    network: nn.Module,
    folder: Path,
    stem: str,
    names: Mapping[str, str],
    *,
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
) -> None:
    """Every tensor of the files into the network, ready for inference; `names`: its own, by those
    that are stored. Raises CheckpointError.
    """
    missing = dict(names)

    def put(stored: StoredTensor) -> None:
        name = missing.pop(stored.name)
        module, own = owner_of(network, name)
        if isinstance(module, QuantizedLinear) and own == "weight":
            for first, rows in stored.rows(device):
                module.put(rows, first)
        else:
            kept = stored.on(device, dtype_of(name)).view(getattr(module, own).shape)
            set_weight(module, own, kept)

    read_all(weight_files(folder, stem), tensor_index(folder, stem), put)
    refuse_missing(missing)
    network.eval()


def owner_of(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a tensor, and the tensor's name there."""
    path, _, own = name.rpartition(".")
    return network.get_submodule(path), own


def set_weight(module: nn.Module, name: str, values: Tensor) -> None:
    setattr(module, name, nn.Parameter(values, requires_grad=False))


def refuse_missing(names: Collection[str]) -> None:
    """Raises CheckpointError for tensors of a network that were left without values."""
    if names:
        what = f"loading left missing keys: {', '.join(sorted(names)[:5])}"
        raise CheckpointError(what, code="checkpoint.not-strict")
