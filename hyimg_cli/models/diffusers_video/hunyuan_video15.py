"""HunyuanVideo-1.5: its guider, and its transformer by two ways.

The stock way calls the library's forward with padded text and masks, as its pipeline does. The
hoisted way runs the same modules over valid tokens only: what depends on the job alone (rotary
tables, glyph tokens, their order) is computed once, no mask is built, nothing is read back.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hyimg_cli.models.diffusers_video import step_cache
from hyimg_cli.models.diffusers_video.attention import MaskFreeAttention
from hyimg_cli.models.diffusers_video.branches import RunningBranches
from hyimg_cli.models.diffusers_video.card import HUNYUAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.denoising import Denoiser
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.prompts_hunyuan import (
    GLYPH,
    MAX_GLYPH_TOKENS,
    TEXT,
    HunyuanPrompts,
)
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.vaes import HunyuanVae
from hyimg_cli.models.diffusers_video.weights import Place, configured, load_weights
from hyimg_cli.models.latent_video import Branch, BranchInputs, PromptEmbedding
from hyimg_cli.spec.job import VideoJob

IMAGE_TOKENS = 729
CONTEXTS = ("pred_cond", "pred_uncond")
Forward = Callable[[Tensor, Tensor], Tensor]  # model input [B, 2C + 1, F, Y, X], timestep [B]


class Way(Protocol):
    """How a branch's text becomes a forward pass."""

    def forward_of(self, embedding: PromptEmbedding, noise_1CFYX: Tensor) -> Forward: ...


