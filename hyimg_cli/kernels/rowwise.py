"""What stands around a layer's matrix products, row by row: norms, rotation, SwiGLU, the router.

`PlainRowwise` is the twin in plain torch, and what a CPU runs; `fused_rows.FusedRows` has the same
calls in Triton, each one pass over memory. A row's bits never depend on its company.
"""

# Legend: T token, M model width, H query head, K kv head (or chosen expert), D head width,
# E expert, I inner width
import importlib.util
import logging
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_LOG = logging.getLogger(__name__)


class Rowwise(Protocol):
    """The parts of a layer that are no matrix product (the router's own, small one, is here)."""

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm: statistics in float32, cast to the dtype of `x`, then the weight.

        (torch's own `rms_norm` rounds once, behind the weight: a quarter of all numbers differs.)
        """

    def added_norm(
        self, x_TM: Tensor, more_TM: Tensor, weight_M: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`x + more`, and the norm of it."""

    def heads(
        self,
        fused_TKGD: Tensor,
        angles: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, K, D] of fused rows, per kv head: q, q, .., k, v.

        Queries and keys are turned by their tokens' angles (cosines and sines [T, D], float32),
        then normed, each kind with its weight [D]; all in float32. Values are as they were.
        """

    def swiglu(self, rows_T2I: Tensor) -> Tensor:
        """`up * silu(gate)` [T, I] of rows that hold `up` in their first half."""

    def routed(self, x_TM: Tensor, weight_EM: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E] in float32, and the `best` experts' weights and indices [T, K].

        Softmax over all experts, then the best, then renormalised to one; the weights come in the
        dtype of `x`.
        """


class PlainRowwise:
    """`Rowwise` in plain torch."""

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        wide = x_TM.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight_M * wide.to(x_TM.dtype)

    def added_norm(
        self, x_TM: Tensor, more_TM: Tensor, weight_M: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TM = x_TM + more_TM
        return sum_TM, self.norm(sum_TM, weight_M, eps)

    def heads(
        self,
        fused_TKGD: Tensor,
        angles: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v_TKD = fused_TKGD.split([fused_TKGD.shape[2] - 2, 1, 1], dim=-2)
        # Rotation first, then the norm; both in float32.
        q_THD = self.norm(rotate(q.flatten(-3, -2), *angles), weights[0], eps)
        k_TKD = self.norm(rotate(k.squeeze(-2), *angles), weights[1], eps)
        dtype = fused_TKGD.dtype
        return q_THD.to(dtype), k_TKD.to(dtype), v_TKD.squeeze(-2)

    def swiglu(self, rows_T2I: Tensor) -> Tensor:
        up, gate = rows_T2I.chunk(2, dim=-1)
        return up * F.silu(gate)

    def routed(self, x_TM: Tensor, weight_EM: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = F.linear(x_TM.float(), weight_EM)
        best_TK, index_TK = logits_TE.softmax(dim=-1).topk(best, dim=-1)
        weight_TK = best_TK / best_TK.sum(dim=-1, keepdim=True).clamp_min(1e-8)
        return logits_TE, weight_TK.to(x_TM.dtype), index_TK


PLAIN = PlainRowwise()


def rowwise(device: torch.device) -> Rowwise:
    """The kernels for a layer on `device`; asked once, when the model is built."""
    if device.type != "cuda":
        return PLAIN
    if importlib.util.find_spec("triton") is None:
        _LOG.warning("triton is not installed: norms, rotation and router run unfused, and slower")
        return PLAIN
    from hyimg_cli.kernels.fused_rows import FusedRows

    return FusedRows()


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Heads turned by their tokens' angles, float32; element i pairs with i + D/2."""
    x_THD = x_THD.float()
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_THD * cos_TD[:, None] + turned * sin_TD[:, None]
