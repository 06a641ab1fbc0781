"""Flow-matching noise levels and the Euler step between them; no model.

A few lines of arithmetic instead of diffusers' `FlowMatchEulerDiscreteScheduler`, which starts a
second slower, keeps a step counter between jobs, and spaces its sigmas differently unless they are
passed explicitly; a test compares the two.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

TIMESTEPS_PER_SIGMA = 1000.0


@dataclass(frozen=True)
class Step:
    """One denoise step, known on the host before the loop.

    `index` counts from 0; sigmas are 0 to 1, timesteps 0 to 1000, both as float32 values.
    """

    index: int
    sigma: float
    next_sigma: float
    timestep: float
    next_timestep: float
    difference: float

    def advance(self, latents: Tensor, velocity: Tensor) -> Tensor:
        """Return the latents at `next_sigma`, float32: one Euler step along the velocity."""
        return latents.float() + self.difference * velocity.float()


@dataclass(frozen=True)
class Schedule:
    """`count` steps from noise (sigma 1) to picture (sigma 0), bent by `shift`."""

    count: int
    shift: float

    def sigmas(self) -> Tensor:
        """Return noise levels, float32 [count + 1]: a straight line, then s*x / (1 + (s-1)*x)."""
        line = torch.linspace(1, 0, self.count + 1)
        return self.shift * line / (1 + (self.shift - 1) * line)

    def steps(self) -> list[Step]:
        """Return every step, in order; products and differences round as float32."""
        sigmas = self.sigmas()
        timesteps = (sigmas * TIMESTEPS_PER_SIGMA).tolist()
        differences = sigmas.diff().tolist()
        levels = zip(pairwise(sigmas.tolist()), pairwise(timesteps), differences, strict=True)
        return [
            Step(index, *pair, *times, difference)
            for index, (pair, times, difference) in enumerate(levels)
        ]
