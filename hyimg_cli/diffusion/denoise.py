"""The denoise loop, for any model that gives velocities, over any number of pictures at once."""

# Legend: G branch, C channel, Y X latent rows and columns
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.spec.step_cache import StepCache

# Numbers of tracks, their latents and their steps to all branches' velocities, [G, C, Y, X] each.
Velocities = Callable[[Sequence[int], Sequence[Tensor], Sequence[Step]], Sequence[Tensor]]
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

    def velocity_cache(self, rule: StepCache | None) -> VelocityCache:
        """One for an attempt at this track; it begins anew where the number of branches changes."""
        return VelocityCache(rule, [self.is_guided(step) for step in self.schedule.steps()])


def denoise(
    tracks: Sequence[Track], caches: Sequence[VelocityCache], velocities: Velocities
) -> Iterator[list[Tensor]]:
    """The latents of every track behind each step; all schedules have the same count.

    `velocities` is asked for the tracks for which the step is full by their cache, and not at all
    where it is for none.
    """
    latents = [track.noise_CYX for track in tracks]
    for steps in zip(*(track.schedule.steps() for track in tracks), strict=True):
        full = [n for n, cache in enumerate(caches) if cache.steps[steps[n].index]]
        found = {}
        if full:
            asked = [latents[n] for n in full], [steps[n] for n in full]
            found = dict(zip(full, velocities(full, *asked), strict=True))
        moved = []
        for n, (track, step, x_CYX) in enumerate(zip(tracks, steps, latents, strict=True)):
            if n in found:
                caches[n].keep(step.index, [found[n]])
            else:
                (found[n],) = caches[n].estimate(step.index)
            moved.append(step.advance(x_CYX, track.guidance(found[n], step)))
        latents = moved
        yield latents
