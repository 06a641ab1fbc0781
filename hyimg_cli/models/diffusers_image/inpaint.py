"""Masks into the model: outside a mask, each step's latents are the source's with its noise.

The transformer never sees the mask. As in diffusers' inpaint pipelines, latents begin as the source
noised to the first timestep that is taken, and after each step everything outside the mask is
replaced by the source at the next noise level; after the last one, by the source itself.
"""

# Legend: S rows of latents, D values of a row, C channels, Y X latent rows and columns, H W pixels
import math
from collections.abc import Sequence

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.functional import to_pil_image  # type: ignore[import-untyped]

from hyimg_cli.errors import JobError
from hyimg_cli.media.carried import region_of
from hyimg_cli.media.images import size_of
from hyimg_cli.spec.job import ImageJob, Size


class Inpainting:
    """The source, the noise and the mask of a job, all as its latents are."""

    def __init__(self, source: Tensor, noise: Tensor, mask: Tensor, sigmas: Tensor) -> None:
        """`mask`: 1 where the model draws. `sigmas`: noise levels from the first step on, and 0."""
        self._source, self._noise, self._mask = source, noise, mask
        self._sigmas = sigmas.to(noise.device)

    def joined(self, others: Sequence["Inpainting"]) -> "Inpainting":
        """Return the inpainting of a batch: this job's and others' of the same noise levels."""
        every = [self, *others]
        source, noise, mask = (
            torch.cat([getattr(one, name) for one in every])
            for name in ("_source", "_noise", "_mask")
        )
        return Inpainting(source, noise, mask, self._sigmas)

    def start(self) -> Tensor:
        """Return the latents before the first step that is taken."""
        return self._noised(0)

    def blend(self, latents: Tensor, index: int) -> Tensor:
        """Return the latents after step `index` with the source's outside the mask."""
        return (1 - self._mask) * self._noised(index + 1) + self._mask * latents

    def _noised(self, index: int) -> Tensor:
        if index + 1 == len(self._sigmas):
            return self._source
        sigma = self._sigmas[index].to(self._source.dtype)
        return sigma * self._noise + (1.0 - sigma) * self._source


def mask_of(job: ImageJob, drawn: Size, cell: int, *, is_smooth: bool) -> Tensor:
    """Return a job's region [1, 1, Y, X], 1 where the model draws; a latent has `cell` pixels.

    As the library does it: brought to the drawn size, made black and white, and then one value per
    latent. `is_smooth`: the latent's are interpolated, so that a mask's border may be between.
    """
    assert job.outside is not None, "a region of the source is drawn"
    levels = region_of(job.outside, size_of(job.kept_image))
    assert levels is not None, "there is a region"
    if (crop := job.kept_view.crop) is not None:
        left, top, right, bottom = crop
        levels = levels[top:bottom, left:right]
    picture = to_pil_image(np.where(levels > 127, np.uint8(255), np.uint8(0)))
    to_mask = VaeImageProcessor(
        vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    mask_HW = to_mask.preprocess(picture, height=drawn.height, width=drawn.width)
    size = drawn.height // cell, drawn.width // cell
    return functional.interpolate(mask_HW, size=size, mode="bilinear" if is_smooth else "nearest")


def pack_like(pixels_CYX: Tensor, latents: Tensor) -> Tensor:
    """Return latents [1, C, Y, X] in the layout of `latents`: that, or rows [1, S, D].

    A row has the channels of a square of neighbours, each channel's next to each other.
    """
    if latents.ndim != 3:
        return pixels_CYX.reshape(latents.shape)
    (_, channels, rows, columns), count = pixels_CYX.shape, latents.shape[1]
    side = math.isqrt(rows * columns // count)
    parts = pixels_CYX.reshape(1, channels, rows // side, side, columns // side, side)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(1, count, channels * side**2)


def inpainting_of(
    job: ImageJob, source: Tensor, noise: Tensor, sigmas: Tensor, drawn: Size, *, is_smooth: bool
) -> Inpainting:
    """Return a job's inpainting.

    `source`: its kept source as the VAE encodes it, [1, C, Y, X] or with one frame. `noise`: the
    latents of a new picture. `drawn`: its size in pixels.
    """
    source_CYX = source.squeeze(2) if source.ndim == 5 else source
    if source_CYX[0].numel() != noise[0].numel():
        what = f"inpainting draws at the size of its source, not at {drawn}"
        hint = "remove size, or use region_mode instead"
        raise JobError(what, where="region_mode", hint=hint, code="job.inpaint-size")
    # One value for each row, or for each of the latents that are in it.
    cell = drawn.height // source_CYX.shape[2]
    mask = mask_of(job, drawn, cell, is_smooth=is_smooth).to(noise.device, noise.dtype)
    return Inpainting(
        pack_like(source_CYX, noise).to(noise.device, noise.dtype),
        noise,
        pack_like(mask.expand(-1, source_CYX.shape[1], -1, -1), noise),
        sigmas,
    )
