"""Attention of one layer: fused projections, rotation, norms, and the softmax row by row."""

# Legend: T new token (all branches' rows, one after another), H query head, K kv head, D head
# width, M model width
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.attention import RowAttention, masked_attention
from hyimg_cli.kernels.decode_attention import DecodeAttention, Rows
from hyimg_cli.kernels.ops import PLAIN, PlainOps
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.attention import QueryBlock, attend_blocks
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.rope import Rope


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


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, cast to the input's dtype, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.rows: PlainOps = PLAIN

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
        self.rows: PlainOps = PLAIN

    def forward(self, x_TM: Tensor, rope: Rope, new: Sequence[QueryBlock] | StepRows) -> Tensor:
        """Attention output [T, M] of the new tokens, one after another in `x_TM`."""
        q_THD, k_TKD, v_TKD = self.project(x_TM, rope)
        if isinstance(new, StepRows):
            seen_THD = new.attend(q_THD, k_TKD, v_TKD, new.of_layer(self.layer))
        else:
            seen_THD = attend_blocks(self.by_row, self.layer, new, q_THD, k_TKD, v_TKD)
        projected: Tensor = self.o_proj(seen_THD.flatten(1))
        return projected

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
