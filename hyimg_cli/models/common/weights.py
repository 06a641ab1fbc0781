"""Fill a network without values from safetensors files with exactly its tensors."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.kernels.formats import QuantizedLinear
from hyimg_cli.loading.checkpoint import tensor_index, weight_files
from hyimg_cli.loading.readers import StoredTensor, read_all


def tensor_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the network's checkpoint."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def fill(
    network: nn.Module,
    folder: Path,
    stem: str,
    names: Mapping[str, str],
    *,
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
) -> None:
    """Load every tensor of the files into the network, ready for inference.

    Raises CheckpointError. `names`: the network's own names by stored ones.
    """
    missing = dict(names)

    def put(stored: StoredTensor) -> None:
        name = missing.pop(stored.name)
        module, own = owner_of(network, name)
        if isinstance(module, QuantizedLinear) and own == "weight":
            for first, rows in stored.rows(device):
                module.held.put(0, rows, first=first)
        else:
            room = torch.empty(stored.info.shape, dtype=dtype_of(name), device=device)
            stored.into(room)
            set_weight(module, own, room.view(getattr(module, own).shape))

    read_all(weight_files(folder, stem), tensor_index(folder, stem), put)
    refuse_missing(missing)
    network.eval()


def owner_of(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a tensor, and the tensor's name there."""
    path, _, own = name.rpartition(".")
    return network.get_submodule(path), own


def set_weight(module: nn.Module, name: str, values: Tensor) -> None:
    setattr(module, name, nn.Parameter(values, requires_grad=False))


def refuse_missing(names: Collection[str]) -> None:
    """Raise CheckpointError for tensors of a network that were left without values."""
    if names:
        what = f"weights are missing: {', '.join(sorted(names)[:5])}"
        raise CheckpointError(what, code="checkpoint.not-strict")
