"""The decoder: every layer has two sets of weights, chosen by the kind of a token.

    und    texts, ViT tokens, all markers           plain names
    gen    latent tokens                            names with `_moe_gen`

Attention is shared: each token attends to both kinds. Within a forward, rows are sorted by kind, so
each set is one matrix product; attention has them in the order of their sequences.
"""

# Legend: T new token in its sequence's order, R row (und, then gen), M model width, H query head,
# K kv head, D head width
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.attention import (
    PackedAttention,
    SpanAttention,
    attention_of,
    masked_attention,
    packed_attention_of,
)
from hyimg_cli.kernels.rows import padding
from hyimg_cli.kernels.transfer import sent
from hyimg_cli.models.bagel.config import DecoderShape
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.common.layers import FusedPart, RMSNorm, choose_ops, rope_rows
from hyimg_cli.models.common.packed import Blocks, attend, packed

_GEN = "_moe_gen"


@dataclass(frozen=True)
class NewTokens:
    """New tokens of one sequence, with each one's rope id and whether it is a latent."""

    block: QueryBlock
    positions: Sequence[int]
    is_gen: Sequence[bool]


# The und rows, then any gen rows.
Parts: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class KindRows:
    """Where a forward's tokens are: rows of each kind, und first, padded with zeros.

    `counts`: rows of each kind. `row_T`: the row of each token, counted through both kinds; None if
    rows and tokens are the same. `ropes`: cosines and sines [2, R, D] of each kind.
    """

    counts: tuple[int, ...]
    row_T: Tensor | None
    ropes: Parts
    blocks: Blocks

    def to_tokens(self, parts: Parts) -> Tensor:
        x_RM = parts[0] if len(parts) == 1 else torch.cat(parts)
        return x_RM if self.row_T is None else x_RM[self.row_T]

    def from_tokens(self, x_TM: Tensor) -> Parts:
        if self.row_T is None:
            return (x_TM,)
        empty_RM = x_TM.new_zeros(sum(self.counts), x_TM.shape[1])
        return empty_RM.index_copy(0, self.row_T, x_TM).split(self.counts)


class InPairs(nn.Module):
    """A module with two of each part: one for und rows, one for gen."""

    def pair(self, name: str, make: Callable[[], nn.Module]) -> None:
        """Make both, under the released names."""
        self.add_module(name, make())
        self.add_module(name + _GEN, make())

    def part(self, name: str, number: int) -> Any:
        """Return the part for und rows (0) or gen rows (1)."""
        return self._modules[name + _GEN * number]

    def both(self, name: str, rows: Parts) -> Parts:
        """Process each row with the part for its kind."""
        return tuple(self.part(name, number)(x_RM) for number, x_RM in enumerate(rows))

    def added(self, name: str, rows: Parts, pending: Parts | None) -> tuple[Parts, Parts]:
        """Return rows plus what is still to be added, and their norms."""
        pairs = [
            self.part(name, number).added(x_RM, None if pending is None else pending[number])
            for number, x_RM in enumerate(rows)
        ]
        return tuple(x_RM for x_RM, _ in pairs), tuple(normed_RM for _, normed_RM in pairs)


class SwiGlu(FusedPart):
    """SwiGLU."""

    def __init__(self, arch: DecoderShape) -> None:
        super().__init__()
        width, inner = arch.hidden_size, arch.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_RM: Tensor) -> Tensor:
        return self.down_proj(self.ops.swiglu(self.up_proj(x_RM), self.gate_proj(x_RM)))


class HeadNorm(FusedPart):
    """A norm of each head, then its rotation by the token's angles."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps

    def forward(self, x_RM: Tensor, rope_2RD: Tensor) -> Tensor:
        cos_RD, sin_RD = rope_2RD.unbind()
        heads_RHD = x_RM.unflatten(-1, (-1, len(self.weight)))
        return self.ops.norm_rotate(heads_RHD, (cos_RD, sin_RD), self.weight, self.eps)


class PairedAttention(InPairs):
    """Grouped-query attention; queries and keys are normed, then rotated."""

    def __init__(self, arch: DecoderShape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, arch.head_dim
        width, eps = arch.hidden_size, arch.rms_norm_eps
        inner = arch.num_attention_heads * arch.head_dim
        kv = arch.num_key_value_heads * arch.head_dim
        self.pair("q_proj", lambda: nn.Linear(width, inner))
        self.pair("k_proj", lambda: nn.Linear(width, kv))
        self.pair("v_proj", lambda: nn.Linear(width, kv))
        self.pair("o_proj", lambda: nn.Linear(inner, width, bias=False))
        self.pair("q_norm", lambda: HeadNorm(arch.head_dim, eps))
        self.pair("k_norm", lambda: HeadNorm(arch.head_dim, eps))
        self.span_attention: SpanAttention = masked_attention

    def forward(self, x: Parts, rows: KindRows) -> Parts:
        q_THD, k_TKD, v_TKD = self.project(x, rows)
        seen_THD = attend(rows.blocks, self.span_attention, self.layer, q_THD, k_TKD, v_TKD)
        return self.both("o_proj", rows.from_tokens(seen_THD.flatten(1)))

    def project(self, x: Parts, rows: KindRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the tokens as the cache stores them."""

        def normed(name: str) -> Tensor:
            projected = zip(self.both(f"{name}_proj", x), rows.ropes, strict=True)
            return rows.to_tokens(
                tuple(
                    self.part(f"{name}_norm", number)(x_RM, rope_2RD)
                    for number, (x_RM, rope_2RD) in enumerate(projected)
                )
            )

        v_TM = rows.to_tokens(self.both("v_proj", x))
        return normed("q"), normed("k"), v_TM.unflatten(-1, (-1, self.head_dim))


