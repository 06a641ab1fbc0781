"""A noise level, or a timestep, as a row of the model's width."""

# Legend: B level, M model width
import math

import torch
from torch import Tensor, nn

_SINUSOID_WIDTH = 256


class TimestepEmbedder(nn.Module):
    """A sinusoid of a number through two layers; in the number's own units."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(_SINUSOID_WIDTH, width), activation, nn.Linear(width, width)
        )

    def forward(self, level_B: Tensor) -> Tensor:
        """[B, M]; the sinusoid is computed in float32 and cast to the weights' dtype."""
        return self.mlp(sinusoid(level_B).to(next(self.parameters()).dtype))


def sinusoid(level_B: Tensor) -> Tensor:
    """Cosines, then sines, of falling frequencies, float32 [B, 256]."""
    half = _SINUSOID_WIDTH // 2
    index = torch.arange(half, dtype=torch.float32, device=level_B.device)
    angle = level_B.float()[:, None] * torch.exp(-math.log(10000.0) * index / half)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
