"""Latents to frames: by the VAE whole or in tiles; the seam for tiles on other ranks."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, T H W pixels
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.errors import OutputError
from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.decode import TiledVae, decode_tiled
from hyimg_cli.tiling.tiles import tile_plan

PIECE_FRAMES = 8


class LatentDecoder(Protocol):
    """Turns latents in the VAE's own scale into pixels."""

    def decode(self, latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
        """Pixels in about -1..1, [B, 3, t, H, W], in pieces as they come; without `tiling`
        whole.
        """


class VideoVae(TiledVae, Protocol):
    """A VAE in the pieces that a tiled decode is made of; `module`: the library's autoencoder."""

    module: Any

    def stream(self, latents_BCFYX: Tensor) -> Iterator[Tensor]:
        """What `decode_tile` gives, in pieces as they come: one where it needs all frames."""

    def unscaled(self, latents_BCFYX: Tensor) -> Tensor:
        """A denoiser's latents in the VAE's scale and dtype, on its device."""

    def encoded(self, pixels_BCTHW: Tensor, *, is_tiled: bool) -> Tensor:
        """Frames in -1..1 as latents in the denoiser's scale."""


class LocalDecoder:
    """The decode of one process: in tiles, two rows of them held at a time, or whole, frame by
    frame where the VAE can. The library's `decode` to the bit.
    """

    def __init__(self, vae: Callable[[], VideoVae]) -> None:
        self._vae = vae

    def decode(self, latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
        vae = self._vae()
        if tiling and is_cut_by(tiling, latents_BCFYX):
            yield decode_tiled(vae, latents_BCFYX, tiling)
        else:
            yield from map(vae.finish, vae.stream(latents_BCFYX))


def is_cut_by(tiling: TileRule, latents_BCFYX: Tensor) -> bool:
    """True if latents are more than one tile."""
    return len(tile_plan(tiling, *latents_BCFYX.shape[-2:]).tiles) > 1


def frames(pixels_BCTHW: Tensor) -> Iterator[np.ndarray]:
    """Frames in -1..1 as pieces of RGB uint8 [T, H, W, 3]; B is 1.

    All are checked before the first piece is made. Raises OutputError where a value is not finite.
    """
    lowest, highest = (bound.item() for bound in pixels_BCTHW.aminmax())
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise OutputError("the video is not finite", code="output-video.not-finite")
    return (_levels(piece) for piece in pixels_BCTHW[0].split(PIECE_FRAMES, dim=1))


def _levels(pixels_CTHW: Tensor) -> np.ndarray:
    """uint8 [T, H, W, 3], rounded as the library's own image export does, on the device."""
    unit_THWC = (pixels_CTHW.permute(1, 2, 3, 0).float() * 0.5 + 0.5).clamp(0, 1)
    levels_THWC = unit_THWC.mul(255).round().to(torch.uint8).contiguous()
    return levels_THWC.cpu().numpy()
