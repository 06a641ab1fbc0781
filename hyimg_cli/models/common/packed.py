"""Attend all query blocks of a forward in at most two calls a layer, by torch's `varlen_attn`.

Causal spans are one call, full spans another. Rows in pages are read where they are, by a table of
pages; canvases are packed behind their prefixes, one branch after another. What the calls are told
is made once a forward, and sent without waiting. Rows are named by tensors of slots, not by runs: a
compiled layer is then one graph for sequences of any length, wherever their pages lie.
"""

# Legend: T new token (all blocks' rows, one after another), H query head, K kv head, D head width,
# S slot, N span of one kind, P page
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from hyimg_cli.kernels.attention import PackedAttention, SpanAttention
from hyimg_cli.kernels.transfer import sent, to_device
from hyimg_cli.kv.arena import page_rows
from hyimg_cli.models.common.attention import QueryBlock, attend_blocks

_Sides = tuple[Tensor, Tensor]  # keys and values


@dataclass(frozen=True)
class _Spans:
    """Spans of one kind: each one's rows of the forward, the slots that it sees, and its block."""

    is_causal: bool
    rows: Sequence[tuple[int, int]]
    seen: Sequence[int]
    owners: Sequence[int]


@dataclass(frozen=True)
class _Tables:
    """What a call is told of its spans, on a device: int32, as the kernel has it.

    Queries of a span begin at `queries`, its keys at `keys` of the packed ones or in `pages_NP`,
    which `slots_N` of them are. `rows_T`: int64; None if the queries lie one after another.
    """

    queries: Tensor
    keys: Tensor
    slots_N: Tensor
    pages_NP: Tensor | None
    rows_T: Tensor | None


@dataclass(frozen=True)
class _Told:
    """What all layers on a device are told: `slots` of the rows that are kept, or of prefixes."""

    slots: Tensor
    tables: Sequence[_Tables]


