"""A network without weights, and its checkpoint's tensors put into it one at a time.

Of each tensor as it is read no more is kept than the network has room for: an expert's matrix in
fewer bits, or a rank's share of a layer. Nothing is ever held as it was stored.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.kernels.formats import Format
from hyimg_cli.loading.stream import stored_tensors
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM, transformers_config
from hyimg_cli.models.hunyuan_image3.moe import Held, Moe
from hyimg_cli.models.hunyuan_image3.placement import stays_wide
from hyimg_cli.parallel.tensor import WeightCut

_EXPERT = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)"
    r"\.(?P<matrix>gate_and_up_proj|down_proj)\.weight"
)
PlaceOf = Callable[[str], torch.device]
CutOf = Callable[[str], WeightCut | None]


def without_weights(arch: Architecture, form: Format | None = None) -> HunyuanImage3ForCausalMM:
    """The network on the meta device; with a `form`, its experts already as stacks of it."""
    with torch.device("meta"):
        network = HunyuanImage3ForCausalMM(transformers_config(arch))
    if form is not None:
        hold(network, form)
    return network


def hold(network: HunyuanImage3ForCausalMM, form: Format) -> None:
    """Give up every expert's matrices for stacks of `form` and of the same shapes."""
    with torch.device("meta"):
        for layer in network.model.layers:
            layer.mlp.hold(form)


def fill(
    network: HunyuanImage3ForCausalMM,
    folder: Path,
    *,
    dtype: torch.dtype,
    place_of: PlaceOf,
    cut_of: CutOf = lambda name: None,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Every tensor of the checkpoint that is wanted to its place, cut to what its rank has.

    Raises CheckpointError where a tensor of the network is left without values.
    """
    for number, layer in enumerate(network.model.layers):
        place = place_of(f"model.layers.{number}.mlp.experts")
        if _is_quantised(layer.mlp):
            layer.mlp.make_room(place)
        else:
            layer.mlp.lay_out(dtype, place)
    missing = {name for name in network.state_dict() if is_wanted(name)}
    with torch.no_grad():
        for name, stored in stored_tensors(folder):
            if is_wanted(name):
                missing.discard(name)
                _fill_one(network, name, stored, dtype, place_of(name), cut_of(name))
    if missing:
        what = f"loading left missing keys: {', '.join(sorted(missing)[:5])}"
        raise CheckpointError(what, code="checkpoint.not-strict")


def _fill_one(
    network: HunyuanImage3ForCausalMM,
    name: str,
    stored: Tensor,
    dtype: torch.dtype,
    place: torch.device,
    cut: WeightCut | None,
) -> None:
    expert = _EXPERT.fullmatch(name)
    moe = None if expert is None else network.model.layers[int(expert["layer"])].mlp
    if expert is not None and moe is not None and _is_quantised(moe):
        is_by_columns = cut is not None and cut.dim == 1
        kept = stored if cut is None or is_by_columns else cut.of(stored)
        columns = cut.index if cut is not None and is_by_columns else None
        moe.put(int(expert["expert"]), expert["matrix"], kept, columns)
        return
    wanted = torch.float32 if stays_wide(network, name) else dtype
    kept = stored if cut is None else cut.of(stored)
    # What is not cut is a view of its file.
    _put(network, name, kept.to(place, wanted, copy=cut is None))


def _is_quantised(moe: Moe) -> bool:
    return isinstance(moe.experts[0], Held)


def _put(network: nn.Module, name: str, tensor: Tensor) -> None:
    """Into the room that there is; a tensor without any is its own."""
    path, _, own = name.rpartition(".")
    module = network.get_submodule(path)
    room: Tensor = getattr(module, own)
    if room.is_meta:
        setattr(module, own, nn.Parameter(tensor, requires_grad=False))
    else:
        room.copy_(tensor)
