"""Keep the K/V of new tokens in the arena, and attend span by span.

A query block is a run of new tokens of one sequence. Its mask is a list of spans, so a mask tensor
is built only if needed, and no row is padded to another's length. Rows of a prefix are kept in
pages. Those of a canvas, which each denoise step computes again, are only joined to its prefix's,
one layer at a time.
"""

# Legend: T new token (all blocks' rows, one after another), H query head, K kv head, D head width,
# S slot
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hyimg_cli.kernels.attention import SpanAttention
from hyimg_cli.kv.arena import Span, Storage
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.spans import QuerySpan


@dataclass(frozen=True)
class QueryBlock:
    """New tokens of one sequence: which rows they attend to, and where their own are kept.

    `prefix`: the rows before the new ones. `kept`: those of the new ones; None: in no page.
    `buffer`: what holds the pages, but on a rank that is led.
    """

    spans: Sequence[QuerySpan]
    storage: Storage
    prefix: Span
    kept: Span | None = None
    buffer: Buffer | None = None

    @property
    def count(self) -> int:
        return self.spans[-1].stop - self.spans[0].start

    @cached_property
    def seen(self) -> Span:
        """The slots of all rows that the last span sees, without a canvas's own."""
        return self.prefix if self.kept is None else self.prefix + self.kept


def kept_blocks(runs: Sequence[tuple[Buffer, Sequence[QuerySpan]]]) -> list[QueryBlock]:
    """Return blocks whose rows are kept after the prefixes of their buffers, with pages for them.

    Raises torch.OutOfMemoryError.
    """
    stops: dict[Buffer, int] = {}
    for buffer, spans in runs:
        stops[buffer] = max(stops.get(buffer, 0), spans[-1].stop)
    for buffer, stop in stops.items():
        buffer.reserve(stop)
    return [
        QueryBlock(
            spans,
            buffer.arena.storage,
            buffer.span(0, spans[0].start),
            buffer.span(spans[0].start, spans[-1].stop),
            buffer,
        )
        for buffer, spans in runs
    ]


def canvas_block(buffer: Buffer, spans: Sequence[QuerySpan]) -> QueryBlock:
    """Return the block of a canvas after a complete prefix, for one forward: pages may move."""
    return QueryBlock(spans, buffer.arena.storage, buffer.prefix, None, buffer)


def appended_spans(runs: Iterable[tuple[Buffer, int]]) -> list[QuerySpan]:
    """Return spans of text appended to each buffer's prefix, in the order of the runs."""
    stops: dict[Buffer, int] = {}
    spans: list[QuerySpan] = []
    for buffer, count in runs:
        start = stops.get(buffer, buffer.length)
        stops[buffer] = start + count
        spans.append(QuerySpan(start, start + count, is_causal=True))
    return spans


def commit_rows(
    buffers: Sequence[Buffer], blocks: Sequence[QueryBlock], hidden_TM: Tensor
) -> list[Tensor]:
    """Add the blocks' tokens to their buffers' prefixes; return each block's last row [M]."""
    for buffer, block in zip(buffers, blocks, strict=True):
        buffer.commit(block.spans[-1].stop)
    return [hidden_TM[end - 1] for end in accumulate(block.count for block in blocks)]


def attend_blocks(
    span_attention: SpanAttention,
    layer: int,
    blocks: Sequence[QueryBlock],
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
) -> Tensor:
    """Return attention [T, H, D] of a layer, and keep the rows that the blocks keep.

    Rows after those of the blocks are padding.
    """
    seen_THD: Tensor | None = None
    at = 0
    for block in blocks:
        own_TKD = k_TKD[at : at + block.count], v_TKD[at : at + block.count]
        keys_KSD, values_KSD = _seen(layer, block, own_TKD)
        for span in block.spans:
            stop = at + span.stop - span.start
            keys, values = keys_KSD[:, : span.stop], values_KSD[:, : span.stop]
            own_THD = span_attention(q_THD[at:stop], keys, values, span.is_causal)
            if len(own_THD) == len(q_THD):
                return own_THD
            # Each span's output goes to its place at once, so nothing is joined afterwards.
            seen_THD = torch.empty_like(q_THD) if seen_THD is None else seen_THD
            seen_THD[at:stop] = own_THD
            at = stop
    assert seen_THD is not None, "there are queries"
    if at < len(q_THD):
        seen_THD[at:] = 0
    return seen_THD


def _seen(layer: int, block: QueryBlock, own_TKD: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values of a block's prefix and its own, [K, S, D] each."""
    storage = block.storage
    if block.kept is not None:
        storage.write(layer, block.kept, *own_TKD)
    keys, values = storage.read(layer, block.seen, None if block.kept else own_TKD)
    return keys.transpose(0, 1), values.transpose(0, 1)
