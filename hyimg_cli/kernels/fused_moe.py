"""The part of `FusedOps` around the experts' products, in Triton; a row is one block.

`align_block_size` sorts choices by expert by counting, in three launches:

    count     program (block of choices)   how many of each expert, [E, blocks]
    place     program (expert)             its choices before each block, and in all
    scatter   program (block of choices)   each choice to its row, after the earlier ones

The result is that of a stable sort, to the last number. Nothing is read on the host. Block sizes
are estimated, not measured. Counts are never compiled in: another number of tokens needs no new
kernel. Under TRITON_INTERPRET=1 the same code runs on a CPU.
"""

# Legend: T token, M model width, K chosen expert, E expert, I inner width, R sorted row,
# B block of choices
import torch
import triton
import triton.language as tl
from torch import Tensor

from hyimg_cli.kernels.formats import FP8, FP8_MAX
from hyimg_cli.kernels.ops import Permutation, PlainOps, sorted_rows

_BLOCK, _BLOCKS, _COLUMNS = 128, 1024, 1024


class FusedMoeOps(PlainOps):
    """Permutation, SwiGLU and quantisation in Triton; everything is on one device."""

    def align_block_size(self, index_TK: Tensor, experts: int, block_size: int = 1) -> Permutation:
        (tokens, chosen), device = index_TK.shape, index_TK.device
        choices, blocks = tokens * chosen, triton.cdiv(tokens * chosen, _BLOCK)
        index_TK = index_TK.contiguous()
        before_EB = torch.empty(experts, blocks, dtype=torch.int32, device=device)
        total_E = torch.empty(experts, dtype=torch.int32, device=device)
        ends_E = torch.empty(experts, dtype=torch.int32, device=device)
        # Rows between blocks hold token 0; without such rows, every row is written.
        make = torch.empty if block_size == 1 else torch.zeros
        rows = sorted_rows(choices, experts, block_size)
        token_R = make(rows, dtype=torch.int64, device=device)
        row_TK = torch.empty_like(index_TK)
        sizes = {"EXPERTS": experts, "HELD": triton.next_power_of_2(experts), "BLOCK": _BLOCK}
        _count[(blocks,)](index_TK, before_EB, choices, blocks, **sizes, enable_fp_fusion=True)
        _place[(experts,)](before_EB, total_E, blocks, BLOCKS=_BLOCKS, enable_fp_fusion=True)
        _scatter[(blocks,)](
            index_TK, before_EB, total_E, ends_E, token_R, row_TK, choices, blocks,
            CHOSEN=chosen, BLOCK_SIZE=block_size, **sizes, enable_fp_fusion=True,
        )  # fmt: skip
        return Permutation(token_R, row_TK, ends_E)

    def swiglu(self, up_TI: Tensor, gate_TI: Tensor) -> Tensor:
        rows, width = up_TI.shape
        assert up_TI.stride() == gate_TI.stride(), "both are halves of rows, or rows of their own"
        assert up_TI.stride(1) == 1, "the numbers of a row are adjacent"
        out_TI = up_TI.new_empty(rows, width)
        _swiglu[(rows, triton.cdiv(width, _COLUMNS))](
            up_TI, gate_TI, out_TI, up_TI.stride(0), width,
            COLUMNS=_COLUMNS, enable_fp_fusion=True,
        )  # fmt: skip
        return out_TI

    def gather_sum(
        self, rows_RM: Tensor, row_TK: Tensor, weight_TK: Tensor, onto_TM: Tensor | None
    ) -> Tensor:
        (tokens, chosen), width = row_TK.shape, rows_RM.shape[1]
        out_TM = rows_RM.new_empty(tokens, width)
        _gather_sum[(tokens, triton.cdiv(width, _COLUMNS))](
            rows_RM.contiguous(), row_TK.contiguous(), weight_TK.contiguous(),
            out_TM if onto_TM is None else onto_TM.contiguous(), out_TM, width,
            CHOSEN=chosen, HAS_ONTO=onto_TM is not None, COLUMNS=_COLUMNS, enable_fp_fusion=True,
        )  # fmt: skip
        return out_TM

    def to_fp8(self, rows: Tensor, *, is_swiglu: bool = False) -> tuple[Tensor, Tensor]:
        width = rows.shape[1] // 2 if is_swiglu else rows.shape[1]
        values = torch.empty(rows.shape[0], width, dtype=FP8, device=rows.device)
        scale_R = torch.empty(rows.shape[0], device=rows.device)
        _quantize[(rows.shape[0],)](
            rows.contiguous(), values, scale_R, width,
            LARGEST=FP8_MAX, IS_SWIGLU=is_swiglu, COLUMNS=triton.next_power_of_2(width),
            enable_fp_fusion=True,
        )  # fmt: skip
        return values, scale_R


@triton.jit(do_not_specialize=["choices", "blocks"])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    index, count, choices, blocks,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, HELD)
    own = tl.load(index + choice, mask=choice < choices, other=HELD).to(tl.int32)
    total = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(count + expert * blocks + block, total, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def _place(count, total, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replace the counts of blocks by the number of earlier choices, in place."""
    expert = tl.program_id(0)
    own = count + expert * blocks
    before = 0
    for begin in range(0, blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        counts = tl.load(own + block, mask=block < blocks, other=0)
        tl.store(own + block, before + tl.cumsum(counts, axis=0) - counts, mask=block < blocks)
        before += tl.sum(counts, axis=0)
    tl.store(total + expert, before)


@triton.jit(do_not_specialize=["choices", "blocks"])  # type: ignore[untyped-decorator]
def _scatter(  # type: ignore[no-untyped-def]
    index, before, total, ends, token, row, choices, blocks,
    CHOSEN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, HELD)
    is_choice, is_expert = choice < choices, expert < EXPERTS
    # With few experts, every program sums up anew where their rows start.
    count = tl.load(total + expert, mask=is_expert, other=0)
    padded = (count + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    end = tl.cumsum(padded, axis=0)
    if block == 0:
        tl.store(ends + expert, end, mask=is_expert)
    first = end - padded + tl.load(before + expert * blocks + block, mask=is_expert, other=0)
    own = tl.load(index + choice, mask=is_choice, other=HELD).to(tl.int32)
    is_own = own[:, None] == expert[None, :]
    rank = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    at = tl.sum(tl.where(is_own, first[None, :] + rank, 0), axis=1)
    tl.store(row + choice, at.to(tl.int64), mask=is_choice)
    tl.store(token + at, (choice // CHOSEN).to(tl.int64), mask=is_choice)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(  # type: ignore[no-untyped-def]
    up_rows, gate_rows, out, step, width, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < width
    up = tl.load(up_rows + row * step + column, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_rows + row * step + column, mask=is_inside, other=0.0).to(tl.float32)
    hidden = up * gate * tl.sigmoid(gate)
    tl.store(out + row * width + column, hidden, mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    rows, values, scale, width,
    LARGEST: tl.constexpr, IS_SWIGLU: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    # The smallest normal float32: a row of zeros has a scale too.
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
