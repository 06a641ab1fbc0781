"""`PlainOps` in Triton: norms, rotation and router, each one read and one write of rows.

    norm     program (token)             sum with what is added, statistics, weight
    heads    program (token, kv head)    its query heads and its key: turned, normed, put in place
    logits, chosen    few rows: dot products by (token, expert), then the best of each row
    routed   program (tokens)    many rows: the router's product and the best of each row at once

The roundings of `PlainOps`, in its order; sums are added in another order. The router's many rows
are multiplied in their own dtype, the float32 weights split into three parts of it: products are
exact and sums in float32, without a copy of the rows. A row's bits do not depend on the other rows,
be they few or many. Block sizes are estimated, not measured.
"""

# Legend: T token, M model width, H query head, K kv head (or chosen expert), D head width,
# E expert, I inner width
import torch
import triton
import triton.language as tl
from torch import Tensor

from hyimg_cli.kernels.fused_moe import FusedMoeOps
from hyimg_cli.kernels.ops import Pair

_ROWS, _COLUMNS, _FEW_COLUMNS = 64, 64, 2048
# Up to here, one program would take all rows, and the other multiprocessors would be idle; by
# estimate, programs per (token, expert) finish sooner.
FEW_ROWS = _ROWS
_CHOSEN_ROWS = 16


