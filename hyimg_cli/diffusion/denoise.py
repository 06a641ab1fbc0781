"""Denoise steps, for any model that gives velocities, over any number of pictures at once."""

# Legend: G branch, C channel, Y X latent rows and columns
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.spec.step_cache import StepCache

# From drawings at a full step to all branches' velocities, [G, C, Y, X] each.
Velocities = Callable[[Sequence["Drawing"]], Sequence[Tensor]]
# From branches' velocities [G, C, Y, X] at a step to the one that is followed, [C, Y, X].
Guidance = Callable[[Tensor, Step], Tensor]


@dataclass(frozen=True)
class Track:
    """One picture's noise, schedule and guidance; an unguided step evaluates branch 0 only."""

    noise_CYX: Tensor
    schedule: Schedule
    guidance: Guidance
    is_guided: Callable[[Step], bool] = lambda step: True


class Drawing:
    """The latents of one picture after its `done` steps, and its step cache.

    The cache starts over if the number of branches changes.
    """

    def __init__(self, track: Track, rule: StepCache | None) -> None:
        self.track, self.latents_CYX, self.done = track, track.noise_CYX, 0
        self._steps = track.schedule.steps()
        self.cache = VelocityCache(rule, [track.is_guided(step) for step in self._steps])

    @property
    def is_done(self) -> bool:
        return self.done == len(self._steps)

    @property
    def step(self) -> Step:
        """Return the next step."""
        return self._steps[self.done]

    def restore(self, done: int, latents_CYX: Tensor, state: Mapping[str, Tensor]) -> None:
        """Continue after `done` steps, from the latents and the cache's state that were saved."""
        self.cache.restore(state, self.latents_CYX.device)
        self.latents_CYX, self.done = latents_CYX.to(self.latents_CYX.device), done

    def advance(self, velocities_GCYX: Tensor | None) -> None:
        """Take the next step with all branches' velocities, estimated if none are given.

        An exception leaves the drawing unchanged.
        """
        step, found = self.step, velocities_GCYX
        if found is None:
            (found,) = self.cache.estimate(step.index)
        latents_CYX = step.advance(self.latents_CYX, self.track.guidance(found, step))
        if velocities_GCYX is not None:
            self.cache.keep(step.index, [velocities_GCYX])
        self.latents_CYX, self.done = latents_CYX, self.done + 1


def denoise_step(drawings: Sequence[Drawing], velocities: Velocities) -> None:
    """Advance every drawing by its own next step.

    `velocities` is called only for the drawings whose cache asks for a full step.
    """
    full = [drawing for drawing in drawings if drawing.cache.steps[drawing.step.index]]
    found = dict(zip(full, velocities(full), strict=True)) if full else {}
    for drawing in drawings:
        drawing.advance(found.get(drawing))
