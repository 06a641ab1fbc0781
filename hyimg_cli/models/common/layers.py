"""Layers of several networks, by their released names: norm, token rows, timestep, and a ViT.

The ViT has the bits of transformers' Siglip, whose import takes longer than loading a small model.
"""

# Legend: B image or level, S image token, M width, T token
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.choice import ops_of
from hyimg_cli.kernels.ops import PLAIN, PlainOps
from hyimg_cli.kernels.transfer import to_device
from hyimg_cli.models.common.config import VitShape

_SINUSOID_WIDTH = 256


class VitEncoder(nn.Module):
    """Pre-norm layers; a token attends to all tokens that an optional mask does not hide."""

    def __init__(self, arch: VitShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(arch) for _ in range(arch.num_hidden_layers))

    def forward(self, x_BSM: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x_BSM = layer(x_BSM, mask_B11S)
        return x_BSM


class _Layer(nn.Module):
    def __init__(self, arch: VitShape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(arch.hidden_size, eps=arch.layer_norm_eps)
        self.self_attn = _Attention(arch.hidden_size, arch.num_attention_heads)
        self.layer_norm2 = nn.LayerNorm(arch.hidden_size, eps=arch.layer_norm_eps)
        self.mlp = VitMlp(arch)

    def forward(self, x_BSM: Tensor, mask_B11S: Tensor | None) -> Tensor:
        x_BSM = x_BSM + self.self_attn(self.layer_norm1(x_BSM), mask_B11S)
        return x_BSM + self.mlp(self.layer_norm2(x_BSM))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BSM: Tensor, mask_B11S: Tensor | None) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x_BSM).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in projections)
        seen_BHSD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11S)
        return self.out_proj(seen_BHSD.transpose(1, 2).flatten(2))


class VitMlp(nn.Module):
    """Two linear layers with an approximate GELU in between."""

    def __init__(self, arch: VitShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.hidden_size, arch.intermediate_size)
        self.fc2 = nn.Linear(arch.intermediate_size, arch.hidden_size)

    def forward(self, x_BSM: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BSM), approximate="tanh"))


class FusedPart(nn.Module):
    """A module that runs operations of `kernels/ops`: plain ones until `choose_ops`."""

    ops: PlainOps = PLAIN


def choose_ops(network: nn.Module, device: torch.device) -> None:
    """Give all fused parts of a network the operations of its device, where its weights are."""
    ops = ops_of(device)
    for part in network.modules():
        if isinstance(part, FusedPart):
            part.ops = ops


class RMSNorm(FusedPart):
    """Root-mean-square norm: statistics in float32, cast to the input's dtype, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.ops.norm(x_TM, self.weight, self.eps)

    def added(self, x_TM: Tensor, pending_residual_TM: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `x`, plus what is still to be added, and its norm."""
        if pending_residual_TM is None:
            return x_TM, self(x_TM)
        return self.ops.added_norm(x_TM, pending_residual_TM, self.weight, self.eps)


def rope_rows(angle_TD: Tensor) -> Tensor:
    """Return cosines and sines [2, T, D] of angles [T, D/2]; element i pairs with i + D/2."""
    both_TD = torch.cat([angle_TD, angle_TD], dim=-1)
    return torch.stack([both_TD.cos(), both_TD.sin()])


def embed(table: nn.Embedding, ids: Sequence[int] | Tensor) -> Tensor:
    """Return rows [T, M] for token ids on the host or on a device."""
    device = table.weight.device
    rows_TM: Tensor = table(ids.to(device) if isinstance(ids, Tensor) else to_device(ids, device))
    return rows_TM


class TimestepEmbedder(nn.Module):
    """Embeds a number as a sinusoid, through two layers; in the number's own units."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(_SINUSOID_WIDTH, width), activation, nn.Linear(width, width)
        )

    def forward(self, level_B: Tensor) -> Tensor:
        """Return [B, M]; the sinusoid is computed in float32 and cast to the weights' dtype."""
        return self.mlp(sinusoid(level_B).to(next(self.parameters()).dtype))


def sinusoid(level_B: Tensor) -> Tensor:
    """Return cosines, then sines, of falling frequencies, float32 [B, 256]."""
    half = _SINUSOID_WIDTH // 2
    index = torch.arange(half, dtype=torch.float32, device=level_B.device)
    angle = level_B.float()[:, None] * torch.exp(-math.log(10000.0) * index / half)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
