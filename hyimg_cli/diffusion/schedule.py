"""Flow-matching noise levels and the Euler step between them; no model.

Ten lines of arithmetic instead of diffusers' `FlowMatchEulerDiscreteScheduler`, which starts a
second slower, keeps a step counter between jobs, and spaces its sigmas differently unless they are
passed explicitly; a test holds this against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

TIMESTEPS_PER_SIGMA = 1000.0


@dataclass(frozen=True)
class Step:
    """One denoise step: `index` counts from 0; sigmas lie in 0..1, timesteps in 0..1000."""

    index: int
    sigma: float
    next_sigma: float

    @property
    def timestep(self) -> float:
        return _timestep(self.sigma)

    @property
    def next_timestep(self) -> float:
        return _timestep(self.next_sigma)

    def advance(self, latents: Tensor, velocity: Tensor) -> Tensor:
        """Latents at `next_sigma`, float32: one Euler step along the velocity."""
        difference = torch.tensor(self.next_sigma) - torch.tensor(self.sigma)
        return latents.float() + difference.to(latents.device) * velocity.float()


@dataclass(frozen=True)
class Schedule:
    """`count` steps from noise (sigma 1) to picture (sigma 0), bent by `shift`."""

    count: int
    shift: float

    def sigmas(self) -> Tensor:
        """Noise levels, float32 [count + 1]: a straight line, then s*x / (1 + (s-1)*x)."""
        line = torch.linspace(1, 0, self.count + 1)
        return self.shift * line / (1 + (self.shift - 1) * line)

    def __iter__(self) -> Iterator[Step]:
        levels = self.sigmas().tolist()
        for index, (sigma, next_sigma) in enumerate(pairwise(levels)):
            yield Step(index, sigma, next_sigma)


def _timestep(sigma: float) -> float:
    # In float32, as the model was trained: 1000 * sigma has to round the same way.
    return float(torch.tensor(sigma) * TIMESTEPS_PER_SIGMA)
