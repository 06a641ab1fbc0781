"""Loading with the experts in 8 or 4 bits: each is quantised as it is read, none is held as stored.

The experts are 93 % of the weights. Everything else keeps the dtype that it has without
quantization: attention, embeddings, the shared expert; router and VAE in float32.
"""

from pathlib import Path

import torch

from hyimg_cli.kernels.choice import require_bitsandbytes
from hyimg_cli.kernels.formats import Format
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.placement import (
    Places,
    balanced,
    place_of,
    refuse_outside,
)
from hyimg_cli.models.hunyuan_image3.weight_loading import fill, without_weights


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
        from accelerate import dispatch_model

        dispatch_model(network, dict(places))
    return network


def _places(
    network: HunyuanImage3ForCausalMM, device_map: str | None, dtype: torch.dtype
) -> Places:
    if device_map != "balanced":
        return {"": device_map or "cpu"}
    places = balanced(network, dtype)
    refuse_outside(places)
    return places
