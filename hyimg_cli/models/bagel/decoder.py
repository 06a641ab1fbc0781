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
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.attention import RowAttention, masked_attention
from hyimg_cli.kernels.ops import rotate
from hyimg_cli.kernels.rows import padding
from hyimg_cli.kernels.transfer import sent, to_device
from hyimg_cli.models.bagel.config import DecoderShape
from hyimg_cli.models.common.attention import QueryBlock, attend_blocks

_GEN = "_moe_gen"


@dataclass(frozen=True)
class NewTokens(QueryBlock):
    """New tokens of one sequence, with each one's rope id and whether it is a latent."""

    positions: Sequence[int]
    is_gen: Sequence[bool]


@dataclass(frozen=True)
class KindRows:
    """Where a forward's tokens are: `und` rows first, `count` in all, padded with zeros.

    `row_T`: the row of each token; None if rows and tokens are the same.
    """

    und: int
    count: int
    row_T: Tensor | None
    cos_TD: Tensor
    sin_TD: Tensor
    blocks: Sequence[NewTokens]

    def of_tokens(self, x_RM: Tensor) -> Tensor:
        return x_RM if self.row_T is None else x_RM[self.row_T]

    def from_tokens(self, x_TM: Tensor) -> Tensor:
        if self.row_T is None:
            return x_TM
        empty_RM = x_TM.new_zeros(self.count, x_TM.shape[1])
        return empty_RM.index_copy(0, self.row_T, x_TM)


class InPairs(nn.Module):
    """A module with two of each part: one for und rows, one for gen."""

    def pair(self, name: str, make: Callable[[], nn.Module]) -> None:
        """Make both, under the released names."""
        self.add_module(name, make())
        self.add_module(name + _GEN, make())

    def both(self, name: str, x_RM: Tensor, und: int) -> Tensor:
        """Process each row with the part for its kind."""
        parts = self._modules
        if und == len(x_RM):
            return cast(nn.Module, parts[name])(x_RM)
        halves = zip((name, name + _GEN), x_RM.split([und, len(x_RM) - und]), strict=True)
        return torch.cat([cast(nn.Module, parts[part])(rows) for part, rows in halves])


class SwiGlu(nn.Module):
    """SwiGLU."""

    def __init__(self, arch: DecoderShape) -> None:
        super().__init__()
        width, inner = arch.hidden_size, arch.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_RM: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_RM)) * self.up_proj(x_RM))


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
        self.pair("q_norm", lambda: nn.RMSNorm(arch.head_dim, eps))
        self.pair("k_norm", lambda: nn.RMSNorm(arch.head_dim, eps))
        self.by_row: RowAttention = masked_attention

    def forward(self, x_RM: Tensor, rows: KindRows) -> Tensor:
        q_THD, k_TKD, v_TKD = self.project(x_RM, rows)
        seen_THD = attend_blocks(self.by_row, self.layer, rows.blocks, q_THD, k_TKD, v_TKD)
        return self.both("o_proj", rows.from_tokens(seen_THD.flatten(1)), rows.und)

    def project(self, x_RM: Tensor, rows: KindRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the tokens as the cache stores them."""

        def heads(name: str) -> Tensor:
            return self.both(name, x_RM, rows.und).unflatten(-1, (-1, self.head_dim))

        q_RHD = self.both("q_norm", heads("q_proj"), rows.und)
        k_RKD = self.both("k_norm", heads("k_proj"), rows.und)
        q_THD, k_TKD = (
            rotate(rows.of_tokens(x_RHD), rows.cos_TD, rows.sin_TD).to(x_RHD.dtype)
            for x_RHD in (q_RHD, k_RKD)
        )
        return q_THD, k_TKD, rows.of_tokens(heads("v_proj"))


class Layer(InPairs):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, arch: DecoderShape, layer: int) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_norm_eps
        self.pair("input_layernorm", lambda: nn.RMSNorm(width, eps))
        self.self_attn = PairedAttention(arch, layer)
        self.pair("post_attention_layernorm", lambda: nn.RMSNorm(width, eps))
        self.pair("mlp", lambda: SwiGlu(arch))

    def forward(self, x_RM: Tensor, rows: KindRows) -> Tensor:
        und = rows.und
        x_RM = x_RM + self.self_attn(self.both("input_layernorm", x_RM, und), rows)
        normed_RM = self.both("post_attention_layernorm", x_RM, und)
        return x_RM + self.both("mlp", normed_RM, und)


class PairedDecoder(InPairs):
    """Token rows in, their last states out; keys and values go to each query block's buffer.

    `rows_seen` counts every token row that ever entered. `row_multiple` above 1 pads the rows of
    each kind, so that a row's bits do not depend on other rows.
    """

    def __init__(self, arch: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        layers = nn.ModuleList(Layer(arch, number) for number in range(arch.num_hidden_layers))
        self.layers = cast("Sequence[Layer]", layers)
        self.pair("norm", lambda: nn.RMSNorm(arch.hidden_size, arch.rms_norm_eps))
        self.head_dim, self.theta = arch.head_dim, arch.rope_theta
        self.rows_seen, self.row_multiple = 0, 1

    def forward(self, x_TM: Tensor, blocks: Sequence[NewTokens]) -> Tensor:
        """Return the states after the final norm, [T, M], of the tokens of all blocks in order."""
        self.rows_seen += len(x_TM)
        rows = self.rows(blocks, x_TM.device)
        x_RM = rows.from_tokens(x_TM)
        for layer in self.layers:
            x_RM = layer(x_RM, rows)
        return rows.of_tokens(self.both("norm", x_RM, rows.und))

    def rows(self, blocks: Sequence[NewTokens], device: torch.device) -> KindRows:
        """Return the places of all blocks' tokens."""
        is_gen_T = torch.tensor([one for block in blocks for one in block.is_gen])
        # Und rows first, then gen, each kind padded to a multiple.
        gen, multiple = int(is_gen_T.sum()), self.row_multiple
        und = len(is_gen_T) - gen
        first = und + padding(und, multiple)
        count = first + gen + padding(gen, multiple)
        row_T = None
        if gen or count > len(is_gen_T):
            row_T = torch.empty(len(is_gen_T), dtype=torch.int64)
            row_T[~is_gen_T], row_T[is_gen_T] = torch.arange(und), torch.arange(gen) + first
            row_T = sent(row_T, device)
        positions_T = to_device([one for block in blocks for one in block.positions], device)
        turned = angles(positions_T, self.head_dim, self.theta)
        return KindRows(first, count, row_T, *turned, blocks)


def angles(position_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of each token, float32 [T, D]; element i pairs with i + D/2."""
    exponent = torch.arange(0, head_dim, 2, device=position_T.device).float() / head_dim
    angle_TD = position_T[:, None].float() * (1.0 / theta**exponent)
    both_TD = torch.cat([angle_TD, angle_TD], dim=-1)
    return both_TD.cos(), both_TD.sin()
