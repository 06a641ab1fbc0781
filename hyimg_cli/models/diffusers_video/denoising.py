"""One job's denoising, whatever the family: scheduler steps around a guided velocity."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import JobError
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler

Velocity = Callable[[int, Tensor], Tensor]


class Denoiser:
    """The `VideoDenoiser` of both families. Made for one job; nothing of it outlives the job."""

    def __init__(
        self,
        schedule: JobScheduler,
        velocity: Velocity,
        noise_1CFYX: Tensor,
        networks: Sequence[Any],
        velocities: VelocityCache,
        finish: Callable[[Tensor], Tensor] = lambda latents_BCFYX: latents_BCFYX,
    ) -> None:
        """`networks` are those whose library caches the job may fill; `velocities` is the job's own
        step cache; `finish` makes of the last step's latents what is decoded.
        """
        self.schedule, self.velocities = schedule, velocities
        self._velocity = velocity
        self._noise = noise_1CFYX
        self._networks, self._finish = networks, finish

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
        velocity = self._velocity(index, latents_BCFYX)
        moved = self.schedule.advance(index, velocity, latents_BCFYX)
        return self._finish(moved) if index + 1 == self.steps else moved

    def state(self) -> Mapping[str, Tensor]:
        """Raises JobError where a cache of the library is on: its memory is its own business."""
        if any(network.is_cache_enabled for network in self._networks):
            raise JobError(
                "latents cannot be checkpointed while a step cache of the library is on",
                hint="its memory is not kept; use --step-cache, or leave checkpoints out",
                code="job.step-cache",
            )
        return self.schedule.state() | self.velocities.state()

    def restore(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` was taken behind another step."""
        self.schedule.restore(index, state)
        self.velocities.restore(state, self.schedule.device)
