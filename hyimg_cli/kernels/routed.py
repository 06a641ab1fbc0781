"""Many rows: sorted by expert, two grouped products, and each token's sum gathered.

    x ▸ sorted rows ▸ product ▸ SwiGLU ▸ product ▸ gather and sum          as they are
    x ▸ e4m3, a scale a row ▸ sorted ▸ product ▸ SwiGLU to e4m3 ▸ product ▸ gather and sum    FP8

    rows of x, sorted by expert      e0 e0 e0 .  e1 .. .. .  e2 e2 e2 e2  e3 ...
    padded to whole groups           |-- 4 --|  |-- 4 --|   |---- 4 ----| ...

What stands around the products are `ops`: in plain torch, or fused. Shapes depend on T, K and
E alone and nothing is read on the host. A sum is gathered, not scattered: the same bits every time.
On a CPU groups are padded, so that how a row is multiplied does not depend on how many others chose
its expert (see `rows.py`); on a GPU a row's bits may depend on its company, as any product's do.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R sorted row
import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.kernels.formats import FP8, Fp8Rows, Stack, dense
from hyimg_cli.kernels.ops import PLAIN, PlainOps

# Rows of a tile of a grouped product in FP8.
_TILE = 16


def routed_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Stack,
    down: Stack,
    around: PlainOps = PLAIN,
    *,
    onto_TM: Tensor | None = None,
    group_rows: int = 1,
) -> Tensor:
    """Weighted sum of each token's chosen experts, [T, M]: `down(up * silu(gate))` each.

    `onto`: what the sum is added to, once it is rounded. `gate_and_up` holds `up` in its first
    half. A quantised stack is made dense for its product, one of the two at a time. Needs a dtype
    that `torch.nn.functional.grouped_mm` knows on the device.
    """
    to = around.align_block_size(index_TK, gate_and_up.shape[0], group_rows)
    # What a product takes is freed before the next one: rows of all choices are large.
    hidden_RI = around.swiglu(
        _grouped(x_TM, dense(gate_and_up, x_TM.dtype).mT, to.ends_E, to.token_R)
    )
    result_RM = _grouped(hidden_RI, dense(down, x_TM.dtype).mT, to.ends_E, None)
    return around.gather_sum(result_RM, to.row_TK, weight_TK, onto_TM)


def _grouped(rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor, token_R: Tensor | None) -> Tensor:
    rows_RI = rows_TI if token_R is None else rows_TI[token_R]
    product_RO: Tensor = F.grouped_mm(rows_RI, weight_EIO, offs=ends_E)
    return product_RO


def scaled_experts(
    x_TM: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_and_up: Fp8Rows,
    down: Fp8Rows,
    around: PlainOps = PLAIN,
    *,
    onto_TM: Tensor | None = None,
) -> Tensor:
    """The same with both factors of both products in e4m3, a scale a row.

    Needs bfloat16 rows and a GPU that has FP8 grouped products (compute capability 9.x). Groups
    begin at whole tiles of 16 rows, the layout that torch tests.
    """
    to = around.align_block_size(index_TK, gate_and_up.shape[0], _TILE)
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
