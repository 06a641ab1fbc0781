"""Blocks that replace the library's, by name: `LibraryPipeline.own_blocks` selects them.

Z-Image's computes both guidance branches in one forward, as diffusers' classic pipeline does.
FLUX.2's read nothing from the GPU, and FLUX.2-dev's text has its authors' system message.
Krea 2's texts are not filled up. FLUX.3's sources are encoded one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import (
    SEQ_MULTI_OF,
    ZSingleStreamAttnProcessor,
)
from diffusers.modular_pipelines.flux2.decoders import Flux2UnpackLatentsStep
from diffusers.modular_pipelines.flux3.encoders import (
    Flux3DistilledTextEncoderStep,
    Flux3ProcessImagesInputStep,
    Flux3TextEncoderStep,
    Flux3VaeEncoderStep,
)
from diffusers.modular_pipelines.krea2.before_denoise import Krea2TextInputsStep
from diffusers.modular_pipelines.krea2.denoise import (
    Krea2LoopDenoiser,
    Krea2TurboLoopDenoiser,
)
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.modular_pipelines.z_image.denoise import ZImageLoopDenoiser
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from torch import Tensor
from torch.nn import functional

Blocks = dict[str, Any]


class JoinedBranches(ZImageLoopDenoiser):
    """Compute both guidance branches in one forward; the library's block has other bits.

    A scale of s weights their difference by s, not by s - 1.
    """

    @torch.no_grad()
    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
        if block_state.negative_prompt_embeds is None:
            return super().__call__(components, block_state, i, t)
        # A job's two branches are next to each other, also in a batch of several jobs.
        pairs = zip(block_state.prompt_embeds, block_state.negative_prompt_embeds, strict=True)
        texts = [text for pair in pairs for text in pair]
        if block_state.latent_model_input[0].is_cuda:
            _attend_by_length(components.transformer, [len(text) for text in texts])
        found = components.transformer(
            x=[latents for latents in block_state.latent_model_input for _ in range(2)],
            t=block_state.timestep.repeat_interleave(2),
            cap_feats=texts,
            return_dict=False,
        )[0]
        towards, away = (torch.stack(found[n::2]).squeeze(2).float() for n in range(2))
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


class TextsWithoutPadding(Krea2TextInputsStep):
    """On a GPU, give Krea 2 its texts without the rows that fill them up.

    The library masks those rows, and a GPU's fastest kernels take no mask. Rows of texts have no
    positions. On a CPU the library's rows stay: without them, sums round differently.
    """

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        components, state = super().__call__(components, state)
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            rows, mask = state.get(name), state.get(f"{name}_mask")
            if rows is not None and mask is not None and rows.is_cuda:
                state.set(name, rows[0][mask[0]][None])
                state.set(f"{name}_mask", None)
        return components, state


class Krea2Step:
    """A step of Krea 2 that takes texts without a mask, as its transformer does.

    It has the classic pipeline's bits: torch multiplies by a weight that may need a gradient in
    another way if there are rows of rows, and loaded weights need none.
    """

    @property
    def inputs(self) -> list[Any]:
        own: list[Any] = super().inputs  # type: ignore[misc]
        is_mask = [one.name == "prompt_embeds_mask" for one in own]
        return [
            replace(one, required=False) if is_so else one
            for one, is_so in zip(own, is_mask, strict=True)
        ]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
        weight = components.transformer.text_fusion.projector.weight
        weight.requires_grad_(weight.is_floating_point())
        return super().__call__(components, block_state, i, t)  # type: ignore[misc]


class OneBranch(Krea2Step, Krea2TurboLoopDenoiser):
    pass


class BranchesOfOwnLengths(Krea2Step, Krea2LoopDenoiser):
    """Guidance with texts that are not filled up; the library's block has one length for both."""

    @torch.no_grad()
    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
        texts = [block_state.prompt_embeds, block_state.negative_prompt_embeds]
        masks = block_state.prompt_embeds_mask, block_state.negative_prompt_embeds_mask
        if texts[1] is None or any(one is not None for one in masks):
            return super().__call__(components, block_state, i, t)
        network = components.transformer
        latents, time = (
            one.to(network.dtype) for one in (block_state.latents, block_state.timestep)
        )
        of_picture = block_state.position_ids[-latents.shape[1] :]
        towards, away = (
            network(
                hidden_states=latents,
                encoder_hidden_states=text.to(network.dtype),
                timestep=time,
                position_ids=functional.pad(of_picture, (0, 0, text.shape[1], 0)),
                attention_kwargs=block_state.attention_kwargs,
                return_dict=False,
            )[0]
            for text in texts
        )
        block_state.noise_pred = towards + components.guider.guidance_scale * (towards - away)
        return components, block_state


class SourceAlone(Flux3ProcessImagesInputStep):
    """Bring one of FLUX.3's sources to whole rows, as an input says; the library counts them."""

    @property
    def inputs(self) -> list[Any]:
        return [*super().inputs, InputParam("resize_mode")]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        mode, processor = state.get("resize_mode"), components.image_processor
        made, _ = processor.preprocess(state.get("image"), resize_mode=mode)
        state.set("condition_images", [made])
        return components, state


class LatentsAlone(Flux3VaeEncoderStep):
    """Encode a source, and drop its pixels, which nothing reads."""

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        made: Any = super().__call__(components, state)
        state.set("condition_images", None)
        return made


class OneText:
    """FLUX.3 takes a text alone, not a list of one."""

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        text: Any = state.get("prompt")
        state.set("prompt", "".join(text))
        return super().__call__(components, state)  # type: ignore[misc]


class TextWithNegative(OneText, Flux3TextEncoderStep):
    pass


class TextAlone(OneText, Flux3DistilledTextEncoderStep):
    pass


def _encode_sources_alone(blocks: Blocks) -> None:
    is_distilled = isinstance(blocks["text_encoder"], Flux3DistilledTextEncoderStep)
    blocks["text_encoder"] = TextAlone() if is_distilled else TextWithNegative()
    for name, own in (("preprocess", SourceAlone), ("encode", LatentsAlone)):
        if f"vae_encoder.{name}" in blocks:
            blocks[f"vae_encoder.{name}"] = own()


def _leave_out_padding(blocks: Blocks) -> None:
    blocks["denoise.input"] = TextsWithoutPadding()
    steps = blocks["denoise.denoise"].sub_blocks
    is_turbo = isinstance(steps["denoiser"], Krea2TurboLoopDenoiser)
    steps["denoiser"] = OneBranch() if is_turbo else BranchesOfOwnLengths()


def _join_branches(blocks: Blocks) -> None:
    blocks["denoise.denoise"].sub_blocks["denoiser"] = JoinedBranches()


def _read_as_classic(blocks: Blocks) -> None:
    """Give texts the classic pipeline's system message, which has a line break.

    It is the message of FLUX.2's authors; the library's block has a space there.
    """
    blocks["text_encoder"].DEFAULT_SYSTEM_MESSAGE = SYSTEM_MESSAGE
    _unpack_in_order(blocks)


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
    "system message": _read_as_classic,
    "texts without padding": _leave_out_padding,
    "sources alone": _encode_sources_alone,
}
