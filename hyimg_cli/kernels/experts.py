"""Every expert's rows in one grouped product, without reading a count back from the device.

    rows of x, sorted by expert      e0 e0 e0 .  e1 .. .. .  e2 e2 e2 e2  e3 ...
    padded to whole groups           |-- 4 --|  |-- 4 --|   |---- 4 ----| ...

A group starts at a multiple of `GROUP_ROWS`, so that how a row is multiplied does not depend on how
many others chose its expert: the same bits in every batch (measured on CPU, see `rows.py`).
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width
import torch
from torch import Tensor
from torch.nn import functional as F

GROUP_ROWS = 4


def grouped_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up_EIM: Tensor,
    down_EMI: Tensor,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M]: `down(up * silu(gate))` each.

    `gate_and_up` holds `up` in its first half. Shapes depend on T and K alone; nothing is read on
    the host. Needs a dtype that `torch.nn.functional.grouped_mm` knows on the device.
    """
    tokens, chosen = index_TK.shape
    experts = gate_and_up_EIM.shape[0]
    slot, ends_E = _slots(index_TK.flatten(), experts)
    capacity = tokens * chosen + experts * (GROUP_ROWS - 1)
    rows = x_TM.new_zeros(-(-capacity // GROUP_ROWS) * GROUP_ROWS, x_TM.shape[1])
    rows.index_copy_(0, slot, x_TM.repeat_interleave(chosen, dim=0))
    up, gate = F.grouped_mm(rows, gate_and_up_EIM.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    result = F.grouped_mm(up * F.silu(gate), down_EMI.transpose(1, 2), offs=ends_E)
    chosen_TKM = result[slot].view(tokens, chosen, -1)
    mixed_TM: Tensor = (chosen_TKM * weight_TK[..., None]).sum(dim=1)
    return mixed_TM


def _slots(expert_R: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Where each row goes, and where each expert's padded group ends (int32)."""
    is_member_RE = expert_R[:, None] == torch.arange(experts, device=expert_R.device)
    count_E = is_member_RE.sum(dim=0)
    padded_E = (count_E + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
    ends_E = padded_E.cumsum(0)
    rank_R = (is_member_RE.cumsum(0) - 1).gather(1, expert_R[:, None])[:, 0]
    return (ends_E - padded_E)[expert_R] + rank_R, ends_E.to(torch.int32)
