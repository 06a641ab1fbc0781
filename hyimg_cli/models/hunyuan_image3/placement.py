"""Which device each module of the network goes to, before any weight is there."""

from collections.abc import Mapping

import torch
from torch import nn

from hyimg_cli.errors import MachineError

Places = Mapping[str, int | str | torch.device]
# Modules that are on one device as a whole.
_WHOLE = ["DecoderLayer", "ResBlock", "VisionTower", "Vae"]
# The router decides in float32 whatever the rest is; the VAE loses detail below it.
_WIDE = {"wg", "vae"}


def balanced(
    network: nn.Module, dtype: torch.dtype, shares: dict[int | str, int] | None = None
) -> Places:
    """Which module goes to which GPU, in even parts of what is free, or by `shares` in bytes.

    A module that fits nowhere goes to "cpu" or "disk": see `refuse_outside`.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    wide = {name: torch.float32 for name in network.state_dict() if stays_wide(name)}
    known = {"no_split_module_classes": _WHOLE, "dtype": dtype, "special_dtypes": wide}
    shares = shares or get_balanced_memory(network, **known)
    # Nothing is offloaded in the end; this only keeps a warning about it away.
    return infer_auto_device_map(network, max_memory=shares, offload_buffers=True, **known)


def stays_wide(name: str) -> bool:
    """True if a tensor is float32 in any network."""
    return not _WIDE.isdisjoint(name.split("."))


def place_of(name: str, places: Places) -> torch.device:
    """The device of a tensor: that of the longest module path in `places` that it lies under."""
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        module = ".".join(parts[:length])
        if module in places:
            place = places[module]
            return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    raise AssertionError(f"{name} has no place")


def refuse_outside(places: Places) -> None:
    """Raises MachineError for a layer outside the GPUs: it would be fetched anew each time."""
    outside = [name for name, place in places.items() if place in ("cpu", "disk")]
    if outside:
        raise MachineError(
            f"the weights do not fit on the GPUs: {len(outside)} modules were left outside",
            hint="--quantization fp8 halves the weights, nf4 once more; or use more GPUs or larger "
            "ones; `hyimg plan` says how much the weights take",
            code="machine.gpu-memory",
        )
