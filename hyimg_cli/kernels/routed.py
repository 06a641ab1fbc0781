"""Many rows on a GPU: rows sorted by expert, two grouped products, and each token's sum gathered.

    x ▸ sorted rows ▸ product ▸ SwiGLU ▸ product ▸ gather and sum          bf16
    x ▸ e4m3, a scale a row ▸ sorted ▸ product ▸ SwiGLU to e4m3 ▸ product ▸ gather and sum    FP8

What stands around the products is an `Around`: in plain torch here, fused in `fused.py`. Shapes
depend on T, K and E alone and nothing is read on the host. A sum is gathered, not scattered: the
same bits every time. A row's bits may depend on its company, as any GPU product's do.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R sorted row
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.experts import on
from hyimg_cli.kernels.formats import FP8, Fp8Rows, Stack, dense, quantize_rows

# Groups of an FP8 product start at whole tiles of 16 rows, the layout that torch tests.
FP8_GROUP_ROWS = 16


class Around(Protocol):
    """What happens to rows before, between and behind the products."""

    def routes(self, index_TK: Tensor, experts: int, group_rows: int = 1) -> "Routes":
        """The choices sorted by expert, each group starting at a multiple of `group_rows`.

        Rows between groups hold token 0; no choice points at them.
        """

    def swiglu(self, rows_R2I: Tensor) -> Tensor:
        """`up * silu(gate)` [R, I] of rows that hold `up` in their first half."""

    def to_fp8(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in e4m3, and a float32 scale for each."""

    def swiglu_to_fp8(self, rows_R2I: Tensor) -> tuple[Tensor, Tensor]:
        """Both of the above, one behind the other."""

    def gather_sum(
        self, rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor, onto_TM: Tensor | None
    ) -> Tensor:
        """Weighted sum [T, M] of the rows that each token's choices were sorted to, on `onto`."""


class PlainAround:
    """`Around` in plain torch."""

    def routes(self, index_TK: Tensor, experts: int, group_rows: int = 1) -> "Routes":
        return routes(index_TK, experts, group_rows=group_rows)

    def swiglu(self, rows_R2I: Tensor) -> Tensor:
        up, gate = rows_R2I.float().chunk(2, dim=-1)
        return (up * F.silu(gate)).to(rows_R2I.dtype)

    def to_fp8(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(rows)

    def swiglu_to_fp8(self, rows_R2I: Tensor) -> tuple[Tensor, Tensor]:
        up, gate = rows_R2I.float().chunk(2, dim=-1)
        return quantize_rows(up * F.silu(gate))

    def gather_sum(
        self, rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor, onto_TM: Tensor | None
    ) -> Tensor:
        chosen_TKM = rows_RM[row_TK].float() * weight_TK.float()[..., None]
        return on(onto_TM, chosen_TKM.sum(dim=1).to(rows_RM.dtype))


@dataclass(frozen=True)
class Routes:
    """`token` [R]: which token stands in each sorted row. `row` [T, K]: the row of each choice.
    `ends` [E] int32: where each expert's rows end.
    """

    token_R: Tensor
    row_TK: Tensor
    ends_E: Tensor


def sorted_rows(choices: int, experts: int, group_rows: int) -> int:
    """Rows that all choices and what lies between groups take at most."""
    most = choices + experts * (group_rows - 1)
    return -(-most // group_rows) * group_rows


def routes(index_TK: Tensor, experts: int, *, group_rows: int = 1) -> Routes:
    """The choices sorted by expert: see `Around.routes`."""
    tokens, chosen = index_TK.shape
    flat_R = index_TK.flatten()
    order_R = flat_R.argsort(stable=True)
    sorted_R = flat_R[order_R]
    numbers_E = torch.arange(experts, device=flat_R.device)
    ends_E = torch.searchsorted(sorted_R, numbers_E, right=True)
    count_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded_E = (count_E + group_rows - 1) // group_rows * group_rows
    shift_E = padded_E.cumsum(0) - padded_E - (ends_E - count_E)
    at_R = torch.arange(tokens * chosen, device=flat_R.device) + shift_E[sorted_R]
    rows = sorted_rows(tokens * chosen, experts, group_rows)
    token_R = flat_R.new_zeros(rows).index_copy_(0, at_R, order_R // chosen)
    row_TK = torch.empty_like(flat_R).index_copy_(0, order_R, at_R).view(tokens, chosen)
    return Routes(token_R, row_TK, padded_E.cumsum(0).to(torch.int32))


_PLAIN = PlainAround()


def routed_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Stack,
    down: Stack,
    around: Around = _PLAIN,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M]: see `experts.grouped_experts`.

    A quantised stack is made dense for its product, one of the two at a time.
    """
    to = around.routes(index_TK, gate_and_up.shape[0])
    # What a product takes is let go before the next one: rows of all choices are large.
    hidden_RI = around.swiglu(
        F.grouped_mm(x_TM[to.token_R], dense(gate_and_up, x_TM.dtype).mT, offs=to.ends_E)
    )
    result_RM = F.grouped_mm(hidden_RI, dense(down, x_TM.dtype).mT, offs=to.ends_E)
    return around.gather_sum(result_RM, to.row_TK, weight_TK, onto_TM)


def scaled_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Fp8Rows,
    down: Fp8Rows,
    around: Around = _PLAIN,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """The same with both factors of both products in e4m3, a scale a row.

    Needs bfloat16 rows and a GPU that has FP8 grouped products (compute capability 9.x).
    """
    to = around.routes(index_TK, gate_and_up.shape[0], FP8_GROUP_ROWS)
    values_TM, scale_T = around.to_fp8(x_TM)
    # Bytes are gathered: indexing is not defined for every kind of 8-bit float.
    values_RM = values_TM.view(torch.uint8)[to.token_R].view(FP8)
    middle_R2I = _product((values_RM, scale_T[to.token_R]), gate_and_up, to.ends_E)
    del values_RM
    hidden = around.swiglu_to_fp8(middle_R2I)
    del middle_R2I
    result_RM = _product(hidden, down, to.ends_E)
    return around.gather_sum(result_RM, to.row_TK, weight_TK, onto_TM).to(x_TM.dtype)


def _product(rows: tuple[Tensor, Tensor], stack: Fp8Rows, ends_E: Tensor) -> Tensor:
    recipe = F.ScalingType.RowWise
    result_RO: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        rows[0],
        stack.values_EOI.mT,
        scale_a=rows[1],
        scale_recipe_a=recipe,
        scale_b=stack.scale_EO,
        scale_recipe_b=recipe,
        offs=ends_E,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return result_RO
