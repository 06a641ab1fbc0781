"""Wan 2.1 and 2.2: the library's own transformer forward, one transformer or two.

Its forward reads nothing back and takes no mask; only the scheduler's step needed help.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.models.diffusers_video.card import WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.decode import WanVae
from hyimg_cli.models.diffusers_video.denoising import Denoiser
from hyimg_cli.models.diffusers_video.layout import Layout
from hyimg_cli.models.diffusers_video.prompts_wan import TEXT, WanPrompts
from hyimg_cli.models.diffusers_video.scheduling import Schedule
from hyimg_cli.models.diffusers_video.weights import Place, load_weights
from hyimg_cli.models.latent_video import PromptEmbedding, RunBranches
from hyimg_cli.spec.job import VideoJob

CONTEXTS = ("cond", "uncond")


@dataclass(frozen=True)
class Stage:
    """Which transformer takes a step, and with what guidance."""

    network: Any
    guidance_scale: float


class Wan:
    """The family: components of one checkpoint, each loaded at its first use."""

    def __init__(self, layout: Layout, place: Place) -> None:
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
        """In float32, as the authors run it: in bfloat16 its frame-by-frame features drift."""
        place = Place(self.place.device, torch.float32)
        return WanVae(load_weights(self.layout.components["vae"], place))

    def load(self) -> None:
        _ = self.networks, self.vae

    def has_guidance(self, job: VideoJob) -> bool:
        """The pipeline's rule: by the first scale alone."""
        return job.guidance_scale > 1.0

    def noise_dtype(self) -> torch.dtype:
        """float32 whatever the transformer's: the latents stay so to the end."""
        return torch.float32

    def denoiser(
        self,
        job: VideoJob,
        embeddings: Mapping[str, PromptEmbedding],
        noise_1CFYX: Tensor,
        run_branches: RunBranches,
    ) -> Denoiser:
        schedule = Schedule(
            self.layout.components["scheduler"],
            steps=job.num_inference_steps,
            flow_shift=job.flow_shift,
            device=self.place.device,
            is_linear=False,
        )
        texts = (job.prompt, job.negative_prompt)[: 2 if self.has_guidance(job) else 1]
        like = torch.empty(0, dtype=self.networks[0].dtype, device=self.place.device)
        velocity = GuidedVelocity(
            self._stages(job, schedule),
            schedule,
            [_padded(embeddings[text], like) for text in texts],
            run_branches,
            timestep_rows=self._timestep_rows(noise_1CFYX),
        )
        return Denoiser(schedule, velocity, noise_1CFYX, self.networks)

    def _stages(self, job: VideoJob, schedule: Schedule) -> list[Stage]:
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


class GuidedVelocity:
    """The velocity at a step: each branch its own forward, then u + g (c - u)."""

    def __init__(
        self,
        stages: list[Stage],
        schedule: Schedule,
        texts: list[Tensor],
        run_branches: RunBranches,
        *,
        timestep_rows: int | None,
    ) -> None:
        self._stages = stages
        self._schedule = schedule
        self._texts = texts
        self._run_branches = run_branches
        self._timestep_rows = timestep_rows

    def __call__(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        stage = self._stages[index]
        model_input = latents_BCFYX.to(self._texts[0].dtype)
        branches = [
            partial(self._branch, context, text, index, model_input)
            for context, text in zip(CONTEXTS, self._texts, strict=False)
        ]
        velocities = self._run_branches(branches)
        if len(velocities) == 1:
            return velocities[0]
        conditional, unconditional = velocities
        return unconditional + stage.guidance_scale * (conditional - unconditional)

    def _branch(self, context: str, text_1NM: Tensor, index: int, model_input: Tensor) -> Tensor:
        network, schedule = self._stages[index].network, self._schedule
        where = {
            "step_index": index,
            "sigma": schedule.sigmas[index],
            "num_inference_steps": len(schedule.levels),
        }
        with network.cache_context(context, **where):
            velocity: Tensor = network(
                hidden_states=model_input,
                timestep=self._timestep(index),
                encoder_hidden_states=text_1NM,
                return_dict=False,
            )[0]
        return velocity

    def _timestep(self, index: int) -> Tensor:
        level = self._schedule.timesteps[index]
        if self._timestep_rows is None:
            return level.expand(1)
        return level.float().expand(1, self._timestep_rows)


def _padded(embedding: PromptEmbedding, like: Tensor) -> Tensor:
    """The tokens and zeros behind them up to 512, all of which are attended to."""
    valid_NM = embedding.tensors[TEXT].to(like)
    padded_1NM = valid_NM.new_zeros(1, WAN_MAX_TOKENS, valid_NM.shape[1])
    padded_1NM[0, : len(valid_NM)] = valid_NM
    return padded_1NM
