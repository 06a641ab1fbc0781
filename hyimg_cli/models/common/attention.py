"""Write the K/V of new tokens to their buffers, and attend span by span.

A query block is a run of new tokens of one sequence. Its mask is a list of spans, so a mask tensor
is built only if needed, and no row is padded to another's length.
"""

# Legend: T new token (all blocks' rows, one after another), H query head, K kv head, D head width,
# S slot
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hyimg_cli.kernels.attention import SpanAttention
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.spans import QuerySpan


@dataclass(frozen=True)
class QueryBlock:
    """New tokens of one sequence: where they are written and what they attend to."""

    buffer: Buffer
    spans: Sequence[QuerySpan]

    @property
    def start(self) -> int:
        """The slot of the first token in the buffer."""
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop

    @property
    def count(self) -> int:
        return self.stop - self.start


def appended_spans(runs: Iterable[tuple[Buffer, int]]) -> list[QuerySpan]:
    """Return spans of text appended to each buffer's prefix, in the order of the runs."""
    stops: dict[int, int] = {}
    spans: list[QuerySpan] = []
    for buffer, count in runs:
        start = stops.get(id(buffer), buffer.length)
        stops[id(buffer)] = start + count
        spans.append(QuerySpan(start, start + count, is_causal=True))
    return spans


def commit_rows(blocks: Sequence[QueryBlock], hidden_TM: Tensor) -> list[Tensor]:
    """Add the blocks' tokens to their buffers' prefixes; return each block's last row [M]."""
    for block in blocks:
        block.buffer.commit(block.stop)
    return [hidden_TM[end - 1] for end in accumulate(block.count for block in blocks)]


def attend_blocks(
    span_attention: SpanAttention,
    layer: int,
    blocks: Sequence[QueryBlock],
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
) -> Tensor:
    """Write a layer's K/V to the blocks' buffers; return attention [T, H, D].

    Rows after those of the blocks are padding.
    """
    seen_THD: Tensor | None = None
    at = 0
    for block in blocks:
        rows = slice(at, at + block.count)
        block.buffer.write(layer, block.start, k_TKD[rows], v_TKD[rows])
        for span in block.spans:
            stop = at + span.stop - span.start
            keys_KSD, values_KSD = block.buffer.read(layer, span.stop)
            own_THD = span_attention(q_THD[at:stop], keys_KSD, values_KSD, span.is_causal)
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
