"""Combine the branches' velocities into one."""

# Legend: G branch, C channel, Y X latent rows and columns
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hyimg_cli.diffusion.schedule import Step


@dataclass(frozen=True)
class CFG:
    """Classifier-free guidance at the same scales in every step."""

    scales: Sequence[float]

    def __call__(self, velocity_GCYX: Tensor, step: Step) -> Tensor:
        return guided(velocity_GCYX, self.scales)


def guided(velocity_GCYX: Tensor, scales: Sequence[float]) -> Tensor:
    """Return the velocity to follow, [C, Y, X]: branch 0 pushed away from the others.

    With one other branch this is v_c + (g - 1) (v_c - v_u), the usual v_u + g (v_c - v_u). One
    dimensionless scale per branch after the first; sums in float32. Raises ValueError if the counts
    differ. Source: classifier-free guidance, Ho & Salimans 2022.
    """
    if velocity_GCYX.shape[0] != 1 + len(scales):
        raise ValueError(
            f"{velocity_GCYX.shape[0]} branches need one scale fewer, got {len(scales)}"
        )
    conditional, *others = velocity_GCYX.float().unbind()
    result = conditional
    for scale, other in zip(scales, others, strict=True):
        result = result + (scale - 1) * (conditional - other)
    return result
