"""The denoise loop, for any model that gives velocities."""

# Legend: G branch, C channel, Y X latent rows and columns
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from hyimg_cli.diffusion.guidance import guided
from hyimg_cli.diffusion.schedule import Step

Velocity = Callable[[Tensor, Step], Tensor]


def denoise(
    latents_CYX: Tensor, steps: Iterable[Step], velocity: Velocity, scales: Sequence[float]
) -> Iterator[Tensor]:
    """The latents behind each step; `velocity` returns all branches, [G, C, Y, X]."""
    for step in steps:
        velocity_GCYX = velocity(latents_CYX, step)
        latents_CYX = step.advance(latents_CYX, guided(velocity_GCYX, scales))
        yield latents_CYX
