"""Routed experts in plain torch and as grouped products.

`plain_experts` takes one expert after the other, in any format: the twin of every kernel, and what
a CPU runs for quantised ones. The grouped products sort rows by expert:

    x ▸ sorted rows ▸ product ▸ SwiGLU ▸ product ▸ gather and sum          as they are
    x ▸ e4m3, a scale a row ▸ sorted ▸ product ▸ SwiGLU to e4m3 ▸ product ▸ gather and sum    FP8

    rows of x, sorted by expert      e0 e0 e0 .  e1 .. .. .  e2 e2 e2 e2  e3 ...
    padded to whole groups           |-- 4 --|  |-- 4 --|   |---- 4 ----| ...

The operations around the products are `ops`: in plain torch, or fused. Shapes depend on T, K and
E alone and nothing is read on the host. A sum is gathered, not scattered: the same bits every time.
On a CPU groups are padded, so a row's product does not depend on how many others chose its expert
(see `rows.py`); on a GPU a row's bits may depend on the other rows, as in any product.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R sorted row
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.formats import FP8, Fp8Rows, Stack, Stacks, dense, one, round_to_fp8
from hyimg_cli.kernels.ops import PLAIN, PlainOps, add_onto
from hyimg_cli.kernels.rows import group_multiple, pad_rows

# Rows in a tile of a grouped FP8 product.
_TILE = 16


@dataclass(frozen=True)
class RoutedTokens:
    """Rows with their chosen experts' weights and numbers.

    `onto`: rows to which the rounded weighted sum is added.
    """

    x_TM: Tensor
    weight_TK: Tensor
    index_TK: Tensor
    onto_TM: Tensor | None = None


# The weighted sum [T, M] of each token's chosen experts.
Experts = Callable[[RoutedTokens], Tensor]


def plain_experts(
    tokens: RoutedTokens,
    stacks: Stacks,
    quantize_input: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """Return the weighted sum of each token's chosen experts, [T, M]; one expert at a time.

    `quantize_input` is applied to the rows that enter a product. Keeps a row's bits apart from
    other rows. Reads the chosen experts' numbers on the host.
    """
    x_TM, index_TK = tokens.x_TM, tokens.index_TK
    chosen, flat_R = index_TK.shape[1], index_TK.flatten()
    multiple = group_multiple(x_TM.device)
    result_RM = x_TM.new_empty(flat_R.shape[0], x_TM.shape[1])
    for expert in flat_R.unique().tolist():
        row = (flat_R == expert).nonzero()[:, 0]
        x_RM = pad_rows(x_TM[row // chosen], multiple)
        gate_and_up_OM, down_MI = (one(stack, expert, x_TM.dtype) for stack in stacks)
        up, gate = F.linear(quantize_input(x_RM), gate_and_up_OM).chunk(2, dim=-1)
        result_RM[row] = F.linear(quantize_input(up * F.silu(gate)), down_MI)[: len(row)]
    weighted_TKM = result_RM.view(*index_TK.shape, -1) * tokens.weight_TK[..., None]
    return add_onto(tokens.onto_TM, weighted_TKM.sum(dim=1))


# The plain twin of an FP8 product: the rows that enter one are rounded to e4m3 too.
plain_scaled_experts = partial(plain_experts, quantize_input=round_to_fp8)


def routed_experts(
    tokens: RoutedTokens, stacks: Stacks, ops: PlainOps = PLAIN, group_rows: int = 1
) -> Tensor:
    """Return the weighted sum [T, M] of each token's chosen experts: `down(up * silu(gate))`.

    A quantized stack is unpacked for its product, one of the two at a time. Needs a dtype that
    `torch.nn.functional.grouped_mm` supports on the device.
    """
    (gate_and_up, down), x_TM = stacks, tokens.x_TM
    to = ops.align_block_size(tokens.index_TK, gate_and_up.shape[0], group_rows)
    # A product's inputs are freed before the next one: the rows of all choices are large.
    hidden_RI = ops.swiglu(
        *F.grouped_mm(x_TM[to.token_R], dense(gate_and_up, x_TM.dtype).mT, offs=to.ends_E).chunk(
            2, dim=-1
        )
    )
    result_RM = F.grouped_mm(hidden_RI, dense(down, x_TM.dtype).mT, offs=to.ends_E)
    return ops.gather_sum(result_RM, to.row_TK, tokens.weight_TK, tokens.onto_TM)


def scaled_experts(tokens: RoutedTokens, stacks: Stacks, ops: PlainOps = PLAIN) -> Tensor:
    """Return the same sum with both factors of both products in e4m3, one scale per row."""
    gate_and_up, down = stacks
    to = ops.align_block_size(tokens.index_TK, gate_and_up.shape[0], _TILE)
    values_TM, scale_T = ops.to_fp8(tokens.x_TM)
    # Bytes are gathered, because not every 8-bit float type can be indexed.
    values_RM = values_TM.view(torch.uint8)[to.token_R].view(FP8)
    middle_R2I = _product((values_RM, scale_T[to.token_R]), gate_and_up, to.ends_E)
    del values_RM
    hidden = ops.to_fp8(middle_R2I, is_swiglu=True)
    del middle_R2I
    result_RM = _product(hidden, down, to.ends_E)
    out_TM = ops.gather_sum(result_RM, to.row_TK, tokens.weight_TK, tokens.onto_TM)
    return out_TM.to(tokens.x_TM.dtype)


def _product(rows: tuple[Tensor, Tensor], stack: Stack, ends_E: Tensor) -> Tensor:
    assert isinstance(stack, Fp8Rows), "both factors are in e4m3"
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
