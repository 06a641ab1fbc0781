"""Row-by-row operations around a layer's products: norms, rotation, SwiGLU, router, sorting.

`PlainOps` is the twin in plain torch, which a CPU runs; `fused_ops.FusedOps` has the same calls in
Triton, each one pass over memory. A row's bits never depend on the other rows.
"""

# Legend: T token, M model width, H query head, K kv head (or chosen expert), D head width,
# E expert, I inner width, R row sorted by expert, V vocabulary, N token of a sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.formats import quantize_rows

# Of queries and of keys, or cosines and sines.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Permutation:
    """Tokens sorted by expert.

    `token` [R]: the token of each sorted row; `row` [T, K]: the row of each choice; `ends` [E]
    int32: the end of each expert's rows.
    """

    token_R: Tensor
    row_TK: Tensor
    ends_E: Tensor


class PlainOps:
    """The parts of a layer other than its large products, in plain torch."""

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        """Return the RMS norm: statistics in float32, cast to x's dtype, then weighted.

        (torch's `rms_norm` rounds once, after the weight: a quarter of all numbers differs.)
        """
        wide = x_TM.to(torch.promote_types(x_TM.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight_M * wide.to(x_TM.dtype)

    def added_norm(
        self, x_TM: Tensor, pending_residual_TM: Tensor, weight_M: Tensor, eps: float
    ) -> Pair:
        """Return `x + pending_residual`, and its norm."""
        sum_TM = x_TM + pending_residual_TM
        return sum_TM, self.norm(sum_TM, weight_M, eps)

    def split_rotate_norm(
        self, fused_TKGD: Tensor, angles: Pair, weights: Pair, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split fused rows into queries [T, H, D] and keys and values [T, K, D].

        A row has, per kv head: q, q, .., k, v. Queries and keys are rotated by their tokens' angles
        (cosines and sines [T, D], float32), then normed, each with its own weight [D]; all in
        float32. Values are unchanged.
        """
        q, k, v_TKD = fused_TKGD.split([fused_TKGD.shape[2] - 2, 1, 1], dim=-2)
        # Rotation first, then the norm; both in float32.
        q_THD = self.norm(rotate(q.flatten(-3, -2), *angles), weights[0], eps)
        k_TKD = self.norm(rotate(k.squeeze(-2), *angles), weights[1], eps)
        dtype = fused_TKGD.dtype
        return q_THD.to(dtype), k_TKD.to(dtype), v_TKD.squeeze(-2)

    def norm_rotate(self, x_THD: Tensor, angles: Pair, weight_D: Tensor, eps: float) -> Tensor:
        """Return heads [T, H, D] normed in the rows' dtype, then rotated in float32.

        `angles`: cosines and sines [T, D], float32.
        """
        return rotate(self.norm(x_THD, weight_D, eps), *angles).to(x_THD.dtype)

    def swiglu(self, up_TI: Tensor, gate_TI: Tensor) -> Tensor:
        """Return `up * silu(gate)` [T, I]; both may be halves of the same rows."""
        return up_TI * F.silu(gate_TI)

    def routed(self, x_TM: Tensor, weight_EM: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E] in float32, and the `best` experts' weights and indices [T, K].

        Softmax over all experts, then the best ones, renormalised to a sum of one; the weights have
        the dtype of `x`.
        """
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = F.linear(x_TM.float(), weight_EM)
        best_TK, index_TK = logits_TE.softmax(dim=-1).topk(best, dim=-1)
        weight_TK = best_TK / best_TK.sum(dim=-1, keepdim=True).clamp_min(1e-8)
        return logits_TE, weight_TK.to(x_TM.dtype), index_TK

    def align_block_size(self, index_TK: Tensor, experts: int, block_size: int = 1) -> Permutation:
        """Sort the choices by expert; each group starts at a multiple of `block_size`.

        Rows between groups hold token 0; no choice points at them.
        """
        tokens, chosen = index_TK.shape
        flat_R = index_TK.flatten()
        order_R = flat_R.argsort(stable=True)
        sorted_R = flat_R[order_R]
        numbers_E = torch.arange(experts, device=flat_R.device)
        ends_E = torch.searchsorted(sorted_R, numbers_E, right=True)
        count_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        padded_E = (count_E + block_size - 1) // block_size * block_size
        shift_E = padded_E.cumsum(0) - padded_E - (ends_E - count_E)
        at_R = torch.arange(tokens * chosen, device=flat_R.device) + shift_E[sorted_R]
        rows = sorted_rows(tokens * chosen, experts, block_size)
        token_R = flat_R.new_zeros(rows).index_copy_(0, at_R, order_R // chosen)
        row_TK = torch.empty_like(flat_R).index_copy_(0, order_R, at_R).view(tokens, chosen)
        return Permutation(token_R, row_TK, padded_E.cumsum(0).to(torch.int32))

    def gather_sum(
        self, rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor, onto_TM: Tensor | None
    ) -> Tensor:
        """Return `onto` plus the rounded weighted sum [T, M] of each token's sorted rows."""
        return add_onto(onto_TM, (rows_RM[row_TK] * weight_TK[..., None]).sum(dim=1))

    def to_fp8(self, rows: Tensor, *, is_swiglu: bool = False) -> tuple[Tensor, Tensor]:
        """Return rows in e4m3 with a float32 scale each; `is_swiglu`: of their SwiGLU instead."""
        return quantize_rows(self.swiglu(*rows.float().chunk(2, dim=-1)) if is_swiglu else rows)


PLAIN = PlainOps()


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate heads by their tokens' angles, in float32 or wider; element i pairs with i + D/2."""
    x_THD = x_THD.to(torch.promote_types(x_THD.dtype, torch.float32))
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_THD * cos_TD[:, None] + turned * sin_TD[:, None]


def sorted_rows(choices: int, experts: int, block_size: int) -> int:
    """Return the largest number of rows that all choices and the padding take."""
    most = choices + experts * (block_size - 1)
    return -(-most // block_size) * block_size


def add_onto(onto_TM: Tensor | None, mixed_TM: Tensor) -> Tensor:
    """Return `onto + mixed`, or only `mixed` if there is no `onto`."""
    return mixed_TM if onto_TM is None else onto_TM + mixed_TM


def penalize(logits_V: Tensor, ids_N: Tensor, penalty: float) -> None:
    """Divide the logits above 0 of tokens `ids_N` by `penalty`, multiply the others, in place.

    Each token once, however often it occurs. 1 changes nothing.
    """
    held_N = logits_V.index_select(0, ids_N)
    # Equal ids write equal values, so their order does not matter.
    logits_V.index_copy_(0, ids_N, torch.where(held_N < 0, held_N * penalty, held_N / penalty))
