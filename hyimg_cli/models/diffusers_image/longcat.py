"""LongCat-Image as modular blocks.

diffusers has only its classic pipelines, so these blocks call their functions, and take the rest
from Flux, which has the same latents.

    text_encoder ▸ vae_encoder.preprocess ▸ vae_encoder.encode      vae_encoder: edits only
    ▸ denoise.input ▸ denoise.denoise ▸ denoise.after_denoise ▸ decode

By default, diffusers lets the text encoder rewrite the prompt of a new picture. These blocks never
do.
"""

# Legend: H W pixels
from typing import Any

import numpy as np
import torch
from diffusers import FluxModularPipeline, LongCatImageEditPipeline, LongCatImagePipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux.decoders import FluxDecodeStep, FluxUnpackLatentsStep
from diffusers.modular_pipelines.flux.denoise import FluxDenoiseLoopWrapper, FluxLoopAfterDenoiser
from diffusers.modular_pipelines.flux.encoders import FluxVaeEncoderStep
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as library

from hyimg_cli.errors import JobError
from hyimg_cli.models.diffusers_image.named_block import NamedBlock

_SHIFTS = {
    "base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
}  # fmt: skip
_SIDES = ("height", "width")
_TEXT = ("prompt_embeds", "txt_ids", "negative_prompt_embeds", "negative_txt_ids")


