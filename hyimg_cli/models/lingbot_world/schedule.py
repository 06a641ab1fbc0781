"""The four noise levels that the model was distilled to, as the published code finds them.

A timestep is truncated to a whole number, and each sigma is looked up by it: a table of 1000 levels
has some timesteps twice. The estimate of the clean latents takes the first entry, the new noise the
second if there are two. Neither is the entry at the level's own index.
"""

from dataclasses import dataclass

import numpy as np

TABLE = 1000
INDICES = (0, 179, 358, 679)


@dataclass(frozen=True)
class NoiseLevel:
    """One noise level: the timestep, the sigma of the estimate, and that of new noise."""

    timestep: int
    sigma: float
    renoise: float
    # 1 - renoise, in float32 as published.
    keep: float


def levels(flow_shift: float) -> tuple[NoiseLevel, ...]:
    """Return the levels of a request, noisiest first."""
    timesteps, sigmas = table(flow_shift)
    found = []
    for timestep in timesteps[list(INDICES)]:
        there = np.flatnonzero(timesteps == timestep)
        renoise = sigmas[there[min(1, len(there) - 1)]]
        keep = float(np.float32(1) - renoise)
        found.append(NoiseLevel(int(timestep), float(sigmas[there[0]]), float(renoise), keep))
    return tuple(found)


def table(flow_shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return all timesteps, as whole numbers, and their sigmas in float32."""
    # The first level is rounded to float32 before the line to 0 is computed.
    straight = np.linspace(float(np.float32(1 - 1 / TABLE)), 0, TABLE + 1)[:-1]
    sigmas = flow_shift * straight / (1 + (flow_shift - 1) * straight)
    return (sigmas * TABLE).astype(np.int64), sigmas.astype(np.float32)
