"""DeepGEMM's grouped product: FP8, a scale for 128 numbers of a row and for 128 x 128 weights.

Other scales than `formats.Fp8Rows` has, a row's: other weights, so other pixels. It is measured
beside the kernels of the expert table, and never one of them. Its plain twin multiplies the same
blocks made dense again. Written by the library's published signature; nobody has run it yet.
"""

# Legend: T token, M model width, K chosen expert, E expert, O output row, I input column, R row
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hyimg_cli.kernels.formats import FP8, FP8_MAX, Stack, dense
from hyimg_cli.kernels.rowwise import PLAIN, Rowwise

BLOCK = 128
NAME = "deep_gemm"


@dataclass(frozen=True)
class Blocks:
    """Numbers [.., O, I] in e4m3, and a float32 scale for each block of `high` rows and 128
    columns.
    """

    values: Tensor
    scale: Tensor
    high: int

    @classmethod
    def of(cls, numbers: Tensor, high: int) -> "Blocks":
        """`numbers` whose sides are multiples of a block's."""
        tiled = numbers.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, high))
        scale = tiled.abs().amax((-3, -1)).clamp_min(1e-12) / FP8_MAX
        values = (tiled / scale[..., None, :, None]).flatten(-2).flatten(-3, -2)
        return cls(values.to(FP8), scale, high)

    def dense(self) -> Tensor:
        """The numbers that they stand for, in float32."""
        wide = self.scale.repeat_interleave(self.high, -2).repeat_interleave(BLOCK, -1)
        return self.values.float() * wide


# Rows of groups, which are `BLOCK` rows or more of them each, by each group's matrix [O, I]; a
# row's group, -1 for none.
Product = Callable[[Blocks, Blocks, Tensor], Tensor]


def block_stack(stack: Stack) -> Blocks:
    """A stack's weights in blocks, an expert at a time."""
    made = [Blocks.of(one, BLOCK) for one in dense(stack, torch.bfloat16)]
    values, scale = ([getattr(one, name) for one in made] for name in ("values", "scale"))
    return Blocks(torch.stack(values), torch.stack(scale), BLOCK)


def block_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    *,
    stacks: tuple[Blocks, Blocks],
    product: Product,
    around: Rowwise = PLAIN,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M], as `routed.scaled_experts` has it."""
    experts = stacks[0].values.shape[0]
    to = around.routes(index_TK, experts, BLOCK)
    places_R = torch.arange(len(to.token_R), device=x_TM.device)
    group_R = torch.searchsorted(to.ends_E, places_R, right=True, out_int32=True)
    group_R = group_R.masked_fill(group_R == experts, -1)
    entering = Blocks.of(x_TM, 1)
    values_RM = entering.values.view(torch.uint8)[to.token_R].view(FP8)
    rows = Blocks(values_RM, entering.scale[to.token_R], 1)
    hidden_RI = around.swiglu(product(rows, stacks[0], group_R))
    result_RM = product(Blocks.of(hidden_RI, 1), stacks[1], group_R)
    return around.gather_sum(result_RM.to(x_TM.dtype), to.row_TK, weight_TK, None)


def plain_product(rows: Blocks, weights: Blocks, group_R: Tensor) -> Tensor:
    """The twin, a group after the other."""
    entering_RI, weight_EOI = rows.dense(), weights.dense()
    out_RO = entering_RI.new_zeros(len(entering_RI), weight_EOI.shape[1])
    for expert in group_R.unique().tolist():
        if expert >= 0:
            out_RO[group_R == expert] = entering_RI[group_R == expert] @ weight_EOI[expert].mT
    return out_RO


def deep_product(rows: Blocks, weights: Blocks, group_R: Tensor) -> Tensor:
    """DeepGEMM's, on a GPU of compute capability 9.0."""
    import deep_gemm  # type: ignore[import-not-found]

    out_RO = rows.values.new_empty(len(rows.values), weights.values.shape[1], dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (rows.values, rows.scale), (weights.values, weights.scale), out_RO, group_R
    )
    return out_RO
