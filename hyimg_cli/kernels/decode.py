"""Experts of few rows on a GPU (AR decode), in Triton: only chosen weights are read.

    hidden [P, I]  program (pair, block of I): two dot products a row, then SwiGLU
    out [T, M]     program (token, block of M): the weighted sum over the token's choices

A pair is a token with one of its choices. Reading the weights takes the time, so they are unpacked
where they are used. No atomics: the same bits every time, whatever the other rows. Block sizes are
estimated, not measured: enough bytes in flight per multiprocessor of an H200, and no register
spilled (`tests/kernels`).
"""

# Legend: T token, M model width, K chosen expert, I inner width, P pair (token, choice)
import torch
import triton
import triton.language as tl
from torch import Tensor

from hyimg_cli.kernels.experts import RoutedTokens
from hyimg_cli.kernels.formats import BLOCK, Fp8Rows, Nf4Blocks, Stack, Stacks, levels_on

_DENSE, _FP8, _NF4 = 0, 1, 2
# Rows and columns of a program's tile, by format. One token has 1536 programs in the first kernel,
# but few in the second, whose rows are therefore cut finer. NF4's columns are bytes, and looking up
# two levels for each takes many registers.
_HIDDEN = {_DENSE: (16, 256), _FP8: (16, 256), _NF4: (8, 128)}
_MIXED = {_DENSE: (4, 1024), _FP8: (4, 1024), _NF4: (4, 256)}


def decode_experts(tokens: RoutedTokens, stacks: Stacks) -> Tensor:
    """Return the weighted sum of each token's chosen experts, [T, M]; see `plain_experts`.

    Every format of the weights; sums in float32.
    """
    (count, chosen), width = tokens.index_TK.shape, tokens.x_TM.shape[1]
    x_TM, index_TK = tokens.x_TM.contiguous(), tokens.index_TK.contiguous()
    gate_and_up, down = stacks
    inner = down.shape[2]
    hidden_PI = torch.empty(count * chosen, inner, device=x_TM.device)
    form, values, scale, levels = _held(gate_and_up)
    rows, columns = _HIDDEN[form]
    _hidden[(count * chosen, triton.cdiv(inner, rows))](
        x_TM, index_TK, values, scale, levels, hidden_PI,
        CHOSEN=chosen, INNER=inner, WIDTH=width, FORM=form, BLOCK=BLOCK,
        ROWS=rows, COLUMNS=columns, enable_fp_fusion=True,
    )  # fmt: skip
    out_TM = torch.empty_like(x_TM)
    form, values, scale, levels = _held(down)
    rows, columns = _MIXED[form]
    onto_TM = out_TM if tokens.onto_TM is None else tokens.onto_TM.contiguous()
    _mixed[(count, triton.cdiv(width, rows))](
        hidden_PI, index_TK, tokens.weight_TK.contiguous(), values, scale, levels, onto_TM, out_TM,
        CHOSEN=chosen, INNER=inner, WIDTH=width, FORM=form, BLOCK=BLOCK,
        HAS_ONTO=tokens.onto_TM is not None, ROWS=rows, COLUMNS=columns, enable_fp_fusion=True,
    )  # fmt: skip
    return out_TM


def _held(stack: Stack) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return the format and its tensors: values, scales, levels; missing ones are never read."""
    match stack:
        case Fp8Rows():
            return _FP8, stack.values_EOI, stack.scale_EO, stack.scale_EO
        case Nf4Blocks():
            return _NF4, stack.packed_EOH, stack.absmax_EB, levels_on(stack.device)
        case _:
            return _DENSE, stack, stack, stack


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    x, values, scale, levels, expert, row, is_row, start,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return one expert's rows times `x`, [ROWS, COLUMNS] in float32, to be summed along a row.

    The scale of a whole row is left out. In NF4 a column is a byte: two weights.
    """
    if FORM == 2:
        byte = start // 2 + tl.arange(0, COLUMNS)
        is_byte = byte < WIDTH // 2
        is_inside = is_row[:, None] & is_byte[None, :]
        at = row[:, None] * (WIDTH // 2) + byte[None, :]
        packed = tl.load(values + expert * (HEIGHT * WIDTH // 2) + at, mask=is_inside, other=0)
        block = expert * (HEIGHT * WIDTH // BLOCK) + at // (BLOCK // 2)
        own = tl.load(scale + block, mask=is_inside, other=0.0)
        even = tl.load(x + 2 * byte, mask=is_byte, other=0.0).to(tl.float32)[None, :]
        odd = tl.load(x + 2 * byte + 1, mask=is_byte, other=0.0).to(tl.float32)[None, :]
        high = tl.load(levels + (packed >> 4).to(tl.int32))
        low = tl.load(levels + (packed & 15).to(tl.int32))
        return own * (even * high + odd * low)
    column = start + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    at = expert * (HEIGHT * WIDTH) + row[:, None] * WIDTH + column[None, :]
    tile = tl.load(values + at, mask=is_row[:, None] & is_column[None, :], other=0.0)
    own = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
    return own[None, :] * tile.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _hidden(  # type: ignore[no-untyped-def]
    x, index, values, scale, levels, out,
    CHOSEN: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < INNER
    expert = tl.load(index + pair).to(tl.int64)
    own = x + (pair // CHOSEN) * WIDTH
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, COLUMNS * (2 if FORM == 2 else 1)):
        up += _products(
            own, values, scale, levels, expert, row, is_row, start,
            2 * INNER, WIDTH, FORM, BLOCK, COLUMNS,
        )  # fmt: skip
        gate += _products(
            own, values, scale, levels, expert, row + INNER, is_row, start,
            2 * INNER, WIDTH, FORM, BLOCK, COLUMNS,
        )  # fmt: skip
    up_sum, gate_sum = tl.sum(up, axis=1), tl.sum(gate, axis=1)
    if FORM == 1:
        up_sum *= tl.load(scale + expert * 2 * INNER + row, mask=is_row, other=0.0)
        gate_sum *= tl.load(scale + expert * 2 * INNER + INNER + row, mask=is_row, other=0.0)
    tl.store(out + pair * INNER + row, up_sum * gate_sum * tl.sigmoid(gate_sum), mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(  # type: ignore[no-untyped-def]
    hidden, index, weight, values, scale, levels, onto, out,
    CHOSEN: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
    BLOCK: tl.constexpr, HAS_ONTO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < WIDTH
    total = tl.zeros((ROWS,), tl.float32)
    for choice in range(CHOSEN):
        pair = token * CHOSEN + choice
        expert = tl.load(index + pair).to(tl.int64)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, INNER, COLUMNS * (2 if FORM == 2 else 1)):
            sums += _products(
                hidden + pair * INNER, values, scale, levels, expert, row, is_row, start,
                WIDTH, INNER, FORM, BLOCK, COLUMNS,
            )  # fmt: skip
        share = tl.sum(sums, axis=1) * tl.load(weight + pair).to(tl.float32)
        if FORM == 1:
            share *= tl.load(scale + expert * WIDTH + row, mask=is_row, other=0.0)
        total += share
    if HAS_ONTO:
        own = tl.load(onto + token * WIDTH + row, mask=is_row, other=0.0).to(tl.float32)
        # Rounded before it is added, as the twin does.
        total = own + total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * WIDTH + row, total, mask=is_row)
