"""Wan 2.1 and 2.2: the library's own transformer forward, one transformer or two.

Its forward reads nothing back and takes no mask; only the scheduler's step needed help.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from itertools import count

import torch
from torch import Tensor

from hyimg_cli.models.diffusers_video.branches import RunningBranches
from hyimg_cli.models.diffusers_video.card import WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.denoising import Velocity
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.prompts_wan import TEXT, WanPrompts
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.vaes import WanVae
from hyimg_cli.models.diffusers_video.weights import load_weights
from hyimg_cli.models.latent_video import Branch, BranchInputs, PromptEmbedding
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

    def has_guidance(self, job: VideoJob) -> bool:
        """The pipeline's rule: by the first scale alone."""
        return job.guidance_scale > 1.0

    def noise_dtype(self) -> torch.dtype:
        """float32 whatever the transformer's: the latents stay so to the end."""
        return torch.float32

    def guided(self, job: VideoJob, schedule: JobScheduler, branches: RunningBranches) -> Velocity:
        """u + g (c - u), in the transformer's dtype; with two networks each has its own scale."""
        second = job.guidance_scale if job.guidance_scale_2 is None else job.guidance_scale_2
        scales = [(job.guidance_scale, second)[number] for number in self._network_of(schedule)]
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
        """It counts its steps: which network takes one is known on the host, beforehand."""
        schedule = self.schedule(inputs.job)
        at_step, steps = self._network_of(schedule), count(inputs.first_step)
        text_1NM = _padded(inputs.embedding, self.networks[0].dtype, self.device)
        rows = self._timestep_rows(noise_like_1CFYX)

        def velocity(latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
            step = next(steps)
            network = self.networks[at_step[step]]
            self.place.bring(network)
            if rows is not None:
                timestep_B = timestep_B.float()[:, None].expand(-1, rows)
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
                    return_dict=False,
                )[0]
            return made

        return velocity

    def _network_of(self, schedule: JobScheduler) -> list[int]:
        """Which network takes each step: from `boundary_ratio` on the second."""
        ratio = self.layout.index.get("boundary_ratio")
        if ratio is None or len(self.networks) == 1:
            return [0] * len(schedule.levels)
        boundary = ratio * schedule.train_timesteps
        return [int(level < boundary) for level in schedule.levels]

    def _timestep_rows(self, noise_1CFYX: Tensor) -> int | None:
        """Where the 5B model of 2.2 wants a timestep for every patch: how many there are."""
        if not self.layout.index.get("expand_timesteps"):
            return None
        frames, height, width = noise_1CFYX.shape[2:]
        return int(frames * len(range(0, height, 2)) * len(range(0, width, 2)))


def _padded(embedding: PromptEmbedding, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tokens and zeros behind them up to 512, all of which are attended to."""
    valid_NM = embedding.tensors[TEXT].to(device, dtype)
    padded_1NM = valid_NM.new_zeros(1, WAN_MAX_TOKENS, valid_NM.shape[1])
    padded_1NM[0, : len(valid_NM)] = valid_NM
    return padded_1NM
