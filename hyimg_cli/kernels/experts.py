"""Experts in plain torch, one after the other, in any format of their weights: what a CPU runs for
quantised ones, and the twin of every kernel.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R row
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.formats import Stack, dequantize_rows, one, quantize_rows
from hyimg_cli.kernels.ops import add_onto
from hyimg_cli.kernels.rows import group_multiple, padding


def plain_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Stack,
    down: Stack,
    *,
    onto_TM: Tensor | None = None,
    enter: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M]: each once, made dense, over
    its own tokens. `enter` is applied to the rows that enter a product.

    Keeps a row's bits apart from its company. Reads the chosen experts' numbers on the host.
    """
    chosen, flat_R = index_TK.shape[1], index_TK.flatten()
    multiple = group_multiple(x_TM.device)
    result_RM = x_TM.new_empty(flat_R.shape[0], x_TM.shape[1])
    for expert in flat_R.unique().tolist():
        row = (flat_R == expert).nonzero()[:, 0]
        x_RM = F.pad(x_TM[row // chosen], (0, 0, 0, padding(len(row), multiple)))
        gate_and_up_OM, down_MI = (one(s, expert, x_TM.dtype) for s in (gate_and_up, down))
        up, gate = F.linear(enter(x_RM), gate_and_up_OM).chunk(2, dim=-1)
        result_RM[row] = F.linear(enter(up * F.silu(gate)), down_MI)[: len(row)]
    weighted_TKM = result_RM.view(*index_TK.shape, -1) * weight_TK[..., None]
    return add_onto(onto_TM, weighted_TKM.sum(dim=1))


def _rounded(rows: Tensor) -> Tensor:
    return dequantize_rows(*quantize_rows(rows), rows.dtype)


# The plain twin of a product in FP8: the rows that enter one are rounded to e4m3 as well.
plain_scaled_experts = partial(plain_experts, enter=_rounded)
