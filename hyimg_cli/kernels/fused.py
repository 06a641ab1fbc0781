"""The part of `FusedRows` that stands around the experts' products, each one pass over memory.

One program a row, or a token; a row fits into one block. Under TRITON_INTERPRET=1 the same code
runs on a CPU.
"""

# Legend: T token, M model width, K chosen expert, I inner width, R row
import torch
import triton
import triton.language as tl
from torch import Tensor

from hyimg_cli.kernels.formats import FP8, FP8_MAX
from hyimg_cli.kernels.fused_routes import places
from hyimg_cli.kernels.rowwise import Routes, sorted_rows

_COLUMNS = 1024


def routes(index_TK: Tensor, experts: int, group_rows: int = 1) -> Routes:
    rows = sorted_rows(index_TK.numel(), experts, group_rows)
    return Routes(*places(index_TK, experts, group_rows, rows))


def swiglu(rows_R2I: Tensor) -> Tensor:
    rows, width = rows_R2I.shape[0], rows_R2I.shape[1] // 2
    out_RI = rows_R2I.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, _COLUMNS))
    _swiglu[grid](rows_R2I.contiguous(), out_RI, width, COLUMNS=_COLUMNS, enable_fp_fusion=True)
    return out_RI


def gather_sum(
    rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor, onto_TM: Tensor | None
) -> Tensor:
    (tokens, chosen), width = row_TK.shape, rows_RM.shape[1]
    out_TM = rows_RM.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, _COLUMNS))
    _gather_sum[grid](
        rows_RM.contiguous(),
        row_TK.contiguous(),
        weight_TK.contiguous(),
        out_TM if onto_TM is None else onto_TM.contiguous(),
        out_TM,
        width,
        CHOSEN=chosen,
        HAS_ONTO=onto_TM is not None,
        COLUMNS=_COLUMNS,
        enable_fp_fusion=True,
    )
    return out_TM


def quantized(rows: Tensor, width: int, *, is_swiglu: bool) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows.shape[0], width, dtype=FP8, device=rows.device)
    scale_R = torch.empty(rows.shape[0], device=rows.device)
    _quantize[(rows.shape[0],)](
        rows.contiguous(),
        values,
        scale_R,
        width,
        LARGEST=FP8_MAX,
        IS_SWIGLU=is_swiglu,
        COLUMNS=triton.next_power_of_2(width),
        enable_fp_fusion=True,
    )
    return values, scale_R


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(rows, out, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < width
    start = rows + row * 2 * width
    up = tl.load(start + column, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.load(start + width + column, mask=is_inside, other=0.0).to(tl.float32)
    hidden = up * gate * tl.sigmoid(gate)
    tl.store(out + row * width + column, hidden, mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    rows,
    values,
    scale,
    width,
    LARGEST: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_inside = column < width
    if IS_SWIGLU:
        start = rows + row * 2 * width
        up = tl.load(start + column, mask=is_inside, other=0.0).to(tl.float32)
        gate = tl.load(start + width + column, mask=is_inside, other=0.0).to(tl.float32)
        x = up * gate * tl.sigmoid(gate)
    else:
        x = tl.load(rows + row * width + column, mask=is_inside, other=0.0).to(tl.float32)
    # The smallest normal float32: a row of zeros has a scale, too.
    own = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, 1.1754943508222875e-38)
    share = tl.minimum(tl.maximum(x / own, -LARGEST), LARGEST)
    tl.store(values + row * width + column, share.to(values.dtype.element_ty), mask=is_inside)
    tl.store(scale + row, own)


@triton.jit  # type: ignore[untyped-decorator]
def _gather_sum(  # type: ignore[no-untyped-def]
    rows, row_of, weight, onto, out, width,
    CHOSEN: tl.constexpr, HAS_ONTO: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(CHOSEN):
        row = tl.load(row_of + token * CHOSEN + choice)
        share = tl.load(weight + token * CHOSEN + choice).to(tl.float32)
        x = tl.load(rows + row * width + column, mask=is_inside, other=0.0)
        total += share * x.to(tl.float32)
    if HAS_ONTO:
        own = tl.load(onto + token * width + column, mask=is_inside, other=0.0)
        # Rounded before it is added, as the twin does.
        total = own.to(tl.float32) + total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + column, total, mask=is_inside)
