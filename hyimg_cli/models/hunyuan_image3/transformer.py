"""The backbone: embeddings, decoder layers, and the norm that only text logits pass through."""

# Legend: T new token (all branches' rows, one after another), M model width
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.attention import pinned, row_attention
from hyimg_cli.kernels.ops import ops_of
from hyimg_cli.kernels.rows import padding
from hyimg_cli.kernels.transfer import current
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.hunyuan_image3.attention import Attention, RMSNorm, StepRows
from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.moe import Mlp, Moe, Router
from hyimg_cli.models.hunyuan_image3.rope import Rope
from hyimg_cli.settings.run import SdpaBackend


class Transformer(nn.Module):
    """Token rows in, last residual stream out; keys and values go to each query block's buffer.

    `rows_seen` counts every token row that ever entered: the engine reports reuse from it.
    `row_multiple` above 1 pads a call's rows, so that a row's bits do not depend on its company.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.wte = nn.Embedding(arch.vocab_size, arch.hidden_size, padding_idx=arch.pad_token_id)
        layers = nn.ModuleList(DecoderLayer(arch, n) for n in range(arch.num_hidden_layers))
        self.layers = cast("Sequence[DecoderLayer]", layers)
        self.ln_f = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.rows_seen = 0
        self.row_multiple = 1

    def forward(self, x_TM: Tensor, rope: Rope, query_blocks: Sequence[QueryBlock]) -> Tensor:
        """The raw residual stream [T, M] behind the last layer, without the final norm."""
        rows = x_TM.shape[0]
        self.rows_seen += rows
        # Rows of zeros behind the real ones are in no query block: only products see them.
        if missing := padding(rows, self.row_multiple):
            x_TM = F.pad(x_TM, (0, 0, 0, missing))
        return self._through(x_TM, rope.padded(x_TM.shape[0]), query_blocks)[:rows]

    def branches(self, x_TM: Tensor, rope: Rope, query_blocks: Sequence[QueryBlock]) -> Tensor:
        """The same of guidance branches, a query block each, which may be dealt out over ranks."""
        hidden_TM: Tensor = self(x_TM, rope, query_blocks)
        return hidden_TM

    def choose_kernels(self, attention: SdpaBackend = "auto") -> None:
        """Take the kernels of each layer's device; asked once its weights are in their places.

        Raises MachineError where attention cannot be as it was asked for.
        """
        for layer in self.layers:
            layer.choose_kernels(attention)
        self.ln_f.rows = ops_of(self.ln_f.weight.device)

    def decode(self, x_RM: Tensor, rope: Rope, rows: StepRows) -> Tensor:
        """The same of one new token a row, whose places only the device knows; nothing is counted:
        a graph that replays this does not come by here.
        """
        return self._through(x_RM, rope, rows)

    def _through(self, x_TM: Tensor, rope: Rope, new: Sequence[QueryBlock] | StepRows) -> Tensor:
        more_TM: Tensor | None = None
        for layer in self.layers:
            x_TM, more_TM = layer(x_TM, more_TM, rope, new)
        return x_TM if more_TM is None else x_TM + more_TM


class DecoderLayer(nn.Module):
    """Pre-norm attention and experts, each added to the residual stream.

    What the experts give is handed on beside the stream: the next layer adds it with its norm.
    """

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = Moe(arch, layer)

    def choose_kernels(self, attention: SdpaBackend) -> None:
        """Take the kernels of the device that the layer's weights lie on."""
        own, weight = self.self_attn, self.self_attn.qkv_proj.weight
        device, heads = weight.device, (own.heads, own.kv_heads)
        own.by_row = pinned(
            row_attention(device),
            attention,
            heads=heads,
            width=own.head_dim,
            like=weight,
        )
        kernels = ops_of(device)
        for part in self.modules():
            if isinstance(part, RMSNorm | Attention | Router | Mlp):
                part.rows = kernels

    def forward(
        self,
        x_TM: Tensor,
        more_TM: Tensor | None,
        rope: Rope,
        new: Sequence[QueryBlock] | StepRows,
    ) -> tuple[Tensor, Tensor]:
        """The stream `x`, and what is still to be added to it; `more`: the layer's before."""
        # A spread model (device_map) hands x over to the next device; angles follow it.
        rope = rope.to(x_TM.device)
        with current(x_TM.device):
            if more_TM is None:
                normed_TM = self.input_layernorm(x_TM)
            else:
                x_TM, normed_TM = self.input_layernorm.added(x_TM, more_TM)
            # What attention gives is let go at once: experts are the widest moment.
            x_TM, normed_TM = self.post_attention_layernorm.added(
                x_TM, self.self_attn(normed_TM, rope, new)
            )
            return x_TM, self.mlp(normed_TM)