class Packing:
    """The blocks of a forward: those of either only canvases, or only of rows that are kept."""

    def __init__(self, attention: PackedAttention, blocks: Sequence[QueryBlock]) -> None:
        self.blocks, self._attention = blocks, attention
        self._is_kept = blocks[0].kept is not None
        self._counts = [block.count for block in blocks]
        self._starts = [0, *accumulate(self._counts)]
        # Rows before each block's own, and where its keys begin if both are packed.
        self._prefixes = [block.spans[0].start for block in blocks]
        self._key_starts = [0, *accumulate(block.spans[-1].stop for block in blocks)]
        # Full spans of canvases are first: causal ones write over rows that they take with them.
        self._kinds = [kind for kind in map(self._spans, (False, True)) if kind.rows]
        self._told_on: dict[torch.device, _Told] = {}

    def attend(
        self, span_attention: SpanAttention, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> Tensor:
        """Return attention [T, H, D] of a layer, and keep the rows that the blocks keep.

        Rows after those of the blocks are padding.
        """
        told = self.told(q_THD.device)
        sides = self._sides(layer, told.slots, k_TKD, v_TKD)
        count, out_THD = len(q_THD), None
        for kind, tables in zip(self._kinds, told.tables, strict=True):
            if kind.is_causal or self._attention.takes_full:
                seen_THD = self._in_one_call(q_THD, sides, kind, tables)
                if len(seen_THD) == count:
                    out_THD = seen_THD
                    continue
                out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
                if tables.rows_T is None:
                    out_THD[kind.rows[0][0] : kind.rows[-1][1]] = seen_THD
                else:
                    out_THD.index_copy_(0, tables.rows_T, seen_THD)
                continue
            out_THD = torch.empty_like(q_THD)
            for number, (start, stop) in enumerate(kind.rows):
                seen = self._seen(number, kind, tables, sides)
                out_THD[start:stop] = span_attention(q_THD[start:stop], *seen, False)
        assert out_THD is not None, "there are queries"
        if self._starts[-1] < count:
            out_THD[self._starts[-1] :] = 0
        return out_THD

    def _in_one_call(self, q_THD: Tensor, sides: _Sides, kind: _Spans, tables: _Tables) -> Tensor:
        """Return attention of a kind's rows, one span after another."""
        (start, _), (_, stop) = kind.rows[0], kind.rows[-1]
        rows_T = tables.rows_T
        own_THD = q_THD[start:stop] if rows_T is None else q_THD.index_select(0, rows_T)
        # A call of single rows alone would be another kernel's, with other bits.
        longest = max(2, *(end - begin for begin, end in kind.rows))
        seen_THD: Tensor = self._attention.varlen(
            own_THD, *sides, tables.queries, tables.keys, longest, max(kind.seen),
            window_size=(-1, 0) if kind.is_causal else (-1, -1), enable_gqa=True,
            seqused_k=tables.slots_N, block_table=tables.pages_NP, num_splits=1,
        )  # fmt: skip
        return seen_THD

    def _spans(self, is_causal: bool) -> _Spans:
        rows, seen, owners = list[tuple[int, int]](), list[int](), list[int]()
        for number, (block, start) in enumerate(zip(self.blocks, self._starts, strict=False)):
            offset = start - block.spans[0].start
            for span in block.spans:
                if span.is_causal != is_causal:
                    continue
                begin, end = offset + span.start, offset + span.stop
                if not (is_causal or self._is_kept) and end == start + block.count:
                    # A picture's few rows before it are computed with it: nothing is gathered.
                    begin = start
                rows.append((begin, end))
                seen.append(span.stop)
                owners.append(number)
        return _Spans(is_causal, rows, seen, owners)

    def told(self, device: torch.device) -> _Told:
        """Return what all layers on a device are told, made once."""
        if device not in self._told_on:
            spans = [block.kept or block.prefix for block in self.blocks]
            slots = torch.cat([span.index(device) for span in spans])
            tables = [self._tables(kind, device) for kind in self._kinds]
            self._told_on[device] = _Told(slots, tables)
        return self._told_on[device]

    def _tables(self, kind: _Spans, device: torch.device) -> _Tables:
        queries = [0, *accumulate(stop - start for start, stop in kind.rows)]
        # With pages the kernel asks for `keys` too, and does not read it.
        keys = [0, *accumulate(kind.seen)] if self._is_kept else self._key_starts
        lists = [self._pages(owner, device) for owner in kind.owners] if self._is_kept else [[]]
        width = max(map(len, lists))
        pages = [*chain(*(one + [0] * (width - len(one)) for one in lists))]
        numbers = (queries, keys, kind.seen, pages)
        told = sent(torch.tensor([*chain(*numbers)], dtype=torch.int32), device)
        starts, own, slots_N, table = told.split([*map(len, numbers)])
        is_run = all(a[1] == b[0] for a, b in zip(kind.rows, kind.rows[1:], strict=False))
        rows = () if is_run else [row for start, stop in kind.rows for row in range(start, stop)]
        return _Tables(
            starts,
            own,
            slots_N,
            table.view(-1, width) if self._is_kept else None,
            to_device(rows, device) if rows else None,
        )

    def _pages(self, owner: int, device: torch.device) -> list[int]:
        page, runs = page_rows(device), self.blocks[owner].seen.runs
        return [slot // page for start, stop in runs for slot in range(start, stop, page)]

    def _sides(self, layer: int, slots: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> _Sides:
        """Return all pages, [P, page, K, D], or packed keys and values, [S, K, D]."""
        storage = self.blocks[0].storage
        return (
            self._side(storage.keys_SKD[layer], slots, k_TKD[: self._starts[-1]]),
            self._side(storage.values_SKD[layer], slots, v_TKD[: self._starts[-1]]),
        )

    def _side(self, side_SKD: Tensor, slots: Tensor, own_TKD: Tensor) -> Tensor:
        if self._is_kept:
            side_SKD.index_copy_(0, slots, own_TKD)
            return side_SKD.unflatten(0, (-1, page_rows(side_SKD.device)))
        before = side_SKD.index_select(0, slots).split(self._prefixes)
        return torch.cat([*chain(*zip(before, own_TKD.split(self._counts), strict=True))])

    def _seen(self, number: int, kind: _Spans, tables: _Tables, sides: _Sides) -> _Sides:
        """Return the keys and values that one span sees, [K, S, D] each."""
        start = 0
        if tables.pages_NP is None:
            start = self._key_starts[kind.owners[number]]
        else:
            pages_P = tables.pages_NP[number]
            keys, values = (side.index_select(0, pages_P).flatten(0, 1) for side in sides)
            sides = keys, values
        stop = start + kind.seen[number]
        keys, values = (side[start:stop].transpose(0, 1) for side in sides)
        return keys, values


Blocks = Sequence[QueryBlock] | Packing


def attend(
    blocks: Blocks,
    span_attention: SpanAttention,
    layer: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
) -> Tensor:
    """Return attention [T, H, D] of a layer, and keep the rows that the blocks keep."""
    if isinstance(blocks, Packing):
        return blocks.attend(span_attention, layer, q_THD, k_TKD, v_TKD)
    return attend_blocks(span_attention, layer, blocks, q_THD, k_TKD, v_TKD)


def packed(attention: PackedAttention | None, blocks: Sequence[QueryBlock]) -> Blocks:
    """Return the blocks of a forward as one packing, where that is possible."""
    if attention is None or not blocks or blocks[0].storage.keys_SKD[0].dtype.itemsize != 2:
        return blocks
    kept = sum(block.kept is not None for block in blocks)
    # Keys of canvases are packed once: a call takes a span of each canvas.
    kinds = [Counter(span.is_causal for span in block.spans) for block in blocks]
    are_alike = all(kind == kinds[0] and max(kind.values()) == 1 for kind in kinds)
    if kept == len(blocks) or (not kept and are_alike):
        return Packing(attention, blocks)
    return blocks