class HunyuanVideo15:
    """The family: components of one checkpoint, each loaded at its first use."""

    def __init__(self, layout: CheckpointLayout, place: Place, *, is_fast: bool) -> None:
        self.layout = layout
        self.place = place
        self.is_fast = is_fast
        self.prompts = HunyuanPrompts(layout, place)

    @cached_property
    def network(self) -> Any:
        """The transformer; its processor is the library's own wherever a mask is given."""
        network = load_weights(self.layout.components["transformer"], self.place)
        for block in network.transformer_blocks:
            block.attn.set_processor(MaskFreeAttention())
        return network

    @cached_property
    def vae(self) -> HunyuanVae:
        return HunyuanVae(load_weights(self.layout.components["vae"], self.place))

    def load_transformer(self) -> None:
        _ = self.network

    def has_guidance(self, job: VideoJob) -> bool:
        return _guided(self._guider(job))

    def noise_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.network.dtype
        return dtype

    def denoiser(self, job: VideoJob, noise_1CFYX: Tensor, branches: RunningBranches) -> Denoiser:
        schedule = JobScheduler(
            self.layout.components["scheduler"],
            steps=job.num_inference_steps,
            flow_shift=job.flow_shift,
            device=self.place.device,
            is_linear=True,
        )
        velocity = HunyuanVelocity(self._guider(job), schedule.timesteps, branches)
        return Denoiser(schedule, velocity, noise_1CFYX, [self.network])

    def branch(self, inputs: BranchInputs, noise_like_1CFYX: Tensor) -> Branch:
        step_cache.forget(self.network)
        # What depends on the job alone is computed now.
        self.place.offload.bring(self.network)
        way: Way = (HoistedWay if self.is_fast else StockWay)(self.network)
        forward = way.forward_of(inputs.embedding, noise_like_1CFYX)
        # No picture to continue from: its latents and their mask are zeros for every step.
        channels = noise_like_1CFYX.shape[1] + 1
        condition = noise_like_1CFYX.new_zeros(1, channels, *noise_like_1CFYX.shape[2:])

        def velocity(latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
            self.place.offload.bring(self.network)
            with self.network.cache_context(CONTEXTS[inputs.number]):
                return forward(torch.cat([latents_BCFYX, condition], dim=1), timestep_B)

        return velocity

    def _guider(self, job: VideoJob) -> Any:
        """The checkpoint's guider, new and with the job's scale: a used one keeps its counter."""
        return configured(
            self.layout.components["guider"], guidance_scale=job.guidance_scale, enabled=True
        )


class HunyuanVelocity:
    """The velocity at a step: what the job's own guider makes of its branches'.

    A guider that is switched off at some steps has both branches evaluated there all the same.
    """

    def __init__(self, guider: Any, timesteps: Tensor, branches: RunningBranches) -> None:
        self._guider = guider
        self._timesteps = timesteps
        self._branches = branches

    def __call__(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        level = self._timesteps[index]
        self._guider.set_state(step=index, num_inference_steps=len(self._timesteps), timestep=level)
        timestep = level.expand(1).to(latents_BCFYX.dtype)
        predictions = self._branches.at(index, latents_BCFYX, timestep)
        velocity: Tensor = self._guider.forward(*predictions[: self._guider.num_conditions]).pred
        return velocity


class StockWay:
    """The library's own forward, its inputs padded and masked as the pipeline gives them."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def forward_of(self, embedding: PromptEmbedding, noise_1CFYX: Tensor) -> Forward:
        config = self.network.config
        text_1NM, text_mask = _padded(
            embedding, TEXT, HUNYUAN_MAX_TOKENS, config.text_embed_dim, noise_1CFYX
        )
        glyph_1NM, glyph_mask = _padded(
            embedding, GLYPH, MAX_GLYPH_TOKENS, config.text_embed_2_dim, noise_1CFYX
        )
        image_1NM = noise_1CFYX.new_zeros(1, IMAGE_TOKENS, config.image_embed_dim)

        def forward(model_input: Tensor, timestep: Tensor) -> Tensor:
            velocity: Tensor = self.network(
                hidden_states=model_input,
                timestep=timestep,
                encoder_hidden_states=text_1NM,
                encoder_attention_mask=text_mask,
                encoder_hidden_states_2=glyph_1NM,
                encoder_attention_mask_2=glyph_mask,
                image_embeds=image_1NM,
                return_dict=False,
            )[0]
            return velocity

        return forward


class HoistedWay:
    """The network's modules in the order of its forward, over valid tokens and without a mask.

    Equal to the stock way but for rounding: masked tokens take no part in either. Source: `forward`
    of diffusers' HunyuanVideo15Transformer3DModel.
    """

    def __init__(self, network: Any) -> None:
        self.network = network

    def forward_of(self, embedding: PromptEmbedding, noise_1CFYX: Tensor) -> Forward:
        text_1NM = embedding.tensors[TEXT][None].to(noise_1CFYX)
        constant = JobConstants(
            text_1NM, self._glyphs(embedding, noise_1CFYX), self.network.rope(noise_1CFYX)
        )
        return partial(self._forward, constant)

    def _glyphs(self, embedding: PromptEmbedding, like: Tensor) -> Tensor | None:
        """The quoted text's tokens, ready for the blocks; they do not see the timestep."""
        if GLYPH not in embedding.tensors:
            return None
        network = self.network
        glyph_1NM = network.context_embedder_2(embedding.tensors[GLYPH][None].to(like))
        tokens: Tensor = glyph_1NM + network.cond_type_embed.weight[1]
        return tokens

    def _forward(self, constant: "JobConstants", model_input: Tensor, timestep: Tensor) -> Tensor:
        network = self.network
        embedded_time = network.time_embed(timestep)
        video = network.x_embedder(model_input)
        text = network.context_embedder(constant.text_1NM, timestep)
        text = text + network.cond_type_embed.weight[0]
        if constant.glyph_1NM is not None:
            text = torch.cat([constant.glyph_1NM, text], dim=1)
        for block in network.transformer_blocks:
            video, text = block(video, text, embedded_time, None, constant.rotary)
        rows = network.proj_out(network.norm_out(video, embedded_time))
        return self._unpatched(rows, model_input)

    def _unpatched(self, rows_BNM: Tensor, model_input: Tensor) -> Tensor:
        """Rows of patches as latents, [B, C, F, Y, X]."""
        frames, height, width = model_input.shape[2:]
        t, p = self.network.config.patch_size_t, self.network.config.patch_size
        grid = rows_BNM.unflatten(1, (frames // t, height // p, width // p))
        cells = grid.unflatten(-1, (-1, t, p, p)).permute(0, 4, 1, 5, 2, 6, 3, 7)
        latents: Tensor = cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return latents


@dataclass(frozen=True)
class JobConstants:
    """What a branch's forwards have in common: the encoder's text rows, the finished glyph rows,
    the rotary tables.
    """

    text_1NM: Tensor
    glyph_1NM: Tensor | None
    rotary: tuple[Tensor, Tensor]


def _guided(guider: Any) -> bool:
    """Whether the guider has a second branch at any step."""
    count: int = guider.num_conditions
    return count > 1


def _padded(
    embedding: PromptEmbedding, name: str, length: int, width: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """A stream's tokens with zeros behind them, and its mask, as `encode_prompt` returns them."""
    rows_1NM, mask_1N = like.new_zeros(1, length, width), like.new_zeros(1, length)
    if name in embedding.tensors:
        valid = embedding.tensors[name]
        rows_1NM[0, : len(valid)] = valid.to(like)
        mask_1N[0, : len(valid)] = 1
    return rows_1NM, mask_1N