def _fitted(block: Any, halves: int = 1) -> Any:
    """Return the source in the size in which the library edits, divided by `halves`."""
    sizer, image = VaeImageProcessor(vae_scale_factor=16), block.image
    width, height = library.calculate_dimensions(block.max_area, image.width / image.height)
    image = sizer.resize(image, height, width)
    return image if halves == 1 else sizer.resize(image, height // halves, width // halves)


class _Texts(NamedBlock):
    parts = ("text_encoder", "tokenizer", "text_processor")
    reads: tuple[str, ...] = ("prompt", "negative_prompt")
    makes = _TEXT
    pipeline: Any = LongCatImagePipeline

    def work(self, components: Any, block: Any) -> None:
        known = {name: getattr(components, name) for name in self.parts}
        pipeline = self.pipeline(scheduler=None, vae=None, transformer=None, **known)
        shown = {"image": _fitted(block, 2)} if "image" in self.reads else {}
        for name, made in (("prompt", _TEXT[:2]), ("negative_prompt", _TEXT[2:])):
            text, found = getattr(block, name), (None, None)
            if text is not None:
                self._refuse_long(pipeline, name, "".join(text))
                found = pipeline.encode_prompt(text, **shown)
            for one, value in zip(made, found, strict=True):
                setattr(block, one, value)

    def _refuse_long(self, pipeline: Any, name: str, text: str) -> None:
        """Raise JobError for a text that is too long: the library's edit cannot cut it."""
        # The library reads quoted parts character by character.
        parts = [
            part for text, is_quoted in library.split_quotation(text)
            for part in (text if is_quoted else [text])
        ]  # fmt: skip
        count = sum(len(pipeline.tokenizer(one, add_special_tokens=False)[0]) for one in parts)
        if count > (most := pipeline.tokenizer_max_length):
            what = f"the text has {count} tokens; its encoder reads {most}"
            raise JobError(what, where=name, hint="shorten it", code="job.too-long")


class _EditTexts(_Texts):
    reads = ("prompt", "negative_prompt", "image", "max_area")
    pipeline = LongCatImageEditPipeline


class _Preprocess(NamedBlock):
    reads, makes = ("image", "max_area"), ("processed_image",)

    def work(self, components: Any, block: Any) -> None:
        sizer, image = VaeImageProcessor(vae_scale_factor=16), _fitted(block)
        block.processed_image = sizer.preprocess(image, image.height, image.width)


class _Inputs(NamedBlock):
    """Make noise, positions and timesteps as the classic calls do."""

    parts = ("scheduler",)
    reads = ("prompt_embeds", "image_latents", *_SIDES, "num_inference_steps", "generator")
    makes = ("latents", "image_latents", *_SIDES, "img_ids", "timesteps")

    def work(self, components: Any, block: Any) -> None:
        cell, source, embeds = components.vae_scale_factor, block.image_latents, block.prompt_embeds
        if source is not None:
            block.height, block.width = (side * cell for side in source.shape[2:])
        block.height, block.width = block.height or 128 * cell, block.width or 128 * cell
        size = (1, components.num_channels_latents, block.height, block.width, embeds.dtype)
        rest = (embeds.device, block.generator)
        if source is None:
            made = LongCatImagePipeline.prepare_latents(components, *size, *rest)
            block.latents, block.img_ids = made
        else:
            made = LongCatImageEditPipeline.prepare_latents(
                components, source, *size, embeds.shape[1], *rest
            )
            block.latents, block.image_latents, *ids = made
            block.img_ids = torch.cat(ids)
        own, steps = components.scheduler.config, block.num_inference_steps
        sigmas: Any = np.linspace(1.0, 1.0 / steps, steps)
        shifts = [own.get(name, value) for name, value in _SHIFTS.items()]
        mu = library.calculate_shift(block.latents.shape[1], *shifts)
        block.timesteps, _ = library.retrieve_timesteps(
            components.scheduler, steps, embeds.device, sigmas=sigmas, mu=mu
        )


class _Denoiser(NamedBlock):
    parts = ("transformer",)
    reads = (*_TEXT, "latents", "image_latents", "img_ids", "guidance_scale")

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self, components: Any, block: Any, i: int, t: torch.Tensor
    ) -> Any:
        latents, source = block.latents, block.image_latents
        shown = latents if source is None else torch.cat([latents, source], dim=1)

        def predict(embeds: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            found = components.transformer(
                hidden_states=shown,
                timestep=t.expand(1).to(latents.dtype) / 1000,
                encoder_hidden_states=embeds,
                txt_ids=ids,
                img_ids=block.img_ids,
                return_dict=False,
            )[0]
            return found[:, : latents.shape[1]]

        block.noise_pred = towards = predict(block.prompt_embeds, block.txt_ids)
        if block.negative_prompt_embeds is not None:
            away = predict(block.negative_prompt_embeds, block.negative_txt_ids)
            found = away + block.guidance_scale * (towards - away)
            if source is None:  # the library limits the norm for new pictures only
                norms = [torch.norm(one, dim=-1, keepdim=True) for one in (towards, found)]
                found = found * (norms[0] / (norms[1] + 1e-8)).clamp(min=0.0, max=1.0)
            block.noise_pred = found
        return components, block


class _Loop(FluxDenoiseLoopWrapper):
    block_classes = [_Denoiser, FluxLoopAfterDenoiser]
    block_names = ["denoiser", "after_denoiser"]


class LongCatImageModularPipeline(FluxModularPipeline):
    """New pictures. It also stands in for a classic pipeline whose methods are called on it."""

    tokenizer_max_length = 512
    device = property(lambda self: self._execution_device)
    _pack_latents = staticmethod(LongCatImagePipeline._pack_latents)
    encoders: dict[str, Any] = {"text_encoder": _Texts}

    def __init__(self) -> None:
        blocks = self.encoders | {
            "denoise.input": _Inputs,
            "denoise.denoise": _Loop,
            "denoise.after_denoise": FluxUnpackLatentsStep,
            "decode": FluxDecodeStep,
        }
        super().__init__(blocks=SequentialPipelineBlocks.from_blocks_dict(blocks))


class LongCatImageEditModularPipeline(LongCatImageModularPipeline):
    """Edits."""

    encoders = {
        "text_encoder": _EditTexts,
        "vae_encoder.preprocess": _Preprocess,
        "vae_encoder.encode": FluxVaeEncoderStep(sample_mode="argmax"),
    }
