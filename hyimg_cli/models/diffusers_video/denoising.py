"""One job's denoising, whatever the family: scheduler steps around what its guidance branches give,
here or on ranks of their own.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.latent_video import Branch, BranchInputs, BranchRunner

# The number of a step and its branches' velocities to the one that the step takes.
Guide = Callable[[int, Sequence[Tensor]], Tensor]


class LocalBranches:
    """The `BranchRunner` of one process: one branch after another."""

    def __init__(self, branch: Callable[[BranchInputs], Branch]) -> None:
        self._branch = branch
        self._branches: list[Branch] = []

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        self._branches = [self._branch(own) for own in inputs]

    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        return [branch(step, latents_BCFYX, timestep_B) for branch in self._branches]


class Denoiser:
    """The `VideoDenoiser` of both families. Made for one job; nothing of it outlives the job.

    Branches are begun with the first step that runs them: one that the step cache estimates asks no
    rank.
    """

    def __init__(
        self,
        schedule: JobScheduler,
        velocities: VelocityCache,
        runner: BranchRunner,
        inputs: Sequence[BranchInputs],
        guide: Guide,
        noise_1CFYX: Tensor,
        dtype: torch.dtype,
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        """`dtype`: of the latents as branches take them; `finish` makes of the last step's latents
        what is decoded.
        """
        self.schedule, self.velocities = schedule, velocities
        self._runner, self._inputs, self._guide = runner, inputs, guide
        self._noise, self._dtype, self._finish = noise_1CFYX, dtype, finish
        self._is_begun = False

    @property
    def steps(self) -> int:
        return len(self.schedule.levels)

    def is_stop(self, step: int) -> bool:
        """Never: all frames are on their way together."""
        return False

    def initial_latents(self) -> Tensor:
        return self._noise.clone()

    @torch.no_grad()
    def step(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        found: Sequence[Tensor]
        if self.velocities.steps[index]:
            if not self._is_begun:
                self._runner.begin(self._inputs)
                self._is_begun = True
            timestep_B = self.schedule.timesteps[index].expand(1)
            found = self._runner.velocity(index, latents_BCFYX.to(self._dtype), timestep_B)
            self.velocities.keep(index, found)
        else:
            found = self.velocities.estimate(index)
        moved = self.schedule.advance(index, self._guide(index, found), latents_BCFYX)
        return self._finish(moved) if index + 1 == self.steps else moved

    def state(self) -> Mapping[str, Tensor]:
        return self.schedule.state() | self.velocities.state()

    def restore(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` was taken behind another step."""
        self.schedule.restore(index, state)
        self.velocities.restore(state, self.schedule.device)
