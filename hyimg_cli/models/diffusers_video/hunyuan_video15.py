"""HunyuanVideo-1.5: its guider, and its transformer's modules in our own order.

The library's forward takes padded text and masks, as its pipeline gives them. Ours runs the same
modules over valid tokens only: what depends on the job alone (rotary tables, glyph tokens, their
order) is computed once, no mask is built, nothing is read back.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width,
# S sequence, H heads, D head width
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import Tensor, nn

from hyimg_cli.models.diffusers_video.encoders import GLYPH, TEXT, HunyuanPrompts
from hyimg_cli.models.diffusers_video.model import DiffusersVideo, Guide
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.vaes import HunyuanVae
from hyimg_cli.models.diffusers_video.weights import configured
from hyimg_cli.models.latent import PromptEmbedding
from hyimg_cli.models.latent_video import LATENTS, TOKENS, Branch, BranchInputs
from hyimg_cli.spec.job import VideoJob

# Model input [B, 2C + 1, F, Y, X], timestep [B], and the next one if the network reads it.
Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class MaskFreeAttention(HunyuanVideo15AttnProcessor2_0):
    """Joint attention without a mask, for valid tokens only.

    The library's processor expands the text's mask to [B, 1, S, S] in every block: 2.6 GB at 480p,
    and no mask-free kernel can be chosen.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Video and text rows, [B, S, M] each, attending to all of both."""

        def heads(project: nn.Module, rows_BSM: Tensor) -> Tensor:
            heads_BSHD: Tensor = project(rows_BSM).unflatten(2, (attn.heads, -1))
            return heads_BSHD

        video_BSM, text_BSM = hidden_states, encoder_hidden_states
        query: Any = attn.norm_q(heads(attn.to_q, video_BSM))
        key: Any = attn.norm_k(heads(attn.to_k, video_BSM))
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        text_query = attn.norm_added_q(heads(attn.add_q_proj, text_BSM))
        text_key = attn.norm_added_k(heads(attn.add_k_proj, text_BSM))
        mixed_BSM = dispatch_attention_fn(
            torch.cat([query, text_query], dim=1),
            torch.cat([key, text_key], dim=1),
            torch.cat([heads(attn.to_v, video_BSM), heads(attn.add_v_proj, text_BSM)], dim=1),
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        video_BSM, text_BSM = mixed_BSM.split([video_BSM.shape[1], text_BSM.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video_BSM)), attn.to_add_out(text_BSM)


def hoisted_forward(
    network: Any, embedding: PromptEmbedding, like_1CFYX: Tensor, tokens_1NM: Tensor | None
) -> Forward:
    """The network's modules in the order of its forward, over valid tokens and without a mask.

    Equal to the library's but for rounding: masked tokens take no part in either. Source: `forward`
    of diffusers' HunyuanVideo15Transformer3DModel.
    """
    # Equal at every step: the encoder's text rows, the marks of text, glyph and picture rows,
    # rotary tables, and the finished rows of pictures and glyphs, which do not depend on the
    # timestep.
    text_1NM = embedding.tensors[TEXT][None].to(like_1CFYX)
    kinds = torch.arange(3, device=like_1CFYX.device)
    of_text_M, of_glyphs_M, of_pictures_M = network.cond_type_embed(kinds)
    rotary, before = network.rope(like_1CFYX), []
    if tokens_1NM is not None:
        image_1NM = network.image_embedder(tokens_1NM.to(like_1CFYX))
        before.append(image_1NM + of_pictures_M)
    if GLYPH in embedding.tensors:
        glyph_1NM = network.context_embedder_2(embedding.tensors[GLYPH][None].to(like_1CFYX))
        before.append(glyph_1NM + of_glyphs_M)
    t, p = network.config.patch_size_t, network.config.patch_size

    def forward(model_input: Tensor, timestep: Tensor, behind: Tensor | None) -> Tensor:
        embedded_time = network.time_embed(timestep, timestep_r=behind)
        video = network.x_embedder(model_input)
        text = network.context_embedder(text_1NM, timestep)
        text = text + of_text_M
        text = torch.cat([*before, text], dim=1) if before else text
        for block in network.transformer_blocks:
            video, text = block(video, text, embedded_time, None, rotary)
        rows_BNM: Tensor = network.proj_out(network.norm_out(video, embedded_time))
        # Rows of patches as latents, [B, C, F, Y, X].
        frames, height, width = model_input.shape[2:]
        grid = rows_BNM.unflatten(1, (frames // t, height // p, width // p))
        cells: Tensor = grid.unflatten(-1, (-1, t, p, p)).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    return forward


class HunyuanVideo15(DiffusersVideo):
    """The family's checkpoint."""

    prompt_encoder, vae_class = HunyuanPrompts, HunyuanVae
    has_linear_sigmas = True
    new_forward = staticmethod(hoisted_forward)

    def prepare(self, network: Any) -> None:
        for block in network.transformer_blocks:
            block.attn.set_processor(MaskFreeAttention())

    def has_guidance(self, job: VideoJob) -> bool:
        """True if the guider has a second branch at any step."""
        return bool(self._guider(job).num_conditions > 1)

    def guide(self, job: VideoJob, schedule: JobScheduler) -> Guide:
        """Return the job's own guider."""
        guider, timesteps = self._guider(job), schedule.timesteps

        def guide(index: int, velocities: Sequence[Tensor]) -> Tensor:
            level = timesteps[index]
            guider.set_state(step=index, num_inference_steps=len(timesteps), timestep=level)
            made: Tensor = guider.forward(*velocities[: guider.num_conditions]).pred
            return made

        return guide

    def new_branch(self, inputs: BranchInputs) -> Branch:
        (network,) = self.networks
        # Everything that depends on the job alone is computed now.
        self.place.offload.onload(network)
        like_1CFYX = torch.empty(
            self.latents_shape(inputs.job), dtype=network.dtype, device=self.device
        )
        tokens = inputs.start.get(TOKENS)
        forward = self.new_forward(network, inputs.embedding, like_1CFYX, tokens)
        # Without a picture to continue from, its latents and mask are zeros for every step.
        channels = like_1CFYX.shape[1] + 1
        condition = like_1CFYX.new_zeros(1, channels, *like_1CFYX.shape[2:])
        if LATENTS in inputs.start:
            condition[:, :-1, :1] = inputs.start[LATENTS].to(condition)
            condition[:, -1, 0] = 1
        # A distilled network's velocity is the mean up to the next timestep: 0 after the last.
        following: Tensor | None = None
        if network.config.use_meanflow:
            timesteps = self.schedule(inputs.job).timesteps
            following = torch.cat([timesteps[1:], timesteps.new_zeros(1)])

        def velocity(step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Tensor:
            self.place.offload.onload(network)
            timestep_B = timestep_B.to(latents_BCFYX.dtype)
            behind = None if following is None else following[step].expand(1).to(timestep_B)
            return forward(torch.cat([latents_BCFYX, condition], dim=1), timestep_B, behind)

        return velocity

    def _guider(self, job: VideoJob) -> Any:
        """The checkpoint's guider, new and with the job's scale: a used one keeps its counter."""
        return configured(
            self.layout.components["guider"], guidance_scale=job.guidance_scale, enabled=True
        )
