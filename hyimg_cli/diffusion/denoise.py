"""Denoise steps, for any model that gives velocities, over any number of pictures at once."""

# Legend: G branch, C channel, Y X latent rows and columns
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.spec.step_cache import StepCache

# From states at a full step to all branches' velocities, [G, C, Y, X] each.
Velocities = Callable[[Sequence["DenoiseState"]], Sequence[Tensor]]
# From branches' velocities [G, C, Y, X] at a step to the one that is followed, [C, Y, X].
Guidance = Callable[[Tensor, Step], Tensor]


@dataclass(frozen=True)
class DenoisePlan:
    """One picture's noise, schedule and guidance; an unguided step evaluates branch 0 only."""

    noise_CYX: Tensor
    schedule: Schedule
    guidance: Guidance
    is_guided: Callable[[Step], bool] = lambda step: True


class DenoiseState:
    """The latents of one picture after its `done` steps, and its step cache.

    The cache starts over if the number of branches changes.
    """

    def __init__(self, plan: DenoisePlan, rule: StepCache | None) -> None:
        self.plan, self.latents_CYX, self.done = plan, plan.noise_CYX, 0
        self._steps = plan.schedule.steps()
        self.cache = VelocityCache(rule, [plan.is_guided(step) for step in self._steps])

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

        An exception leaves the state unchanged.
        """
        step, found = self.step, velocities_GCYX
        if found is None:
            (found,) = self.cache.estimate(step.index)
        latents_CYX = step.advance(self.latents_CYX, self.plan.guidance(found, step))
        if velocities_GCYX is not None:
            self.cache.keep(step.index, [velocities_GCYX])
        self.latents_CYX, self.done = latents_CYX, self.done + 1


def denoise_step(states: Sequence[DenoiseState], velocities: Velocities) -> None:
    """Advance every picture by its own next step.

    `velocities` is called only for the states whose cache asks for a full step.
    """
    full = [state for state in states if state.cache.steps[state.step.index]]
    found = dict(zip(full, velocities(full), strict=True)) if full else {}
    for state in states:
        state.advance(found.get(state))
