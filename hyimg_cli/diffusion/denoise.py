"""The denoise loop, for any model that gives velocities, over any number of pictures at once."""

# Legend: G branch, C channel, Y X latent rows and columns
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyimg_cli.diffusion.schedule import Schedule, Step

Velocities = Callable[[Sequence[Tensor], Sequence[Step]], Sequence[Tensor]]
# Branches' velocities [G, C, Y, X] at a step to the one that is followed, [C, Y, X].
Guidance = Callable[[Tensor, Step], Tensor]


@dataclass(frozen=True)
class Track:
    """One picture's way: its noise, its schedule, and how its branches are combined. At a step that
    is not guided branch 0 alone is evaluated.
    """

    noise_CYX: Tensor
    schedule: Schedule
    guidance: Guidance
    is_guided: Callable[[Step], bool] = lambda step: True


def denoise(tracks: Sequence[Track], velocities: Velocities) -> Iterator[list[Tensor]]:
    """The latents of every track behind each step; all schedules have the same count.

    `velocities` returns every track's branches, [G, C, Y, X].
    """
    latents = [track.noise_CYX for track in tracks]
    for steps in zip(*(track.schedule.steps() for track in tracks), strict=True):
        moved = []
        for track, step, x_CYX, velocity_GCYX in zip(
            tracks, steps, latents, velocities(latents, steps), strict=True
        ):
            moved.append(step.advance(x_CYX, track.guidance(velocity_GCYX, step)))
        latents = moved
        yield latents
