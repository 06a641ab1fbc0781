"""Loading with the experts in 8 or 4 bits: each is quantised as it is read, none is held as stored.

The experts are 93 % of the weights. Everything else keeps the dtype that it has without
quantization: attention, embeddings, the shared expert; router and VAE in float32.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import dispatch_model
from torch import Tensor, nn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.kernels.choice import require_bitsandbytes
from hyimg_cli.kernels.formats import Format
from hyimg_cli.loading.stream import stored_tensors
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM, transformers_config
from hyimg_cli.models.hunyuan_image3.placement import (
    Places,
    balanced,
    place_of,
    refuse_outside,
    stays_wide,
)

_EXPERT = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)"
    r"\.(?P<matrix>gate_and_up_proj|down_proj)\.weight"
)
PlaceOf = Callable[[str], torch.device]


def load_quantized(
    folder: Path, arch: Architecture, *, dtype: torch.dtype, device_map: str | None, form: Format
) -> HunyuanImage3ForCausalMM:
    """The network of `folder`, whose tensors were checked by name and shape, experts in `form`.

    `device_map` as in `weights.load`. Raises CheckpointError for an unreadable file, MachineError
    where a package is missing.
    """
    if form == "nf4" and device_map is not None:
        require_bitsandbytes()
    network = without_weights(arch, form)
    places = _places(network, device_map, dtype)
    fill(network, folder, dtype=dtype, place_of=lambda name: place_of(name, places))
    if len(set(places.values())) > 1:
        dispatch_model(network, dict(places))
    return network


def without_weights(arch: Architecture, form: Format) -> HunyuanImage3ForCausalMM:
    """The network on the meta device, its experts already as stacks of `form`."""
    with torch.device("meta"):
        network = HunyuanImage3ForCausalMM(transformers_config(arch))
        for layer in network.model.layers:
            layer.mlp.hold(form)
    return network


def fill(
    network: HunyuanImage3ForCausalMM, folder: Path, *, dtype: torch.dtype, place_of: PlaceOf
) -> None:
    """Every tensor of the checkpoint to its place, one at a time."""
    for number, layer in enumerate(network.model.layers):
        layer.mlp.make_room(place_of(f"model.layers.{number}.mlp.experts"))
    with torch.no_grad():
        for name, stored in stored_tensors(folder):
            expert = _EXPERT.fullmatch(name)
            if expert is None:
                wanted = torch.float32 if stays_wide(network, name) else dtype
                _put(network, name, stored.to(place_of(name), wanted, copy=True))
            else:
                moe = network.model.layers[int(expert["layer"])].mlp
                moe.put(int(expert["expert"]), expert["matrix"], stored)
    left = [name for name, tensor in network.state_dict().items() if tensor.is_meta]
    if left:
        what = f"loading left missing keys: {', '.join(left[:5])}"
        raise CheckpointError(what, code="checkpoint.not-strict")


def _places(
    network: HunyuanImage3ForCausalMM, device_map: str | None, dtype: torch.dtype
) -> Places:
    if device_map != "balanced":
        return {"": device_map or "cpu"}
    places = balanced(network, dtype)
    refuse_outside(places)
    return places


def _put(network: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, own = name.rpartition(".")
    module = network.get_submodule(path)
    setattr(module, own, nn.Parameter(tensor, requires_grad=False))
