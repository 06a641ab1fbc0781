"""The backbone: embeddings, decoder layers, and the norm that only text logits pass through."""

# Legend: T new token (all branches' rows, one after another), M model width, H query head, K kv
# head, D head width; rope_2TD cosines, then sines
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.attention import (
    PackedAttention,
    SpanAttention,
    attention_of,
    masked_attention,
    packed_attention_of,
)
from hyimg_cli.kernels.choice import experts_of
from hyimg_cli.kernels.decode_attention import DecodeAttention, PagedRows
from hyimg_cli.kernels.rows import padding
from hyimg_cli.kernels.transfer import current
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.common.layers import FusedPart, RMSNorm, choose_ops
from hyimg_cli.models.common.packed import Blocks, attend, packed
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.moe import Moe


@dataclass(frozen=True)
class DecodeBatch:
    """One new token of each of several branches, whose positions are known only on the device."""

    of_layer: Callable[[int], PagedRows]
    attend: DecodeAttention


NewTokens = Blocks | DecodeBatch


class Transformer(nn.Module):
    """Token rows in, last residual stream out; each query block keeps its keys and values.

    `rows_seen` counts every token row that ever entered: the engine reports reuse from it.
    `row_multiple` above 1 pads a call's rows, so that a row's bits do not depend on other rows.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.wte = nn.Embedding(arch.vocab_size, arch.hidden_size, padding_idx=arch.pad_token_id)
        layers = nn.ModuleList(DecoderLayer(arch, n) for n in range(arch.num_hidden_layers))
        self.layers = cast("Sequence[DecoderLayer]", layers)
        self.ln_f = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.rows_seen = 0
        self.row_multiple = 1
        self.packed_attention: PackedAttention | None = None

    def forward(self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]) -> Tensor:
        """Return the residual stream [T, M] after the last layer, without the final norm."""
        rows = x_TM.shape[0]
        self.rows_seen += rows
        # Rows of zeros after the real ones belong to no query block: only products see them.
        if missing := padding(rows, self.row_multiple):
            x_TM, rope_2TD = (F.pad(each, (0, 0, 0, missing)) for each in (x_TM, rope_2TD))
        new = packed(self.packed_attention, query_blocks)
        return self.through_layers(x_TM, rope_2TD, new)[:rows]

    def branches(
        self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]
    ) -> Tensor:
        """Run guidance branches, one query block each; ranks may share them."""
        return self(x_TM, rope_2TD, query_blocks)

    def choose_kernels(self) -> None:
        """Choose the kernels for each layer's device; called once the weights are in place."""
        for layer in self.layers:
            device = layer.self_attn.qkv_proj.weight.device
            layer.self_attn.span_attention = attention_of(device)
            layer.mlp.compute = experts_of(layer.mlp.stacks)
            choose_ops(layer, device)
        weight = self.ln_f.weight
        choose_ops(self.ln_f, weight.device)
        self.packed_attention = packed_attention_of(weight.device, weight.dtype)

    def through_layers(self, x_TM: Tensor, rope_2TD: Tensor, new: NewTokens) -> Tensor:
        """Return the stream after the last layer; counts nothing, so graphs can replay it."""
        pending_residual_TM: Tensor | None = None
        for layer in self.layers:
            x_TM, pending_residual_TM = layer(x_TM, pending_residual_TM, rope_2TD, new)
        return x_TM if pending_residual_TM is None else x_TM + pending_residual_TM


class Attention(FusedPart):
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
        # The kernels of the layer's device are set once the weights are in place.
        self.span_attention: SpanAttention = masked_attention

    def forward(self, x_TM: Tensor, rope_2TD: Tensor, new: NewTokens) -> Tensor:
        """Return the attention output [T, M] of the new tokens, one after another in `x_TM`."""
        q_THD, k_TKD, v_TKD = self.project(x_TM, rope_2TD)
        if isinstance(new, DecodeBatch):
            seen_THD = new.attend(q_THD, k_TKD, v_TKD, new.of_layer(self.layer))
        else:
            seen_THD = attend(new, self.span_attention, self.layer, q_THD, k_TKD, v_TKD)
        return self.o_proj(seen_THD.flatten(1))

    def project(self, x_TM: Tensor, rope_2TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, K, D] as cached: rotated, then normed."""
        fused = self.qkv_proj(x_TM).unflatten(-1, (self.kv_heads, self.group + 2, self.head_dim))
        cos_TD, sin_TD = rope_2TD.unbind()
        weights = self.query_layernorm.weight, self.key_layernorm.weight
        return self.ops.split_rotate_norm(
            fused, (cos_TD, sin_TD), weights, self.query_layernorm.eps
        )


class DecoderLayer(nn.Module):
    """Pre-norm attention and experts, each added to the residual stream.

    The experts' output is returned separately: the next layer adds it with its norm.
    """

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = Moe(arch)

    def forward(
        self,
        x_TM: Tensor,
        pending_residual_TM: Tensor | None,
        rope_2TD: Tensor,
        new: NewTokens,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream `x`, and what is still to be added to it.

        `pending_residual`: what the layer before left to add.
        """
        # In a model spread over devices (device_map), x moves to the next device; the angles
        # follow.
        rope_2TD = rope_2TD.to(x_TM.device)
        with current(x_TM.device):
            x_TM, normed_TM = self.input_layernorm.added(x_TM, pending_residual_TM)
            # Attention's tensors are freed at once, because experts take the most memory.
            x_TM, normed_TM = self.post_attention_layernorm.added(
                x_TM, self.self_attn(normed_TM, rope_2TD, new)
            )
            return x_TM, self.mlp(normed_TM)
