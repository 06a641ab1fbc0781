"""Attention of one layer: fused projections, rotation, norms, and the softmax row by row.

A query block is a run of new tokens of one branch. Its mask is a list of spans, each a run of
queries with one rule, so no mask tensor is built where none is needed and no row is padded to
another's length.
"""

# Legend: T new token (all branches' rows, one after another), H query head, K kv head, D head
# width, M model width, S slot
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.attention import RowAttention, masked_attention
from hyimg_cli.kernels.decode_attention import DecodeAttention, Rows
from hyimg_cli.kernels.rowwise import PLAIN, Rowwise
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.rope import Rope


@dataclass(frozen=True)
class QuerySpan:
    """Queries `[start, stop)`: they see every slot before `stop`, or, if causal, up to
    themselves.
    """

    start: int
    stop: int
    is_causal: bool


@dataclass(frozen=True)
class QueryBlock:
    """New tokens `[start, stop)` of one branch: where they are written and what they see."""

    buffer: Buffer
    start: int
    stop: int
    pieces: tuple[QuerySpan, ...]

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StepRows:
    """One new token of each of several branches, whose places are known on the device alone."""

    of_layer: Callable[[int], Rows]
    attend: DecodeAttention


def addresses(buffers: Sequence[Buffer]) -> list[int]:
    """Pointers of every layer's keys, then values, a row each, and last the steps between heads."""
    sides = [b.keys_HSD for b in buffers], [b.values_HSD for b in buffers]
    layers = range(len(buffers[0].keys_HSD))
    pointers = [[row[layer].data_ptr() for row in side] for side in sides for layer in layers]
    return [*chain(*pointers), *(buffer.capacity for buffer in buffers)]


def pieces(
    start: int, stop: int, full_spans: Sequence[tuple[int, int]], cuts: Iterable[int] = ()
) -> tuple[QuerySpan, ...]:
    """The mask of tokens `[start, stop)`: causal, but fully visible within each span.

    A span must lie wholly inside or outside: its tokens depend on each other and are computed
    together. Causal runs also end at `cuts`, wherever a prefix may be shared: the same runs, and so
    the same bits, whether what comes before a cut is computed here or was there already.
    """
    borders = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
    result: list[QuerySpan] = []
    at = start
    for span_start, span_stop in sorted(full_spans):
        if span_stop <= start or span_start >= stop:
            continue
        assert start <= span_start < span_stop <= stop, "an image is never computed in parts"
        result += _causal(at, span_start, borders)
        result.append(QuerySpan(span_start, span_stop, is_causal=False))
        at = span_stop
    return (*result, *_causal(at, stop, borders))


def _causal(start: int, stop: int, borders: Sequence[int]) -> list[QuerySpan]:
    inner = [border for border in borders if start < border < stop]
    edges = [start, *inner, stop]
    return [QuerySpan(a, b, is_causal=True) for a, b in pairwise(edges) if a < b]


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, cast to the input's dtype, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.rows: Rowwise = PLAIN

    def forward(self, x: Tensor) -> Tensor:
        return self.rows.norm(x, self.weight, self.eps)

    def added(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """`x + more`, and the norm of it."""
        return self.rows.added_norm(x, more, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention whose fused rows are interleaved per kv head: q, q, .., k, v."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads = arch.num_attention_heads, arch.num_key_value_heads
        self.group, self.head_dim = arch.heads_per_kv_head, arch.head_dim
        fused = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(arch.hidden_size, fused, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, arch.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, arch.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, arch.rms_norm_eps)
        # The kernels of the layer's device are set once the weights are in their places.
        self.by_row: RowAttention = masked_attention
        self.rows: Rowwise = PLAIN

    def forward(self, x_TM: Tensor, rope: Rope, new: Sequence[QueryBlock] | StepRows) -> Tensor:
        """Attention output [T, M] of the new tokens, one after another in `x_TM`."""
        q_THD, k_TKD, v_TKD = self.project(x_TM, rope)
        if isinstance(new, StepRows):
            seen_THD = new.attend(q_THD, k_TKD, v_TKD, new.of_layer(self.layer))
        else:
            seen_THD = self._by_query_block(new, q_THD, k_TKD, v_TKD)
        projected: Tensor = self.o_proj(seen_THD.flatten(1))
        return projected

    def _by_query_block(
        self, query_blocks: Sequence[QueryBlock], q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> Tensor:
        seen_THD: Tensor | None = None
        at = 0
        for query_block in query_blocks:
            rows = slice(at, at + query_block.count)
            query_block.buffer.write(self.layer, query_block.start, k_TKD[rows], v_TKD[rows])
            for piece in query_block.pieces:
                stop = at + piece.stop - piece.start
                keys_KSD, values_KSD = query_block.buffer.read(self.layer, piece.stop)
                own_THD = self.by_row(q_THD[at:stop], keys_KSD, values_KSD, piece.is_causal)
                if len(own_THD) == len(q_THD):
                    return own_THD
                # What each piece has seen goes to its place at once: nothing is joined behind them.
                seen_THD = torch.empty_like(q_THD) if seen_THD is None else seen_THD
                seen_THD[at:stop] = own_THD
                at = stop
        assert seen_THD is not None, "there are queries"
        if at < len(q_THD):  # rows of no query block are padding
            seen_THD[at:] = 0
        return seen_THD

    def project(self, x_TM: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, K, D] as the cache holds them: turned, then
        normed.
        """
        fused = self.qkv_proj(x_TM).unflatten(-1, (self.kv_heads, self.group + 2, self.head_dim))
        norms = self.query_layernorm, self.key_layernorm
        return self.rows.heads(
            fused,
            (rope.cos_TD, rope.sin_TD),
            (norms[0].weight, norms[1].weight),
            norms[0].eps,
        )
