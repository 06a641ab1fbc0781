"""Blocks that replace the library's, by name: `LibraryPipeline.own_blocks` selects them.

Z-Image's computes both guidance branches in one forward, as diffusers' classic pipeline does.
FLUX.2 klein's reads nothing from the GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import (
    SEQ_MULTI_OF,
    ZSingleStreamAttnProcessor,
)
from diffusers.modular_pipelines.flux2.decoders import Flux2UnpackLatentsStep
from diffusers.modular_pipelines.z_image.denoise import ZImageLoopDenoiser
from torch import Tensor

Blocks = dict[str, Any]


class JoinedBranches(ZImageLoopDenoiser):
    """Compute both guidance branches in one forward; the library's block has other bits.

    A scale of s weights their difference by s, not by s - 1.
    """

    @torch.no_grad()
    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
        if block_state.negative_prompt_embeds is None:
            return super().__call__(components, block_state, i, t)
        texts = [*block_state.prompt_embeds, *block_state.negative_prompt_embeds]
        if block_state.latent_model_input[0].is_cuda:
            _attend_by_length(components.transformer, [len(text) for text in texts])
        found = components.transformer(
            x=block_state.latent_model_input * 2,
            t=block_state.timestep.repeat(2),
            cap_feats=texts,
            return_dict=False,
        )[0]
        towards, away = (one[None].squeeze(2).float() for one in found)
        difference = components.guider.guidance_scale * (towards - away)
        block_state.noise_pred = -(towards + difference)
        return components, block_state


class OwnLengths(ZSingleStreamAttnProcessor):
    """Attention of sequences of unequal length in one forward, each within its own rows.

    The library masks the rows that fill the shorter ones up, and a GPU's fastest kernels take no
    mask. On a CPU it keeps doing so: without the mask, sums round differently.
    """

    def __init__(self, backend: Any) -> None:
        self._attention_backend = backend
        # Rows that fill each sequence up.
        self.fills: Sequence[int] = ()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Any = None,
    ) -> Tensor:
        if attention_mask is None:
            made: Tensor = super().__call__(attn, hidden_states, freqs_cis=freqs_cis)
            return made
        made = torch.zeros_like(hidden_states)
        for number, fill in enumerate(self.fills):
            own = slice(number, number + 1), slice(hidden_states.shape[1] - fill)
            made[own] = super().__call__(attn, hidden_states[own], freqs_cis=freqs_cis[own])
        return made


def _attend_by_length(transformer: Any, lengths: Sequence[int]) -> None:
    """Attend without masks to texts of these numbers of rows, in the next forward."""
    filled = [-(-length // SEQ_MULTI_OF) * SEQ_MULTI_OF for length in lengths]
    for block in (*transformer.context_refiner, *transformer.layers):
        attention = block.attention
        if not isinstance(attention.processor, OwnLengths):
            attention.processor = OwnLengths(attention.processor._attention_backend)
        attention.processor.fills = [max(filled) - one for one in filled]


class RowsInOrder(Flux2UnpackLatentsStep):
    """Unpack latents, whose rows are in order; the library reads their places from the GPU."""

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        side = 2 * components.vae_scale_factor
        sides = [int(state.get(name)) // side for name in ("height", "width")]
        rows = state.get("latents")
        state.set("latents", torch.stack([one.view(*sides, -1).permute(2, 0, 1) for one in rows]))
        return components, state


def _join_branches(blocks: Blocks) -> None:
    blocks["denoise.denoise"].sub_blocks["denoiser"] = JoinedBranches()


def _unpack_in_order(blocks: Blocks) -> None:
    blocks["denoise.after_denoise"] = RowsInOrder()


def _leave_out_pictures(blocks: Blocks) -> None:
    """Leave out what a text's stage does with pictures: the caption of one without a prompt."""
    for name in ("text_encoder.resize", "text_encoder.get_image_prompt"):
        del blocks[name]


OWN_BLOCKS: dict[str, Callable[[Blocks], None]] = {
    "joined branches": _join_branches,
    "rows in order": _unpack_in_order,
    "texts alone": _leave_out_pictures,
}
