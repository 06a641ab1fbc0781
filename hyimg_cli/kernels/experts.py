"""Every expert's rows in one grouped product, without reading a count back from the device.

    rows of x, sorted by expert      e0 e0 e0 .  e1 .. .. .  e2 e2 e2 e2  e3 ...
    padded to whole groups           |-- 4 --|  |-- 4 --|   |---- 4 ----| ...

A group starts at a multiple of `group_multiple`, so that how a row is multiplied does not depend on
how many others chose its expert: the same bits in every batch (measured on CPU, see `rows.py`).
The plain twins below take one expert after the other, in any format of its weights.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R row
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.formats import Stack, dequantize_rows, one, quantize_rows
from hyimg_cli.kernels.rows import group_multiple, padding


def grouped_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up_EIM: Tensor,
    down_EMI: Tensor,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M]: `down(up * silu(gate))` each.

    `onto`: what the sum is added to, once it is rounded. `gate_and_up` holds `up` in its first
    half. Shapes depend on T and K alone; nothing is read on the host. Needs a dtype that
    `torch.nn.functional.grouped_mm` knows on the device.
    """
    tokens, chosen = index_TK.shape
    experts = gate_and_up_EIM.shape[0]
    multiple = group_multiple(x_TM.device)
    slot, ends_E = _slots(index_TK.flatten(), experts, multiple)
    capacity = tokens * chosen + experts * (multiple - 1)
    rows = x_TM.new_zeros(capacity + padding(capacity, multiple), x_TM.shape[1])
    rows.index_copy_(0, slot, x_TM.repeat_interleave(chosen, dim=0))
    up, gate = F.grouped_mm(rows, gate_and_up_EIM.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    result = F.grouped_mm(up * F.silu(gate), down_EMI.transpose(1, 2), offs=ends_E)
    chosen_TKM = result[slot].view(tokens, chosen, -1)
    return on(onto_TM, (chosen_TKM * weight_TK[..., None]).sum(dim=1))


def plain_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Stack,
    down: Stack,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """The plain twin: each chosen expert's weights once, made dense, over its own tokens.

    Keeps a row's bits apart from its company, as `grouped_experts` does. Reads the chosen experts'
    numbers on the host.
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


def on(onto_TM: Tensor | None, mixed_TM: Tensor) -> Tensor:
    """`onto + mixed`, or what was mixed alone."""
    return mixed_TM if onto_TM is None else onto_TM + mixed_TM


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


def _slots(expert_R: Tensor, experts: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Where each row goes, and where each expert's padded group ends (int32)."""
    is_member_RE = expert_R[:, None] == torch.arange(experts, device=expert_R.device)
    count_E = is_member_RE.sum(dim=0)
    padded_E = (count_E + multiple - 1) // multiple * multiple
    ends_E = padded_E.cumsum(0)
    rank_R = (is_member_RE.cumsum(0) - 1).gather(1, expert_R[:, None])[:, 0]
    return (ends_E - padded_E)[expert_R] + rank_R, ends_E.to(torch.int32)
