"""Wan 2.1 and 2.2: the library's own transformer forward, one transformer or two.

Its forward reads nothing back and takes no mask; only the scheduler's step needed help.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.models.diffusers_video import step_cache
from hyimg_cli.models.diffusers_video.branches import RunningBranches
from hyimg_cli.models.diffusers_video.card import WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.denoising import Denoiser
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.offload import Offload
from hyimg_cli.models.diffusers_video.prompts_wan import TEXT, WanPrompts
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.vaes import WanVae
from hyimg_cli.models.diffusers_video.weights import Place, load_weights
from hyimg_cli.models.latent_video import Branch, BranchInputs, PromptEmbedding
from hyimg_cli.spec.job import VideoJob

CONTEXTS = ("cond", "uncond")


@dataclass(frozen=True)
class Stage:
    """Which transformer takes a step, and with what guidance."""

    network: Any
    guidance_scale: float


class Wan:
    """The family: components of one checkpoint, each loaded at its first use."""

    def __init__(self, layout: CheckpointLayout, place: Place) -> None:
        self.layout = layout
        self.place = place
        self.prompts = WanPrompts(layout, place)

    @cached_property
    def networks(self) -> list[Any]:
        """The transformer, or the high-noise one and the low-noise one."""
        names = [
            name for name in ("transformer", "transformer_2") if name in self.layout.components
        ]
        return [load_weights(self.layout.components[name], self.place) for name in names]

    @cached_property
    def vae(self) -> WanVae:
        """In float32 whatever the transformer's dtype, as the authors' own examples load it."""
        return WanVae(load_weights(self.layout.components["vae"], self.place.in_float32()))

    def load_transformer(self) -> None:
        _ = self.networks

    def has_guidance(self, job: VideoJob) -> bool:
        """The pipeline's rule: by the first scale alone."""
        return job.guidance_scale > 1.0

    def noise_dtype(self) -> torch.dtype:
        """float32 whatever the transformer's: the latents stay so to the end."""
        return torch.float32

    def denoiser(self, job: VideoJob, noise_1CFYX: Tensor, branches: RunningBranches) -> Denoiser:
        schedule = self._schedule(job)
        scales = [stage.guidance_scale for stage in self._stages(job, schedule)]
        velocity = WanVelocity(scales, schedule.timesteps, branches, self.networks[0].dtype)
        return Denoiser(schedule, velocity, noise_1CFYX, self.networks)

    def branch(self, inputs: BranchInputs, noise_like_1CFYX: Tensor) -> Branch:
        for network in self.networks:
            step_cache.forget(network)
        schedule = self._schedule(inputs.job)
        text_1NM = _padded(inputs.embedding, self.networks[0].dtype, self.place.device)
        return CountingBranch(
            inputs,
            self._stages(inputs.job, schedule),
            schedule.sigmas,
            text_1NM,
            self._timestep_rows(noise_like_1CFYX),
            self.place.offload,
        )

    def _schedule(self, job: VideoJob) -> JobScheduler:
        return JobScheduler(
            self.layout.components["scheduler"],
            steps=job.num_inference_steps,
            flow_shift=job.flow_shift,
            device=self.place.device,
            is_linear=False,
        )

    def _stages(self, job: VideoJob, schedule: JobScheduler) -> list[Stage]:
        """Of each step, decided before the loop: at `boundary_ratio` the second network takes
        over.
        """
        first = Stage(self.networks[0], job.guidance_scale)
        ratio = self.layout.index.get("boundary_ratio")
        if ratio is None or len(self.networks) == 1:
            return [first] * len(schedule.levels)
        scale = job.guidance_scale if job.guidance_scale_2 is None else job.guidance_scale_2
        second = Stage(self.networks[1], scale)
        boundary = ratio * schedule.train_timesteps
        return [first if level >= boundary else second for level in schedule.levels]

    def _timestep_rows(self, noise_1CFYX: Tensor) -> int | None:
        """Where the 5B model of 2.2 wants a timestep for every patch: how many there are."""
        if not self.layout.index.get("expand_timesteps"):
            return None
        frames, height, width = noise_1CFYX.shape[2:]
        return int(frames * len(range(0, height, 2)) * len(range(0, width, 2)))


class WanVelocity:
    """The velocity at a step: u + g (c - u), in the transformer's dtype."""

    def __init__(
        self,
        scales: list[float],
        timesteps: Tensor,
        branches: RunningBranches,
        dtype: torch.dtype,
    ) -> None:
        """One scale a step: with two networks each has its own."""
        self._scales = scales
        self._timesteps = timesteps
        self._branches = branches
        self._dtype = dtype

    def __call__(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        timestep = self._timesteps[index].expand(1)
        velocities = self._branches.at(index, latents_BCFYX.to(self._dtype), timestep)
        if len(velocities) == 1:
            return velocities[0]
        conditional, unconditional = velocities
        return unconditional + self._scales[index] * (conditional - unconditional)


class CountingBranch:
    """One branch. It counts its steps: which network takes one is known on the host, beforehand."""

    def __init__(
        self,
        inputs: BranchInputs,
        stages: list[Stage],
        sigmas: list[float],
        text_1NM: Tensor,
        timestep_rows: int | None,
        offload: Offload,
    ) -> None:
        self._step = inputs.first_step
        self._context = CONTEXTS[inputs.number]
        self._stages = stages
        self._sigmas = sigmas
        self._text = text_1NM
        self._timestep_rows = timestep_rows
        self._offload = offload

    def __call__(self, latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
        step, self._step = self._step, self._step + 1
        network, count = self._stages[step].network, len(self._stages)
        self._offload.bring(network)
        where = {"step_index": step, "sigma": self._sigmas[step], "num_inference_steps": count}
        if self._timestep_rows is not None:
            timestep_B = timestep_B.float()[:, None].expand(-1, self._timestep_rows)
        with network.cache_context(self._context, **where):
            velocity: Tensor = network(
                hidden_states=latents_BCFYX,
                timestep=timestep_B,
                encoder_hidden_states=self._text,
                return_dict=False,
            )[0]
        return velocity


def _padded(embedding: PromptEmbedding, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tokens and zeros behind them up to 512, all of which are attended to."""
    valid_NM = embedding.tensors[TEXT].to(device, dtype)
    padded_1NM = valid_NM.new_zeros(1, WAN_MAX_TOKENS, valid_NM.shape[1])
    padded_1NM[0, : len(valid_NM)] = valid_NM
    return padded_1NM
