"""HunyuanVideo-1.5: its guider, and its transformer by two ways.

The stock way calls the library's forward with padded text and masks, as its pipeline does. The
hoisted way runs the same modules over valid tokens only: what depends on the job alone (rotary
tables, glyph tokens, their order) is computed once, no mask is built, nothing is read back.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.models.diffusers_video.attention import MaskFreeAttention
from hyimg_cli.models.diffusers_video.branches import RunningBranches
from hyimg_cli.models.diffusers_video.card import HUNYUAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.denoising import Velocity
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.prompts_hunyuan import (
    GLYPH,
    MAX_GLYPH_TOKENS,
    TEXT,
    HunyuanPrompts,
)
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.vaes import HunyuanVae
from hyimg_cli.models.diffusers_video.weights import configured, load_weights
from hyimg_cli.models.latent_video import (
    LATENTS,
    TOKENS,
    Branch,
    BranchInputs,
    PromptEmbedding,
)
from hyimg_cli.spec.job import VideoJob

IMAGE_TOKENS = 729
CONTEXTS = ("pred_cond", "pred_uncond")
# Model input [B, 2C + 1, F, Y, X], timestep [B], and the next one where the network wants it.
Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class HunyuanVideo15(DiffusersVideo):
    """The family's checkpoint; `is_fast` takes the hoisted way."""

    has_linear_sigmas = True

    def __init__(self, *args: Any, is_fast: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_fast = is_fast

    def new_prompts(self) -> HunyuanPrompts:
        return HunyuanPrompts(self.layout, self.place)

    def new_vae(self) -> HunyuanVae:
        return HunyuanVae(load_weights(self.layout.components["vae"], self.place))

    def prepare(self, network: Any) -> None:
        """Its processor is the library's own wherever a mask is given."""
        for block in network.transformer_blocks:
            block.attn.set_processor(MaskFreeAttention())

    def has_guidance(self, job: VideoJob) -> bool:
        """True if the guider has a second branch at any step."""
        count: int = self._guider(job).num_conditions
        return count > 1

    def noise_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.networks[0].dtype
        return dtype

    def guided(self, job: VideoJob, schedule: JobScheduler, branches: RunningBranches) -> Velocity:
        """Guide the branches' velocities by the job's own guider.

        A guider that is switched off at some steps has both branches evaluated there all the same.
        """
        guider, timesteps = self._guider(job), schedule.timesteps

        def velocity(index: int, latents_BCFYX: Tensor) -> Tensor:
            level = timesteps[index]
            guider.set_state(step=index, num_inference_steps=len(timesteps), timestep=level)
            timestep = level.expand(1).to(latents_BCFYX.dtype)
            predictions = branches.at(index, latents_BCFYX, timestep)
            made: Tensor = guider.forward(*predictions[: guider.num_conditions]).pred
            return made

        return velocity

    def new_branch(self, inputs: BranchInputs, noise_like_1CFYX: Tensor) -> Branch:
        (network,) = self.networks
        # What depends on the job alone is computed now.
        self.place.bring(network)
        forward_of = hoisted_forward if self.is_fast else stock_forward
        tokens = inputs.start.get(TOKENS)
        forward = forward_of(network, inputs.embedding, noise_like_1CFYX, tokens)
        # Without a picture to continue from its latents and their mask are zeros for every step.
        channels = noise_like_1CFYX.shape[1] + 1
        condition = noise_like_1CFYX.new_zeros(1, channels, *noise_like_1CFYX.shape[2:])
        if LATENTS in inputs.start:
            condition[:, :-1, :1] = inputs.start[LATENTS].to(condition)
            condition[:, -1, 0] = 1
        following = self._following(inputs.job) if network.config.use_meanflow else None

        def velocity(step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
            self.place.bring(network)
            behind = None if following is None else following[step].expand(1).to(timestep_B)
            with network.cache_context(CONTEXTS[inputs.number]):
                return forward(torch.cat([latents_BCFYX, condition], dim=1), timestep_B, behind)

        return velocity

    def _following(self, job: VideoJob) -> Tensor:
        """The timestep behind each step: 0 behind the last. A distilled network's velocity is the
        mean on the way there.
        """
        timesteps = self.schedule(job).timesteps
        return torch.cat([timesteps[1:], timesteps.new_zeros(1)])

    def _guider(self, job: VideoJob) -> Any:
        """The checkpoint's guider, new and with the job's scale: a used one keeps its counter."""
        return configured(
            self.layout.components["guider"], guidance_scale=job.guidance_scale, enabled=True
        )


def stock_forward(
    network: Any, embedding: PromptEmbedding, noise_1CFYX: Tensor, tokens_1NM: Tensor | None
) -> Forward:
    """The library's own forward, its inputs padded and masked as the pipeline gives them."""
    config = network.config
    text_1NM, text_mask = _padded(
        embedding, TEXT, HUNYUAN_MAX_TOKENS, config.text_embed_dim, noise_1CFYX
    )
    glyph_1NM, glyph_mask = _padded(
        embedding, GLYPH, MAX_GLYPH_TOKENS, config.text_embed_2_dim, noise_1CFYX
    )
    image_1NM = noise_1CFYX.new_zeros(1, IMAGE_TOKENS, config.image_embed_dim)
    if tokens_1NM is not None:
        image_1NM = tokens_1NM.to(noise_1CFYX)

    def forward(model_input: Tensor, timestep: Tensor, behind: Tensor | None) -> Tensor:
        velocity: Tensor = network(
            hidden_states=model_input,
            timestep=timestep,
            timestep_r=behind,
            encoder_hidden_states=text_1NM,
            encoder_attention_mask=text_mask,
            encoder_hidden_states_2=glyph_1NM,
            encoder_attention_mask_2=glyph_mask,
            image_embeds=image_1NM,
            return_dict=False,
        )[0]
        return velocity

    return forward


def hoisted_forward(
    network: Any, embedding: PromptEmbedding, noise_1CFYX: Tensor, tokens_1NM: Tensor | None
) -> Forward:
    """The network's modules in the order of its forward, over valid tokens and without a mask.

    Equal to the stock way but for rounding: masked tokens take no part in either. Source: `forward`
    of diffusers' HunyuanVideo15Transformer3DModel.
    """
    # The same at every step: the encoder's text rows, what marks rows of text, glyphs and pictures,
    # rotary tables, and the finished rows of pictures and glyphs, which do not see the timestep.
    text_1NM = embedding.tensors[TEXT][None].to(noise_1CFYX)
    kinds = torch.arange(3, device=noise_1CFYX.device)
    of_text_M, of_glyphs_M, of_pictures_M = network.cond_type_embed(kinds)
    rotary, before = network.rope(noise_1CFYX), []
    if tokens_1NM is not None:
        image_1NM = network.image_embedder(tokens_1NM.to(noise_1CFYX))
        before.append(image_1NM + of_pictures_M)
    if GLYPH in embedding.tensors:
        glyph_1NM = network.context_embedder_2(embedding.tensors[GLYPH][None].to(noise_1CFYX))
        before.append(glyph_1NM + of_glyphs_M)

    def forward(model_input: Tensor, timestep: Tensor, behind: Tensor | None) -> Tensor:
        embedded_time = network.time_embed(timestep, timestep_r=behind)
        video = network.x_embedder(model_input)
        text = network.context_embedder(text_1NM, timestep)
        text = text + of_text_M
        text = torch.cat([*before, text], dim=1) if before else text
        for block in network.transformer_blocks:
            video, text = block(video, text, embedded_time, None, rotary)
        rows = network.proj_out(network.norm_out(video, embedded_time))
        return _unpatched(rows, model_input, network.config)

    return forward


def _unpatched(rows_BNM: Tensor, model_input: Tensor, config: Any) -> Tensor:
    """Rows of patches as latents, [B, C, F, Y, X]."""
    frames, height, width = model_input.shape[2:]
    t, p = config.patch_size_t, config.patch_size
    grid = rows_BNM.unflatten(1, (frames // t, height // p, width // p))
    cells = grid.unflatten(-1, (-1, t, p, p)).permute(0, 4, 1, 5, 2, 6, 3, 7)
    latents: Tensor = cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return latents


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
