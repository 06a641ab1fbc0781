"""The VAE's rows: a picture decoded and encoded in every dtype and layout that could be faster.

float32          as it runs today; on a GPU its convolutions are TF32, torch's own default
fp16 autocast    as the official code decodes
bfloat16         weights and all
channels last    weights, and what enters each block, in that order; today's is channels first

Also single convolutions of the widest level.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hyimg_cli.models.hunyuan_image3.vae import ResnetBlock, TiledPicture, Vae
from shapes.cases import Case

if TYPE_CHECKING:
    from shapes.rows import Bench

_LAST = torch.channels_last_3d
_AUTOCAST = "fp16 autocast"
_DTYPES = ("float32", _AUTOCAST, "bfloat16")
_LAYOUTS = ("", ", channels last")
_SIDES = ("decode", "encode")
_TILED = "VAE decode, float32, tiled"
NAMES = (
    *(f"VAE {side}, {kind}{on}" for on, kind, side in product(_LAYOUTS, _DTYPES, _SIDES)),
    _TILED,
)
_CONVOLVED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# By torch's default, cuDNN's rule chooses an algorithm; otherwise all are tried, at the first call.
_SEARCHES = {"": False, ", searched": True}
CONVOLUTIONS = tuple(
    f"convolution, {kind}{on}{how}" for on, kind, how in product(_LAYOUTS, _CONVOLVED, _SEARCHES)
)


def vae_cases(bench: "Bench") -> Iterator[Case]:
    """Decode and encode a picture of the workload's size, untiled, then tiled."""
    given = _given(bench)
    flops = {side: _flops(_call(bench.network.vae, side, given[side])) for side in _SIDES}
    for on, kind in product(_LAYOUTS, _DTYPES):
        vae = _as(bench.network.vae, kind, is_last=bool(on))
        for side in _SIDES:
            call = _call(vae, side, given[side], has_autocast=kind == _AUTOCAST)
            note = f"{flops[side] / 1e12:.1f} TFLOP; {_planned(bench, in_tiles=False)}"
            yield Case(f"VAE {side}, {kind}{on}", call, flops=flops[side], note=note)
    tiled = TiledPicture(bench.network.vae)
    call = _call(tiled, "decode", given["decode"])
    yield Case(_TILED, call, note=_planned(bench, in_tiles=True))


def convolution_cases(bench: "Bench") -> Iterator[Case]:
    """Run one 3x3x3 convolution of the widest level, on a quarter of its rows."""
    size, vae = bench.load.scale.size, bench.load.arch.vae
    width, frames = vae.block_out_channels[0], max(2, vae.ffactor_temporal)
    for (on, kind), (how, searches) in product(product(_LAYOUTS, _CONVOLVED), _SEARCHES.items()):
        # Eight rows more: for a shape that has run, torch keeps the algorithm, searched or not.
        shape = (1, width, frames, size.height // 4 + 8 * searches, size.width)
        x_BCTYX, weight = (
            torch.randn(sizes, device=bench.device, dtype=_CONVOLVED[kind]).contiguous(
                memory_format=_LAST if on else torch.contiguous_format
            )
            for sizes in (shape, (width, width, 3, 3, 3))
        )
        call = partial(_convolved, x_BCTYX, weight, searches=searches)
        note = f"{width} channels, {frames} frames, {shape[3]} x {shape[4]}"
        yield Case(f"convolution, {kind}{on}{how}", call, flops=_flops(call), note=note)


def _convolved(x_BCTYX: Tensor, weight: Tensor, *, searches: bool) -> Tensor:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = searches
    try:
        with torch.no_grad():
            return functional.conv3d(x_BCTYX, weight, padding=1)
    finally:
        torch.backends.cudnn.benchmark = before


def _given(bench: "Bench") -> dict[str, Tensor]:
    size = bench.load.scale.size
    pixels_BCYX = torch.rand(1, 3, size.height, size.width, device=bench.device) * 2 - 1
    return {"decode": bench.latents()[None], "encode": pixels_BCYX}


def _call(
    vae: Vae | TiledPicture, side: str, given: Tensor, *, has_autocast: bool = False
) -> Callable[[], object]:
    weight = (vae.vae if isinstance(vae, TiledPicture) else vae).decoder.conv_in.weight
    x_BCYX = given.to(weight.dtype)

    def call() -> object:
        half = torch.autocast(weight.device.type, torch.float16, enabled=has_autocast)
        with torch.no_grad(), half:
            return vae.decode(x_BCYX) if side == "decode" else vae.encode_moments(x_BCYX)

    return call


def _as(vae: Vae, kind: str, *, is_last: bool) -> Vae:
    """Return the VAE itself if nothing changes, else another one with its weights."""
    if kind != "bfloat16" and not is_last:
        return vae
    with torch.device("meta"):
        own = Vae(vae.architecture)
    weights = {name: _laid(w, kind, is_last=is_last) for name, w in vae.state_dict().items()}
    own.load_state_dict(weights, assign=True)
    for part in own.modules() if is_last else ():
        if isinstance(part, ResnetBlock):
            part.register_forward_pre_hook(_lay_last)
    return own


def _laid(weight: Tensor, kind: str, *, is_last: bool) -> Tensor:
    layout = _LAST if is_last and weight.dim() == 5 else torch.contiguous_format
    dtype = torch.bfloat16 if kind == "bfloat16" else weight.dtype
    return weight.to(dtype).contiguous(memory_format=layout)


def _lay_last(_block: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0].contiguous(memory_format=_LAST),)


def _flops(call: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


def _planned(bench: "Bench", *, in_tiles: bool) -> str:
    card, size = bench.load.prompter.card, bench.load.scale.size
    held = card.vae_bytes(size.height * size.width, bench.device.type, in_tiles=in_tiles)
    return f"the plan says {held / 1e9:.2f} GB of activations"
