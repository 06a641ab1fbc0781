"""Pictures that a video starts from, as image encoder tokens and VAE latents.

The steps are those of diffusers' image-to-video pipelines. Results depend on the picture, not on
the prompt, so they are cached by content like an embedded prompt.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns, N tokens, W width
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.errors import SourceImageError, installed_version
from hyimg_cli.media.images import Pixels, SourceImage, read_view, stretch
from hyimg_cli.models.diffusers_video.encoders import CheckpointEncoder
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, CheckpointLayout
from hyimg_cli.models.diffusers_video.vaes import VideoVae
from hyimg_cli.models.diffusers_video.weights import LoadTarget
from hyimg_cli.models.latent import PromptEmbedding
from hyimg_cli.models.latent_video import LATENTS, TOKENS, ImageConditioning
from hyimg_cli.spec.job import Size, VideoJob, View

_LIBRARIES = ("pillow", "torchvision")


class StartEncoder(CheckpointEncoder):
    """The encoder of start pictures: `tokens` [pictures, N, W], `latents` [C, F, Y, X].

    Latents are in the denoiser's scale. `reads_tokens`: has an image encoder with a `processor`.
    `sees_crop`: that encoder sees the fitted picture, not the whole. `has_mask`: latents of all
    frames, grey after the picture; else of the picture alone.
    """

    def __init__(
        self,
        layout: CheckpointLayout,
        place: LoadTarget,
        vae: Callable[[], VideoVae],
        *,
        is_tiled: bool,
    ) -> None:
        """Open the encoder. `place`: of the image encoder; the VAE is the model's own."""
        super().__init__(layout, place)
        self.sees_crop = layout.family == HUNYUAN_VIDEO15
        self.has_mask = not (self.sees_crop or layout.expands_timesteps)
        self.processor = "feature_extractor" if self.sees_crop else "image_processor"
        network = layout.components["transformer"].config()
        self.reads_tokens = self.sees_crop or network.has("image_dim")
        self._vae, self.is_tiled = vae, is_tiled

    def views(self, job: VideoJob, digests: Sequence[str]) -> tuple[ImageConditioning, ...]:
        """Return the job's pictures as the transformer reads them; empty without pictures."""
        if not job.images:
            return ()
        images = tuple(zip(map(View, job.images), digests, strict=True))
        frames = job.num_frames if self.has_mask else 1
        views = [ImageConditioning(LATENTS, images, job.size, job.fit, frames)]
        if self.reads_tokens:
            of_crop = (job.size, job.fit) if self.sees_crop else (None, None)
            views.append(ImageConditioning(TOKENS, images, *of_crop))
        return tuple(views)

    def key(self, view: ImageConditioning) -> str:
        """Return the key of the files' bytes, whatever their names."""
        if view.kind == TOKENS:
            how: dict[str, Any] = {"files": self.identity("image_encoder", self.processor)}
        else:
            how = {"files": self.identity("vae"), "tiled": self.is_tiled}
        return self.digest_of(
            kind=view.kind,
            images=[one.digest_of(image) for one, image in view.images],
            size=None if view.size is None else str(view.size),
            fit=view.fit,
            frames=view.num_frames,
            pictures=[installed_version(name) for name in _LIBRARIES],
            **how,
        )

    @torch.no_grad()
    def encode(self, view: ImageConditioning) -> PromptEmbedding:
        pictures, notes = read_given(view.images)
        pixels = [picture.pixels for picture in pictures]
        made = (self._tokens if view.kind == TOKENS else self._latents)(pixels, view)
        return PromptEmbedding(self.key(view), {view.kind: made.cpu()}, notes)

    def frame(self, pixels: Pixels, view: ImageConditioning) -> Tensor:
        """Return a picture as a frame in -1..1, [1, C, 1, H, W], rounded as by the library."""
        values_HWC = torch.from_numpy(_fitted(pixels, view).astype("float32") / 255.0)
        return (2.0 * values_HWC - 1.0).permute(2, 0, 1)[None, :, None].contiguous()

    def _tokens(self, pictures: Sequence[Pixels], view: ImageConditioning) -> Tensor:
        network = self.network("image_encoder")
        processor = self.tokenizer(self.processor)
        options = {"do_resize": True, "do_convert_rgb": True} if self.sees_crop else {}
        fitted = [_fitted(pixels, view) for pixels in pictures]
        inputs = processor(images=fitted, return_tensors="pt", **options).to(self.place.device)
        if self.sees_crop:
            states = network(**inputs.to(dtype=network.dtype)).last_hidden_state
        else:
            states = network(**inputs, output_hidden_states=True).hidden_states[-2]
        return states.clone()

    def _latents(self, pictures: Sequence[Pixels], view: ImageConditioning) -> Tensor:
        """Return latents of the pictures encoded as one video, grey between them."""
        first, *last = [self.frame(pixels, view) for pixels in pictures]
        grey_frames = max(0, view.num_frames - len(pictures))
        grey = first.new_zeros(*first.shape[:2], grey_frames, *first.shape[3:])
        vae = self._vae()
        self.place.offload.onload(vae.module)
        self.encoder_runs["vae"] += 1
        return vae.encoded(torch.cat([first, grey, *last], dim=2), is_tiled=self.is_tiled)[
            0
        ].clone()


def read_given(
    images: Sequence[tuple[View, str]], *, keeps_alpha: bool = False
) -> tuple[list[SourceImage], tuple[str, ...]]:
    """Read pictures by view and by the whole's digest, with notes on changes.

    Raises SourceImageError.
    """
    pictures = []
    for view, expected in images:
        pictures.append(read_view(view, keeps_alpha=keeps_alpha))
        if pictures[-1].digests.picture != expected:
            what, hint = "the picture changed during the run", "run the command again"
            raise SourceImageError(what, where=view.path, hint=hint, code="source.changed")
    return pictures, tuple(dict.fromkeys(note for one in pictures for note in one.notes))


def add_frame_mask(latents_CFYX: Tensor, frames: int, stride: int, *, has_last: bool) -> Tensor:
    """Return the channels added to the noise: mask of the given frames, then latents.

    The mask is 1 or 0 by a frame's place within a latent frame. The first pixel frame is a latent
    frame and stands for all of its sub-frames.
    """
    given = torch.zeros(stride, (frames - 1) // stride + 1)
    given[:, 0] = 1
    if has_last:
        given[-1, -1] = 1
    mask_CFYX = given.to(latents_CFYX)[:, :, None, None].expand(-1, -1, *latents_CFYX.shape[2:])
    return torch.cat([mask_CFYX, latents_CFYX])


def _fitted(pixels: Pixels, view: ImageConditioning) -> Pixels:
    if view.size is None:
        return pixels
    return (crop_to if view.fit == "crop" else stretch)(pixels, view.size)


def crop_to(pixels: Pixels, size: Size) -> Pixels:
    """Return `pixels` scaled (Lanczos) to cover `size`, then cropped to it around the centre.

    Source: diffusers, `VaeImageProcessor._resize_and_crop`, which rounds down at each step.
    """
    height, width = pixels.shape[:2]
    is_wider = size.width / size.height > width / height
    new_width = size.width if is_wider else width * size.height // height
    new_height = height * size.width // width if is_wider else size.height
    top, left = new_height // 2 - size.height // 2, new_width // 2 - size.width // 2
    resized = stretch(pixels, Size(new_height, new_width))
    return np.array(resized[top : top + size.height, left : left + size.width])
