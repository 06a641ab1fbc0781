"""Encode the source of a model whose network sees no pictures, for inpainting.

Latents are the mode of the VAE's posterior, as for every kind. The library's blocks for such models
sample it.
"""

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux import encoders as flux
from diffusers.modular_pipelines.qwenimage import encoders as qwen

from hyimg_cli.models.diffusers_image.named_block import NamedBlock


class SourceEncoder(NamedBlock):
    """Turn a picture into latents, [1, C, Y, X], or [1, C, 1, Y, X] by a VAE of videos.

    The picture has the size of the result.
    """

    parts, reads, makes = ("vae",), ("image",), ("image_latents",)

    def work(self, components: Any, block: Any) -> None:
        vae, image = components.vae, block.image
        pixels = VaeImageProcessor().preprocess(image, image.height, image.width)
        pixels = pixels.to(components._execution_device, vae.dtype)
        unused = torch.Generator()  # a mode is no sample
        if vae.config.get("latents_mean"):
            where, channels = (pixels.device, pixels.dtype), vae.config.z_dim
            found = qwen.encode_vae_image(pixels, vae, unused, *where, latent_channels=channels)
        else:
            found = flux.encode_vae_image(vae, pixels, unused, sample_mode="argmax")
        block.image_latents = found
