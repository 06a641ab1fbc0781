"""Attention over keys of a length that was never seen, and of one that was.

cuDNN makes a plan for each new length, which takes longer than many attentions; the next call has
it. So the first call of each of two lengths is reported separately, and one row has another length
each call. With TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 one plan should do for keys stored slot by slot.
"""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from workload import Workload

from hyimg_cli.kernels.attention import attention_of
from shapes.cases import Case
from shapes.timing import Call, profiled

if TYPE_CHECKING:
    from shapes.rows import Bench

_HOPPER = (9, 0)
_ATTENTION = re.compile("cudnn|flash|fmha|attention|attn|sdpa", re.IGNORECASE)
# More lengths than are needed: two, and one for each call of a row.
_LENGTHS = 64
_WHICH = ("first length", "second length", "new lengths")
# Layout of keys in memory: head by head, as now, or slot by slot.
_ORDERS = ("", ", slot by slot")


def names(load: Workload) -> tuple[str, ...]:
    """Return the names: with many rows a picture's, with one row a written token's."""
    many, one = (f"attention, {n} row{'s' * (n > 1)}" for n in (load.live, 1))
    rows = (*(f"{many}{order}" for order in _ORDERS), one)
    return tuple(f"{name}, {which}" for name in rows for which in _WHICH)


def attention_cases(bench: "Bench") -> Iterator[Case]:
    """Measure lengths that no other row has."""
    arch, named = bench.network.arch, iter(names(bench.load))
    slots = bench.load.layout.live_stop + _LENGTHS
    shape = (2, arch.num_key_value_heads, slots, arch.head_dim)
    by_head = torch.randn(shape, device=bench.device, dtype=bench.dtype)
    by_slot = by_head.transpose(1, 2).contiguous().transpose(1, 2)
    for rows, (keys, values) in (
        (bench.load.live, by_head),
        (bench.load.live, by_slot),
        (1, by_head),
    ):
        lengths = itertools.count(bench.load.layout.live_stop + 1)
        size = rows, arch.num_attention_heads, arch.head_dim
        q_THD = torch.randn(size, device=bench.device, dtype=bench.dtype)

        def call(
            stop: int | None,
            given: tuple[Tensor, Tensor, Tensor] = (q_THD, keys, values),
            lengths: Iterator[int] = lengths,
        ) -> Tensor:
            q_THD, keys, values = given
            stop = next(lengths) if stop is None else stop
            with torch.no_grad():
                return attention_of(bench.device)(q_THD, keys[:, :stop], values[:, :stop], False)

        for stop in (next(lengths), next(lengths)):
            seen = partial(call, stop)
            kernel = partial(attention_kernel, seen, bench.device) if rows > 1 else None
            note = f"{stop} keys"
            yield Case(next(named), seen, note=note, shows_first=True, kernel=kernel)
        yield Case(next(named), partial(call, None))


def attention_kernel(call: Call, device: torch.device) -> tuple[str, str]:
    """Return a call's longest attention kernel, and a fault if it is not cuDNN's.

    cuDNN's kernel is the fastest on a Hopper, for many rows without a bias.
    """
    if device.type != "cuda":
        return "", ""
    names = (name for name, *_ in profiled(call, device))
    name = next((name for name in names if _ATTENTION.search(name)), "")
    if not name:
        return "its kernel was not seen", ""
    if torch.cuda.get_device_capability(device) == _HOPPER and "cudnn" not in name.lower():
        return name, f"the attention is not cuDNN's kernel, but {name[:60]}"
    return name, ""
