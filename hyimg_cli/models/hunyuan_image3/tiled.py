"""The picture VAE decoding tile by tile, by the released code's own rule.

A tile is `sample_size` pixels and overlaps the next by a quarter: 24 latent cells every 18 for the
released checkpoints. Memory is that of two rows of tiles instead of the whole picture; the mid
block's attention sees a tile only, so pixels differ from an untiled decode. Off by default, as in
the released code. Source: `spatial_tiled_decode` of HunyuanImage-3's autoencoder.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns, H W pixels

import torch
from torch import Tensor

from hyimg_cli.errors import UsageError
from hyimg_cli.models.hunyuan_image3.vae import Vae
from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.decode import decode_tiled


class TiledPicture:
    """The VAE as `parallel` cuts it: one latent frame in, the last of its frames out."""

    tile_channels = 3

    def __init__(self, vae: Vae) -> None:
        self.vae = vae
        architecture = vae.architecture
        pixels, side = architecture.ffactor_spatial, architecture.sample_size
        # The released code would put out a picture of another size, without an error.
        if side % (4 * pixels):
            raise UsageError(
                f"a tile of {side} px is not a multiple of 4 latent cells of {pixels} px",
                where="VAE tiling",
                hint="leave out --vae-use-tiling",
                code="usage.vae-tiling",
            )
        cells = side // pixels
        self.tiling = TileRule(cells, cells - cells // 4, pixels)

    def tile_frames(self, latent_frames: int) -> int:
        """Always the one frame that a picture is."""
        return 1

    @torch.no_grad()
    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """One tile, [B, C, 1, H, W]: the last of its frames. Without gradients wherever it runs, a
        rank included: with them the VAE takes other chunks, and more memory.
        """
        return self.vae.decoder(latents_BCFYX)

    def finish(self, merged_BCTHW: Tensor) -> Tensor:
        """The picture of the merged tiles: as it is."""
        return merged_BCTHW

    def decode(self, latents_BCYX: Tensor) -> Tensor:
        """Pixels as of `Vae.decode`, tile by tile: [B, 3, H, W], about [-1, 1], not clamped."""
        return decode_tiled(self, self.vae.unscaled(latents_BCYX)).squeeze(2)
