"""Experts in plain torch, one after the other, in any format of their weights: what a CPU runs for
quantised ones, and the twin of every kernel.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R row
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.formats import Stack, dequantize_rows, one, quantize_rows
from hyimg_cli.kernels.rows import group_multiple, padding
from hyimg_cli.kernels.rowwise import on


def plain_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Stack,
    down: Stack,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M]: each once, made dense, over
    its own tokens.

    Keeps a row's bits apart from its company. Reads the chosen experts' numbers on the host.
    """
    stacks = gate_and_up, down
    return on(onto_TM, _one_by_one(x_TM, weight_TK, index_TK, stacks, lambda rows: rows))


def plain_scaled_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Stack,
    down: Stack,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """The plain twin of a product in FP8: the rows that enter one are rounded to e4m3 as well."""
    return on(onto_TM, _one_by_one(x_TM, weight_TK, index_TK, (gate_and_up, down), _rounded))


def _one_by_one(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    stacks: tuple[Stack, Stack],
    entering: Callable[[Tensor], Tensor],
) -> Tensor:
    chosen, flat_R = index_TK.shape[1], index_TK.flatten()
    multiple = group_multiple(x_TM.device)
    result_RM = x_TM.new_empty(flat_R.shape[0], x_TM.shape[1])
    for expert in flat_R.unique().tolist():
        row = (flat_R == expert).nonzero()[:, 0]
        x_RM = F.pad(x_TM[row // chosen], (0, 0, 0, padding(len(row), multiple)))
        gate_and_up_OM, down_MI = (one(stack, expert, x_TM.dtype) for stack in stacks)
        up, gate = F.linear(entering(x_RM), gate_and_up_OM).chunk(2, dim=-1)
        result_RM[row] = F.linear(entering(up * F.silu(gate)), down_MI)[: len(row)]
    weighted_TKM = result_RM.view(*index_TK.shape, -1) * weight_TK[..., None]
    mixed_TM: Tensor = weighted_TKM.sum(dim=1)
    return mixed_TM


def _rounded(rows: Tensor) -> Tensor:
    return dequantize_rows(*quantize_rows(rows), rows.dtype)