class FusedOps(FusedMoeOps):
    """`PlainOps` in Triton; everything is on one device."""

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        return self._normed(x_TM, None, weight_M, eps)[1]

    def added_norm(
        self, x_TM: Tensor, pending_residual_TM: Tensor, weight_M: Tensor, eps: float
    ) -> Pair:
        return self._normed(x_TM, pending_residual_TM, weight_M, eps)

    def _normed(
        self, x_TM: Tensor, pending_residual_TM: Tensor | None, weight_M: Tensor, eps: float
    ) -> Pair:
        x_TM, width = x_TM.contiguous(), x_TM.shape[-1]
        out_TM = torch.empty_like(x_TM)
        sum_TM = x_TM if pending_residual_TM is None else torch.empty_like(x_TM)
        _norm[(x_TM.numel() // width,)](
            x_TM, x_TM if pending_residual_TM is None else pending_residual_TM.contiguous(),
            weight_M, sum_TM, out_TM, width, eps,
            HAS_MORE=pending_residual_TM is not None, COLUMNS=triton.next_power_of_2(width),
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        return sum_TM, out_TM

    def split_rotate_norm(
        self, fused_TKGD: Tensor, angles: Pair, weights: Pair, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, kv_heads, rows, width = fused_TKGD.shape
        assert width & (width - 1) == 0, "a head's width is a power of two"
        group = rows - 2
        q_THD = fused_TKGD.new_empty(tokens, kv_heads * group, width)
        k_TKD = fused_TKGD.new_empty(tokens, kv_heads, width)
        fused_TKGD = fused_TKGD.contiguous()
        cos_TD, sin_TD = (angle_TD.contiguous() for angle_TD in angles)
        _split_rotate_norm[(tokens, kv_heads)](
            fused_TKGD, cos_TD, sin_TD, weights[0], weights[1], q_THD, k_TKD, eps,
            GROUP=group, HELD=triton.next_power_of_2(group + 1), WIDTH=width,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
        return q_THD, k_TKD, fused_TKGD[:, :, group + 1]

    def norm_rotate(self, x_THD: Tensor, angles: Pair, weight_D: Tensor, eps: float) -> Tensor:
        x_THD, (tokens, heads, width) = x_THD.contiguous(), x_THD.shape
        assert width & (width - 1) == 0, "a head's width is a power of two"
        cos_TD, sin_TD = (angle_TD.contiguous() for angle_TD in angles)
        out_THD = torch.empty_like(x_THD)
        _norm_rotate[(tokens,)](
            x_THD, cos_TD, sin_TD, weight_D, out_THD, eps,
            HEADS=heads, HELD=triton.next_power_of_2(heads), WIDTH=width,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out_THD

    def routed(self, x_TM: Tensor, weight_EM: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
        (tokens, width), experts = x_TM.shape, weight_EM.shape[0]
        x_TM = x_TM.contiguous()
        logits_TE = torch.empty(tokens, experts, device=x_TM.device)
        weight_TK = x_TM.new_empty(tokens, best)
        index_TK = torch.empty(tokens, best, dtype=torch.int64, device=x_TM.device)
        sizes = {
            "EXPERTS": experts,
            "HELD": max(16, triton.next_power_of_2(experts)),
            "CHOSEN": best,
            "SLOTS": triton.next_power_of_2(best),
        }
        # A float32 cannot be split into exact parts, so its rows are multiplied one by one.
        if tokens > FEW_ROWS and x_TM.dtype != torch.float32:
            _routed[(triton.cdiv(tokens, _ROWS),)](
                x_TM, weight_EM, logits_TE, weight_TK, index_TK, tokens, **sizes,
                WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, enable_fp_fusion=True,
            )  # fmt: skip
            return logits_TE, weight_TK, index_TK
        _logits[(tokens, experts)](
            x_TM, weight_EM, logits_TE, WIDTH=width, COLUMNS=_FEW_COLUMNS, enable_fp_fusion=True
        )
        _chosen[(triton.cdiv(tokens, _CHOSEN_ROWS),)](
            logits_TE, weight_TK, index_TK, tokens, **sizes,
            ROWS=_CHOSEN_ROWS, enable_fp_fusion=True,
        )  # fmt: skip
        return logits_TE, weight_TK, index_TK


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, more, weight, total, out, width, eps, HAS_MORE: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, COLUMNS)
    is_inside = column < width
    own = tl.load(x + row + column, mask=is_inside, other=0.0)
    if HAS_MORE:
        added = tl.load(more + row + column, mask=is_inside, other=0.0).to(tl.float32)
        own = (own.to(tl.float32) + added).to(total.dtype.element_ty)
        tl.store(total + row + column, own, mask=is_inside)
    wide = own.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / width
    # Rounds as the twin: to the rows' dtype before the weight, and after it.
    narrow = (wide * tl.rsqrt(mean + eps)).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (scale * narrow).to(out.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _split_rotate_norm(  # type: ignore[no-untyped-def]
    fused, cos, sin, query_weight, key_weight, q, k, eps,
    GROUP: tl.constexpr, HELD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load a kv head's query heads, then its key, as rows of one tile, in halves."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = token * tl.num_programs(1) + head
    row = tl.arange(0, HELD)
    left = tl.arange(0, WIDTH // 2)
    right = left + WIDTH // 2
    is_row = (row <= GROUP)[:, None]
    start = fused + pair * ((GROUP + 2) * WIDTH) + row[:, None] * WIDTH
    first = tl.load(start + left[None, :], mask=is_row, other=0.0).to(tl.float32)
    second = tl.load(start + right[None, :], mask=is_row, other=0.0).to(tl.float32)
    angle = token * WIDTH
    turned_first = first * tl.load(cos + angle + left)[None, :]
    turned_first -= second * tl.load(sin + angle + left)[None, :]
    turned_second = second * tl.load(cos + angle + right)[None, :]
    turned_second += first * tl.load(sin + angle + right)[None, :]
    squares = tl.sum(turned_first * turned_first + turned_second * turned_second, axis=1)
    scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
    is_key = (row == GROUP)[:, None]
    # A query's place among all heads' queries, and the key's among all keys.
    to_query = q + (pair * GROUP + row[:, None]) * WIDTH
    to_key = k + pair * WIDTH + 0 * row[:, None]
    for half in tl.static_range(2):
        column = (left if half == 0 else right)[None, :]
        turned = (turned_first if half == 0 else turned_second) * scale
        of_query = tl.load(query_weight + column).to(tl.float32)
        of_key = tl.load(key_weight + column).to(tl.float32)
        out = (tl.where(is_key, of_key, of_query) * turned).to(q.dtype.element_ty)
        tl.store(to_query + column, out, mask=(row < GROUP)[:, None])
        tl.store(to_key + column, out, mask=is_key)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, weight, out, eps,
    HEADS: tl.constexpr, HELD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load a token's heads as rows of one tile, in halves."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HELD)[:, None]
    left = tl.arange(0, WIDTH // 2)[None, :]
    right = left + WIDTH // 2
    is_head = head < HEADS
    start = (token * HEADS + head) * WIDTH
    first = tl.load(x + start + left, mask=is_head, other=0.0).to(tl.float32)
    second = tl.load(x + start + right, mask=is_head, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / WIDTH + eps)[:, None]
    dtype = out.dtype.element_ty
    # Rounds as the twin: to the rows' dtype before the weight, after it, and after the rotation.
    first = (first * scale).to(dtype).to(tl.float32) * tl.load(weight + left).to(tl.float32)
    second = (second * scale).to(dtype).to(tl.float32) * tl.load(weight + right).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    angle = token * WIDTH
    turned = first * tl.load(cos + angle + left) - second * tl.load(sin + angle + left)
    tl.store(out + start + left, turned.to(dtype), mask=is_head)
    turned = second * tl.load(cos + angle + right) + first * tl.load(sin + angle + right)
    tl.store(out + start + right, turned.to(dtype), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    x, weight, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    token, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        own = tl.load(x + token * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        sums += own * tl.load(weight + expert * WIDTH + column, mask=is_column, other=0.0)
    tl.store(out + token * tl.num_programs(1) + expert, tl.sum(sums, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _best(  # type: ignore[no-untyped-def]
    logits, weight, index, row, count,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the softmax of [ROWS, HELD] logits, renormalised over each row's best experts.

    Of equal logits, the first one is chosen.
    """
    expert = tl.arange(0, HELD)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    logits = tl.where(expert < EXPERTS, logits, -float("inf"))
    share = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    share = share / tl.sum(share, axis=1)[:, None]
    shares = tl.zeros((ROWS, SLOTS), tl.float32)
    places = tl.zeros((ROWS, SLOTS), tl.int32)
    # Padding sorts after experts without any share.
    share = tl.where(expert < EXPERTS, share, -1.0)
    for choice in tl.static_range(CHOSEN):
        largest = tl.max(share, axis=1)[:, None]
        place = tl.min(tl.where(share == largest, expert, HELD), axis=1)[:, None]
        # Rows of NaN have no maximum, but their choice must still be a valid expert.
        place = tl.minimum(place, EXPERTS - 1)
        shares = tl.where(slot == choice, largest, shares)
        places = tl.where(slot == choice, place, places)
        share = tl.where(expert == place, -2.0, share)
    total = tl.maximum(tl.sum(shares, axis=1), 1e-8)[:, None]
    at = row[:, None] * CHOSEN + slot
    is_slot = (row < count)[:, None] & (slot < CHOSEN)
    tl.store(weight + at, (shares / total).to(weight.dtype.element_ty), mask=is_slot)
    tl.store(index + at, places.to(tl.int64), mask=is_slot)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _chosen(  # type: ignore[no-untyped-def]
    logits, weight, index, count,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, HELD)
    is_inside = (row < count)[:, None] & (expert < EXPERTS)[None, :]
    own = tl.load(logits + row[:, None] * EXPERTS + expert[None, :], mask=is_inside, other=0.0)
    _best(own, weight, index, row, count, EXPERTS, HELD, CHOSEN, SLOTS, ROWS)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _routed(  # type: ignore[no-untyped-def]
    x, router, logits, weight, index, count,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, HELD)
    is_row, is_expert = (row < count)[:, None], expert < EXPERTS
    sums = tl.zeros((ROWS, HELD), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        own = tl.load(x + at, mask=is_row & is_column[None, :], other=0.0)
        at = expert[None, :] * WIDTH + column[:, None]
        tile = tl.load(router + at, mask=is_expert[None, :] & is_column[:, None], other=0.0)
        # Three bfloat16 of eight bits hold a whole float32; the small parts first.
        high = tile.to(own.dtype)
        rest = tile - high.to(tl.float32)
        middle = rest.to(own.dtype)
        low = (rest - middle.to(tl.float32)).to(own.dtype)
        sums = tl.dot(own, low, sums)
        sums = tl.dot(own, middle, sums)
        sums = tl.dot(own, high, sums)
    at = row[:, None] * EXPERTS + expert[None, :]
    tl.store(logits + at, sums, mask=is_row & is_expert[None, :])
    _best(sums, weight, index, row, count, EXPERTS, HELD, CHOSEN, SLOTS, ROWS)
