"""Wan 2.1 and 2.2: the library's own transformer forward, one transformer or two.

Its forward reads nothing back and takes no mask; only the scheduler's step needed help.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from collections.abc import Mapping

import torch
from torch import Tensor

from hyimg_cli.models.diffusers_video.branches import RunningBranches
from hyimg_cli.models.diffusers_video.card import WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.denoising import Velocity
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.prompts_wan import TEXT, WanPrompts
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.start import frame_mask
from hyimg_cli.models.diffusers_video.vaes import WanVae
from hyimg_cli.models.diffusers_video.weights import load_weights
from hyimg_cli.models.latent_video import (
    LATENTS,
    TOKENS,
    Branch,
    BranchInputs,
    PromptEmbedding,
)
from hyimg_cli.spec.job import VideoJob

CONTEXTS = ("cond", "uncond")


class Wan(DiffusersVideo):
    """The family's checkpoint."""

    has_linear_sigmas = False

    def new_prompts(self) -> WanPrompts:
        return WanPrompts(self.layout, self.place)

    def new_vae(self) -> WanVae:
        """In float32 whatever the transformer's dtype, as the authors' own examples load it."""
        return WanVae(load_weights(self.layout.components["vae"], self.place.in_float32()))

    def finished(self, latents_BCFYX: Tensor, start: Mapping[str, Tensor]) -> Tensor:
        """The 5B model keeps the picture itself for the first latent frame."""
        if LATENTS not in start or not self.layout.expands_timesteps:
            return latents_BCFYX
        return _from_first(start[LATENTS][None].to(latents_BCFYX), latents_BCFYX)

    def has_guidance(self, job: VideoJob) -> bool:
        """The pipeline's rule: by the first scale alone."""
        return job.guidance_scale > 1.0

    def noise_dtype(self) -> torch.dtype:
        """float32 whatever the transformer's: the latents stay so to the end."""
        return torch.float32

    def guided(self, job: VideoJob, schedule: JobScheduler, branches: RunningBranches) -> Velocity:
        """u + g (c - u), in the transformer's dtype; with two networks each has its own scale."""
        second = job.guidance_scale if job.guidance_scale_2 is None else job.guidance_scale_2
        scales = [(job.guidance_scale, second)[number] for number in self.network_of(schedule)]
        dtype = self.networks[0].dtype

        def velocity(index: int, latents_BCFYX: Tensor) -> Tensor:
            timestep = schedule.timesteps[index].expand(1)
            velocities = branches.at(index, latents_BCFYX.to(dtype), timestep)
            if len(velocities) == 1:
                return velocities[0]
            conditional, unconditional = velocities
            return unconditional + scales[index] * (conditional - unconditional)

        return velocity

    def new_branch(self, inputs: BranchInputs, noise_like_1CFYX: Tensor) -> Branch:
        """Which network takes a step is known on the host, beforehand."""
        schedule = self.schedule(inputs.job)
        at_step = self.network_of(schedule)
        dtype = self.networks[0].dtype
        text_1NM = _padded(inputs.embedding, dtype, self.device)
        rows = self._timestep_rows(noise_like_1CFYX)
        start = {name: part.to(self.device) for name, part in inputs.start.items()}
        tokens = start[TOKENS].to(dtype) if TOKENS in start else None
        condition = self._condition(start.get(LATENTS), inputs.job, dtype)

        def velocity(step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
            network = self.networks[at_step[step]]
            self.place.bring(network)
            if rows is not None:
                timestep_B = timestep_B.float()[:, None].expand(-1, rows)
                if condition is not None:
                    # Nothing is left to denoise in the first latent frame.
                    latents_BCFYX = _from_first(condition, latents_BCFYX)
                    in_first = rows // latents_BCFYX.shape[2]
                    timestep_B = timestep_B.clone()
                    timestep_B[:, :in_first] = 0
            elif condition is not None:
                latents_BCFYX = torch.cat([latents_BCFYX, condition], dim=1)
            with network.cache_context(
                CONTEXTS[inputs.number],
                step_index=step,
                sigma=schedule.sigmas[step],
                num_inference_steps=len(at_step),
            ):
                made: Tensor = network(
                    hidden_states=latents_BCFYX,
                    timestep=timestep_B,
                    encoder_hidden_states=text_1NM,
                    encoder_hidden_states_image=tokens,
                    return_dict=False,
                )[0]
            return made

        return velocity

    def _condition(
        self, latents_CFYX: Tensor | None, job: VideoJob, dtype: torch.dtype
    ) -> Tensor | None:
        """Channels beside the noise: the given frames' mask, then their latents; the latents
        alone where they take a frame's place.
        """
        if latents_CFYX is None:
            return None
        latents_1CFYX = latents_CFYX[None].to(dtype)
        if self.layout.expands_timesteps:
            return latents_1CFYX
        stride, has_last = self.card.frame_stride, len(job.images) > 1
        given = frame_mask(job.num_frames, stride, has_last=has_last).to(latents_1CFYX)
        mask_1CFYX = given[None, :, :, None, None].expand(-1, -1, -1, *latents_1CFYX.shape[3:])
        return torch.cat([mask_1CFYX, latents_1CFYX], dim=1)

    def network_of(self, schedule: JobScheduler) -> list[int]:
        """From `boundary_ratio` on the second."""
        ratio = self.layout.boundary_ratio
        if ratio is None or len(self.networks) == 1:
            return super().network_of(schedule)
        boundary = ratio * schedule.scheduler.config.num_train_timesteps
        return [int(level < boundary) for level in schedule.levels]

    def _timestep_rows(self, noise_1CFYX: Tensor) -> int | None:
        """Where the 5B model of 2.2 wants a timestep for every patch: how many there are."""
        if not self.layout.expands_timesteps:
            return None
        frames, height, width = noise_1CFYX.shape[2:]
        return int(frames * len(range(0, height, 2)) * len(range(0, width, 2)))


def _from_first(picture_1CFYX: Tensor, latents_BCFYX: Tensor) -> Tensor:
    """Latents with a picture's in the place of their first frame."""
    return torch.cat([picture_1CFYX[:, :, :1], latents_BCFYX[:, :, 1:]], dim=2)


def _padded(embedding: PromptEmbedding, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tokens and zeros behind them up to 512, all of which are attended to."""
    valid_NM = embedding.tensors[TEXT].to(device, dtype)
    padded_1NM = valid_NM.new_zeros(1, WAN_MAX_TOKENS, valid_NM.shape[1])
    padded_1NM[0, : len(valid_NM)] = valid_NM
    return padded_1NM
