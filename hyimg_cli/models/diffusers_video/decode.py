"""Latents to frames: by the VAE whole or in tiles; the seam for tiles on other ranks."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, T H W pixels
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.errors import OutputError
from hyimg_cli.models.latent_video import VideoVae
from hyimg_cli.tiling.decode import decode_tiled
from hyimg_cli.tiling.tiles import Tiling, tile_plan

PIECE_FRAMES = 8


class LocalDecoder:
    """The decode of one process: in tiles by the VAE's own rule, two rows of them held at a time,
    or whole. The library's `decode` to the bit.
    """

    def __init__(self, vae: Callable[[], VideoVae], *, is_tiled: bool) -> None:
        self._vae = vae
        self.is_tiled = is_tiled

    def decode(self, latents_BCFYX: Tensor) -> Tensor:
        vae = self._vae()
        if self.is_tiled:
            return decode_tiled(vae, latents_BCFYX)
        return vae.finish(vae.decode_tile(latents_BCFYX))


def refuse_infinite(latents_BCFYX: Tensor) -> None:
    """Raises OutputError for latents that are not finite.

    To look at frames is not enough: a VAE that clamps makes an ordinary colour of an infinity.
    """
    if not bool(torch.isfinite(latents_BCFYX).all()):
        raise OutputError("the latents are not finite", code="output-video.not-finite")


def smaller_tilings(own: Tiling, latents_BCFYX: Tensor, *, is_tiled: bool) -> Iterator[Tiling]:
    """Tilings that cut the latents smaller than the model's decode does, in its `own` tiles or as a
    whole; largest tiles first.
    """
    for tiling in (None if is_tiled else own, own.halved):
        if tiling and len(tile_plan(tiling, *latents_BCFYX.shape[-2:]).tiles) > 1:
            yield tiling


def frames(pixels_BCTHW: Tensor) -> Iterator[np.ndarray]:
    """A video in -1..1 as pieces of RGB uint8 [T, H, W, 3]; B is 1.

    Checked first, as a whole. Raises OutputError where a value is not finite.
    """
    lowest, highest = (bound.item() for bound in pixels_BCTHW.aminmax())
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise OutputError("the video is not finite", code="output-video.not-finite")
    levels_THWC = _levels(pixels_BCTHW[0])
    return (piece.cpu().numpy() for piece in levels_THWC.split(PIECE_FRAMES))


def _levels(pixels_CTHW: Tensor) -> Tensor:
    """uint8 [T, H, W, 3], rounded as the library's own image export does, on the device."""
    channels_last = pixels_CTHW.permute(1, 2, 3, 0)
    parts = (
        (part.float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        for part in channels_last.split(PIECE_FRAMES)
    )
    return torch.cat(list(parts))
