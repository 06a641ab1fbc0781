"""`decode_attention` in Triton, by tables of pages.

`decode_attention.plain_decode` documents the call. TRITON_INTERPRET=1 runs it on a CPU.
"""

# Legend: R row (a job that writes), H query head, K kv head, D head width, N run of slots
import torch
import triton
import triton.language as tl
from torch import Tensor

from hyimg_cli.kernels.decode_attention import BLOCK, RUNS, PagedRows


def paged_decode(q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, rows: PagedRows) -> Tensor:
    """Return the attention [R, H, D] of one token a row: see `plain_decode`, its twin.

    K/V in memory have the dtype of `k`; the head width is a power of two.
    """
    (count, heads, width), kv_heads = q_RHD.shape, k_RKD.shape[1]
    assert width & (width - 1) == 0, "a head's width is a power of two"
    q_RHD, k_RKD = q_RHD.contiguous(), k_RKD.contiguous()
    assert v_RKD.stride(2) == 1, "a value's numbers lie side by side"
    _put[(count, kv_heads)](
        k_RKD, v_RKD, rows.pointers_2, rows.pages_RP, rows.length_R, rows.pages_RP.stride(0),
        # Values may still be in rows of the fused projection.
        v_RKD.stride(0), v_RKD.stride(1), KV_HEADS=kv_heads, WIDTH=width, PAGE=rows.page,
        enable_fp_fusion=True,
    )  # fmt: skip
    sums = q_RHD.new_empty(count, heads, RUNS, width, dtype=torch.float32)
    ends = q_RHD.new_empty(2, count, heads, RUNS, dtype=torch.float32)
    group = heads // kv_heads
    # A matrix product in Triton has at least 16 rows, and a kv head has fewer query heads.
    held = max(16, triton.next_power_of_2(group))
    _partial[(count, kv_heads, RUNS)](
        q_RHD, k_RKD, rows.pointers_2, rows.pages_RP, rows.length_R, rows.pages_RP.stride(0),
        sums, ends[0], ends[1], width**-0.5,
        KV_HEADS=kv_heads, GROUP=group, HELD=held, WIDTH=width, PAGE=rows.page,
        RUNS=RUNS, BLOCK=BLOCK, enable_fp_fusion=True,
    )  # fmt: skip
    out_RHD = torch.empty_like(q_RHD)
    _joined[(count, heads)](
        sums, ends[0], ends[1], out_RHD,
        HEADS=heads, RUNS=RUNS, WIDTH=width, enable_fp_fusion=True,
    )  # fmt: skip
    return out_RHD


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    k, v, pointers, pages, length, table_step, row_step, head_step,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    at = tl.load(length + row)
    slot = tl.load(pages + row * table_step + at // PAGE) * PAGE + at % PAGE
    slot = slot * KV_HEADS + head
    own = (row * KV_HEADS + head) * WIDTH + column
    kind = tl.pointer_type(k.dtype.element_ty)
    keys = tl.multiple_of(tl.load(pointers).to(kind), 16)
    values = tl.multiple_of(tl.load(pointers + 1).to(kind), 16)
    tl.store(keys + slot * WIDTH + column, tl.load(k + own))
    value = tl.load(v + row * row_step + head * head_step + column)
    tl.store(values + slot * WIDTH + column, value)


@triton.jit  # type: ignore[untyped-decorator]
def _partial(  # type: ignore[no-untyped-def]
    q, k, pointers, pages, length, table_step, sums, largest, weight, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend to one run of a row's slots with one kv head's query heads.

    An empty run has no weight.
    """
    row, head, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length + row) + 1
    share = tl.cdiv(tl.cdiv(count, RUNS), BLOCK) * BLOCK
    start = run * share
    stop = tl.minimum(start + share, count)
    kind = tl.pointer_type(k.dtype.element_ty)
    keys = tl.multiple_of(tl.load(pointers).to(kind), 16)
    values = tl.multiple_of(tl.load(pointers + 1).to(kind), 16)
    column = tl.arange(0, WIDTH)
    query = tl.arange(0, HELD)
    first = (row * KV_HEADS + head) * GROUP
    at = (first + query)[:, None] * WIDTH + column[None, :]
    is_query = query < GROUP
    own = tl.load(q + at, mask=is_query[:, None], other=0.0)
    best = tl.full((HELD,), -float("inf"), tl.float32)
    total = tl.zeros((HELD,), tl.float32)
    mixed = tl.zeros((HELD, WIDTH), tl.float32)
    for begin in range(start, stop, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        is_slot = token < stop
        page = tl.load(pages + row * table_step + token // PAGE, mask=is_slot, other=0)
        slot = (page * PAGE + token % PAGE) * KV_HEADS + head
        from_ = slot[:, None] * WIDTH + column[None, :]
        tile = tl.load(keys + from_, mask=is_slot[:, None], other=0.0)
        scores = tl.dot(own, tl.trans(tile), input_precision="ieee") * scale
        scores = tl.where(is_slot[None, :], scores, -float("inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1))
        faded = tl.exp(best - larger)
        shares = tl.exp(scores - larger[:, None])
        tile = tl.load(values + from_, mask=is_slot[:, None], other=0.0)
        mixed = mixed * faded[:, None] + tl.dot(shares.to(tile.dtype), tile, input_precision="ieee")
        total = total * faded + tl.sum(shares, axis=1)
        best = larger
    end = (first + query) * RUNS + run
    tl.store(largest + end, best, mask=is_query)
    tl.store(weight + end, total, mask=is_query)
    tl.store(sums + end[:, None] * WIDTH + column[None, :], mixed, mask=is_query[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
    sums, largest, weight, out, HEADS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr
):
    pair = tl.program_id(0) * HEADS + tl.program_id(1)
    run, column = tl.arange(0, RUNS), tl.arange(0, WIDTH)
    best = tl.load(largest + pair * RUNS + run)
    # The first run always has a slot: at least the new token's.
    share = tl.exp(best - tl.max(best, axis=0))
    total = tl.sum(share * tl.load(weight + pair * RUNS + run), axis=0)
    tile = tl.load(sums + (pair * RUNS + run)[:, None] * WIDTH + column[None, :])
    mixed = tl.sum(share[:, None] * tile, axis=0) / total
    tl.store(out + pair * WIDTH + column, mixed)
