"""Wan 2.1 and 2.2: diffusers' own transformer forward, one transformer or two.

Its forward reads nothing back and takes no mask; only the scheduler's step needed a change.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as fun
from torch import Tensor

from hyimg_cli.models.diffusers_video.encoders import TEXT, WanPrompts
from hyimg_cli.models.diffusers_video.model import DiffusersVideo, Guide
from hyimg_cli.models.diffusers_video.record import WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.start import add_frame_mask
from hyimg_cli.models.diffusers_video.vaes import WanVae
from hyimg_cli.models.latent_video import LATENTS, TOKENS, Branch, BranchInputs
from hyimg_cli.spec.job import VideoJob


class Wan(DiffusersVideo):
    """The family's checkpoint."""

    prompt_encoder, vae_class = WanPrompts, WanVae
    has_linear_sigmas = False
    # In any transformer dtype: the latents stay in float32 to the end.
    noise_dtype = torch.float32

    def finished(self, latents_BCFYX: Tensor, start: Mapping[str, Tensor]) -> Tensor:
        """Put the picture itself in the first latent frame for the 5B model."""
        if LATENTS not in start or not self.layout.expands_timesteps:
            return latents_BCFYX
        return _from_first(start[LATENTS].to(latents_BCFYX), latents_BCFYX)

    def has_guidance(self, job: VideoJob) -> bool:
        """Return the pipeline's rule: the first scale decides."""
        return job.guidance_scale > 1.0

    def guide(self, job: VideoJob, schedule: JobScheduler) -> Guide:
        """Return u + g (c - u), in the transformer's dtype; each of two networks has its scale."""
        second = job.guidance_scale if job.guidance_scale_2 is None else job.guidance_scale_2
        scales = [(job.guidance_scale, second)[number] for number in self.network_of(schedule)]

        def guide(index: int, velocities: Sequence[Tensor]) -> Tensor:
            if len(velocities) == 1:
                return velocities[0]
            conditional, unconditional = velocities
            return unconditional + scales[index] * (conditional - unconditional)

        return guide

    def new_branch(self, inputs: BranchInputs) -> Branch:
        """The network of a step is known on the host in advance."""
        at_step = self.network_of(self.schedule(inputs.job))
        dtype, by_patch = self.networks[0].dtype, self.layout.expands_timesteps
        # The text's tokens and zeros up to 512; the model attends to all of them.
        valid_NM = inputs.embedding.tensors[TEXT].to(self.device, dtype)
        text_1NM = fun.pad(valid_NM, (0, 0, 0, WAN_MAX_TOKENS - len(valid_NM)))[None]
        start = {name: part.to(self.device, dtype) for name, part in inputs.start.items()}
        condition, stride = start.get(LATENTS), self.card.frame_stride
        if condition is not None and not by_patch:
            frames, has_last = inputs.job.num_frames, len(inputs.job.images) > 1
            condition = add_frame_mask(condition, frames, stride, has_last=has_last)

        def velocity(step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
            network = self.networks[at_step[step]]
            self.place.offload.onload(network)
            if by_patch:
                # The 5B model of 2.2 needs a timestep for every patch, of 2 x 2 cells.
                frames, height, width = latents_BCFYX.shape[2:]
                in_frame = -(-height // 2) * -(-width // 2)
                timestep_B = timestep_B.float()[:, None].repeat(1, frames * in_frame)
                if condition is not None:
                    # The first latent frame is already denoised.
                    latents_BCFYX = _from_first(condition, latents_BCFYX)
                    timestep_B[:, :in_frame] = 0
            elif condition is not None:
                latents_BCFYX = torch.cat([latents_BCFYX, condition[None]], dim=1)
            made: Tensor = network(
                hidden_states=latents_BCFYX,
                timestep=timestep_B,
                encoder_hidden_states=text_1NM,
                encoder_hidden_states_image=start.get(TOKENS),
                return_dict=False,
            )[0]
            return made

        return velocity

    def network_of(self, schedule: JobScheduler) -> list[int]:
        """Return the network of a step: the second from `boundary_ratio` on."""
        ratio = self.layout.boundary_ratio
        if ratio is None or len(self.networks) == 1:
            return super().network_of(schedule)
        boundary = ratio * schedule.scheduler.config.num_train_timesteps
        return [int(level < boundary) for level in schedule.levels]


def _from_first(picture_CFYX: Tensor, latents_BCFYX: Tensor) -> Tensor:
    """Return latents with their first frame replaced by a picture's."""
    return torch.cat([picture_CFYX[None, :, :1], latents_BCFYX[:, :, 1:]], dim=2)
