"""`PlainRowwise.routes` in Triton: choices sorted by expert by counting, in three launches.

    counted   program (block of choices)   how many of each expert, [E, blocks]
    placed    program (expert)             its choices before each block, and in all
    spread    program (block of choices)   each choice to its row, behind the earlier ones

The result is that of a stable sort, to the last number. Nothing is read on the host. Block sizes
are first guesses: no GPU has measured them yet. Counts are never part of what is compiled: another
number of tokens needs no new kernel.
"""

# Legend: T token, K chosen expert, E expert, R sorted row, B block of choices
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _BLOCKS = 128, 1024


def places(
    index_TK: Tensor, experts: int, group_rows: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`token` [rows], `row` [T, K] and `ends` [E] of `rowwise.Routes`."""
    (tokens, chosen), device = index_TK.shape, index_TK.device
    choices, blocks = tokens * chosen, triton.cdiv(tokens * chosen, _BLOCK)
    index_TK = index_TK.contiguous()
    before_EB = torch.empty(experts, blocks, dtype=torch.int32, device=device)
    total_E = torch.empty(experts, dtype=torch.int32, device=device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=device)
    # Rows between groups hold token 0; where there are none, every row is written.
    make = torch.empty if group_rows == 1 else torch.zeros
    token_R = make(rows, dtype=torch.int64, device=device)
    row_TK = torch.empty_like(index_TK)
    sizes = {"EXPERTS": experts, "HELD": triton.next_power_of_2(experts), "BLOCK": _BLOCK}
    _counted[(blocks,)](index_TK, before_EB, choices, blocks, **sizes, enable_fp_fusion=True)
    _placed[(experts,)](before_EB, total_E, blocks, BLOCKS=_BLOCKS, enable_fp_fusion=True)
    _spread[(blocks,)](
        index_TK, before_EB, total_E, ends_E, token_R, row_TK, choices, blocks,
        CHOSEN=chosen, GROUP_ROWS=group_rows, **sizes, enable_fp_fusion=True,
    )  # fmt: skip
    return token_R, row_TK, ends_E


@triton.jit(do_not_specialize=["choices", "blocks"])  # type: ignore[untyped-decorator]
def _counted(  # type: ignore[no-untyped-def]
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
def _placed(count, total, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts of blocks become what stands before each, in place."""
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
def _spread(  # type: ignore[no-untyped-def]
    index, before, total, ends, token, row, choices, blocks,
    CHOSEN: tl.constexpr, GROUP_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, HELD)
    is_choice, is_expert = choice < choices, expert < EXPERTS
    # Few experts: every program adds up anew where their rows start.
    count = tl.load(total + expert, mask=is_expert, other=0)
    padded = (count + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
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
