"""Denoisers: a job's noise, steps and state, and steps of any number of pictures at once.

Denoiser          what pipelines know: run it to its end, save it, restore it
  DenoiseState    one picture; its model gives velocities of several pictures in one forward
  LatentDenoiser  (models/latent) a library's scheduler takes the step, for the job alone
"""

# Legend: G branch, C channel, Y X latent rows and columns
from abc import ABC, abstractmethod
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


class Denoiser(ABC):
    """One job's latents after its `done` steps, and what its next step needs.

    `latents` begin as the job's noise. `velocities`: its step cache.
    """

    def __init__(self, noise: Tensor, velocities: VelocityCache) -> None:
        self.latents, self.velocities, self.done = noise, velocities, 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return the number of all steps."""

    @property
    def is_done(self) -> bool:
        return self.done == self.steps

    def is_stop(self, step: int) -> bool:
        """Return True if latents after `step` steps are kept regardless of settings."""
        return False

    def state(self) -> Mapping[str, Tensor]:
        """Return what is saved besides the latents; of a done one, the step cache alone."""
        return self.velocities.state()

    def restore(self, done: int, latents: Tensor, state: Mapping[str, Tensor]) -> None:
        """Continue after `done` steps, from the latents and the `state` that were saved there."""
        self.velocities.restore(state, self.latents.device)
        self.latents, self.done = latents.to(self.latents.device), done


class DenoiseState(Denoiser):
    """The denoiser of one picture, [C, Y, X], whose steps may be taken with those of others.

    The step cache starts over if the number of branches changes.
    """

    def __init__(self, plan: DenoisePlan, rule: StepCache | None) -> None:
        self.plan, self._steps = plan, plan.schedule.steps()
        guided = [plan.is_guided(step) for step in self._steps]
        super().__init__(plan.noise_CYX, VelocityCache(rule, guided))

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def step(self) -> Step:
        """Return the next step."""
        return self._steps[self.done]

    def advance(self, velocities_GCYX: Tensor | None) -> None:
        """Take the next step with all branches' velocities, estimated if none are given.

        An exception leaves the state unchanged.
        """
        step, found = self.step, velocities_GCYX
        if found is None:
            (found,) = self.velocities.estimate(step.index)
        latents_CYX = step.advance(self.latents, self.plan.guidance(found, step))
        if velocities_GCYX is not None:
            self.velocities.keep(step.index, [velocities_GCYX])
        self.latents, self.done = latents_CYX, self.done + 1


def denoise_step(states: Sequence[DenoiseState], velocities: Velocities) -> None:
    """Advance every picture by its own next step.

    `velocities` is called only for the states whose cache asks for a full step.
    """
    full = [state for state in states if state.velocities.steps[state.step.index]]
    found = dict(zip(full, velocities(full), strict=True)) if full else {}
    for state in states:
        state.advance(found.get(state))