class Layer(InPairs):
    """Pre-norm attention and MLP, each added to the residual stream.

    The MLP's output is returned separately: the next layer adds it with its norm.
    """

    def __init__(self, arch: DecoderShape, layer: int) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_norm_eps
        self.pair("input_layernorm", lambda: RMSNorm(width, eps))
        self.self_attn = PairedAttention(arch, layer)
        self.pair("post_attention_layernorm", lambda: RMSNorm(width, eps))
        self.pair("mlp", lambda: SwiGlu(arch))

    def forward(self, x: Parts, pending: Parts | None, rows: KindRows) -> tuple[Parts, Parts]:
        """Return the stream, and what is still to be added to it.

        `pending`: what the layer before left to add.
        """
        x, normed = self.added("input_layernorm", x, pending)
        x, normed = self.added("post_attention_layernorm", x, self.self_attn(normed, rows))
        return x, self.both("mlp", normed)


class PairedDecoder(InPairs):
    """Token rows in, their last states out; each query block keeps its keys and values.

    `rows_seen` counts every token row that ever entered. `row_multiple` above 1 pads the rows of
    each kind, so that a row's bits do not depend on other rows.
    """

    def __init__(self, arch: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        layers = nn.ModuleList(Layer(arch, number) for number in range(arch.num_hidden_layers))
        self.layers = cast("Sequence[Layer]", layers)
        self.pair("norm", lambda: RMSNorm(arch.hidden_size, arch.rms_norm_eps))
        self.head_dim, self.theta = arch.head_dim, arch.rope_theta
        self.rows_seen, self.row_multiple = 0, 1
        self.packed_attention: PackedAttention | None = None

    def choose_kernels(self) -> None:
        """Choose the kernels for the weights' device; called once the weights are in place."""
        device = self.embed_tokens.weight.device
        choose_ops(self, device)
        self.packed_attention = packed_attention_of(device, self.embed_tokens.weight.dtype)
        for layer in self.layers:
            layer.self_attn.span_attention = attention_of(device)

    def forward(self, x_TM: Tensor, new: Sequence[NewTokens]) -> Tensor:
        """Return the states after the final norm, [T, M], of all new tokens in order."""
        self.rows_seen += len(x_TM)
        rows = self.rows(new, x_TM.device)
        x, pending = rows.from_tokens(x_TM), None
        for layer in self.layers:
            x, pending = layer(x, pending, rows)
        return rows.to_tokens(self.added("norm", x, pending)[1])

    def rows(self, new: Sequence[NewTokens], device: torch.device) -> KindRows:
        """Return the places of all new tokens."""
        is_gen = [one for tokens in new for one in tokens.is_gen]
        is_gen_T = torch.tensor(is_gen)
        position_T = torch.tensor([one for tokens in new for one in tokens.positions])
        # Und rows first, then gen, each kind padded to a multiple.
        gen, multiple = sum(is_gen), self.row_multiple
        und = len(is_gen_T) - gen
        counts = tuple(n + padding(n, multiple) for n in (und, gen)[: 2 if gen else 1])
        row_T = None
        if sum(counts) > und:
            row_T = torch.empty(len(is_gen_T), dtype=torch.int64)
            row_T[~is_gen_T], row_T[is_gen_T] = torch.arange(und), torch.arange(gen) + counts[0]
            position_T = torch.zeros(sum(counts), dtype=torch.int64).index_copy(
                0, row_T, position_T
            )
            row_T = sent(row_T, device)
        rope_2RD = rope(sent(position_T, device), self.head_dim, self.theta)
        blocks = packed(self.packed_attention, [tokens.block for tokens in new])
        return KindRows(counts, row_T, rope_2RD.split(counts, dim=1), blocks)


def rope(position_R: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return cosines and sines of each row, float32 [2, R, D]."""
    exponent = torch.arange(0, head_dim, 2, device=position_R.device).float() / head_dim
    return rope_rows(position_R[:, None].float() * (1.0 / theta**exponent))
