"""The two autoencoders as `VideoVae`: their scale, tile sizes, and decoding of a tile.

Cutting, ranks and merging are in `tiling`. `layout` refuses any other class: skipping one of its
layers would give a wrong picture without an error.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns, T frame, H W pixels
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor

from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.decode import TiledVae


class VideoVae(TiledVae):
    """A VAE in the parts of a tiled decode; `module`: the library's autoencoder.

    The first latent frame gives one frame, every other one gives `stride`.
    """

    def __init__(self, module: Any, tiling: TileRule, stride: int) -> None:
        self.module, self.tiling, self._stride = module, tiling, stride
        self.tile_channels = int(module.config.out_channels)

    def tile_frames(self, latent_frames: int) -> int:
        """Return the number of frames decoded from `latent_frames`."""
        return (latent_frames - 1) * self._stride + 1

    def stream(self, latents_BCFYX: Tensor) -> Iterator[Tensor]:
        """Yield the result of `decode_tile` in pieces; one piece if it needs all frames."""
        yield self.decode_tile(latents_BCFYX)

    @abstractmethod
    def unscaled(self, latents_BCFYX: Tensor) -> Tensor:
        """Return a denoiser's latents in the VAE's scale and dtype, on its device."""

    @abstractmethod
    def encoded(self, pixels_BCTHW: Tensor, *, is_tiled: bool) -> Tensor:
        """Return frames in -1..1 as latents in the denoiser's scale."""

    @torch.no_grad()
    def most_likely(self, pixels_BCTHW: Tensor, *, is_tiled: bool) -> Tensor:
        """Return the mode of the library's encoder output; tiled like the decode, or whole."""
        vae = self.module
        (vae.enable_tiling if is_tiled else vae.disable_tiling)()
        latents: Tensor = vae.encode(pixels_BCTHW.to(vae.device, vae.dtype)).latent_dist.mode()
        return latents


class HunyuanVae(VideoVae):
    """AutoencoderKLHunyuanVideo15: one factor; decodes all frames of a tile at once.

    Its mid block sees all frames. Its mask is made by `causal_mask`: the same values without a
    launch per row.
    """

    def __init__(self, module: Any) -> None:
        for attention in module.decoder.mid_block.attentions:
            if attention is not None:
                attention.prepare_causal_attention_mask = causal_mask
        tile = module.tile_latent_min_height
        stride = int(tile * (1 - module.tile_overlap_factor))
        tiling = TileRule(tile, stride, module.spatial_compression_ratio)
        super().__init__(module, tiling, module.temporal_compression_ratio)

    def unscaled(self, latents_BCFYX: Tensor) -> Tensor:
        latents = latents_BCFYX.to(self.module.device, self.module.dtype)
        return latents / float(self.module.config.scaling_factor)

    def encoded(self, pixels_BCTHW: Tensor, *, is_tiled: bool) -> Tensor:
        """Return frames in -1..1 as latents in the denoiser's scale."""
        latents = self.most_likely(pixels_BCTHW, is_tiled=is_tiled)
        return latents * float(self.module.config.scaling_factor)

    @torch.no_grad()
    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """Return one decoded tile, [B, C, T, H, W]."""
        pixels_BCTHW: Tensor = self.module.decoder(latents_BCFYX)
        return pixels_BCTHW


class WanVae(VideoVae):
    """AutoencoderKLWan: mean and deviation per channel, frame by frame with a feature cache.

    Patches are joined at the end.
    """

    def __init__(self, module: Any) -> None:
        self.patch = int(module.config.patch_size or 1)
        cell = module.spatial_compression_ratio
        tile, step = module.tile_sample_min_height, module.tile_sample_stride_height
        tiling = TileRule(tile // cell, step // cell, cell // self.patch)
        super().__init__(module, tiling, 2 ** sum(module.temperal_upsample))

    def unscaled(self, latents_BCFYX: Tensor) -> Tensor:
        latents = latents_BCFYX.to(self.module.device, self.module.dtype)
        mean, inverse = self._scale()
        return latents / inverse.to(latents) + mean.to(latents)

    def encoded(self, pixels_BCTHW: Tensor, *, is_tiled: bool) -> Tensor:
        """Return frames in -1..1 as latents in the denoiser's scale, in float32 as upstream."""
        with _feature_cache(self.module):
            found = self.most_likely(pixels_BCTHW, is_tiled=is_tiled).float()
        mean, inverse = self._scale()
        return (found - mean) * inverse

    def _scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and 1 / deviation per channel, float32; rounded as in WanPipeline."""
        config = self.module.config
        values = torch.tensor([config.latents_mean, config.latents_std]).to(self.module.device)
        mean, deviation = values.view(2, 1, -1, 1, 1, 1)
        return mean, 1.0 / deviation

    @torch.no_grad()
    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """Return one decoded tile, [B, C, T, H, W]. Not re-entrant: the module has the cache."""
        return torch.cat(list(self.stream(latents_BCFYX)), dim=2)

    @torch.no_grad()
    def stream(self, latents_BCFYX: Tensor) -> Iterator[Tensor]:
        """Return one decoded tile, [B, C, T, H, W]. Not re-entrant: the module has the cache."""
        vae = self.module
        with _feature_cache(vae):
            for number in range(latents_BCFYX.shape[2]):
                vae._conv_idx = [0]
                latent_BC1YX = vae.post_quant_conv(latents_BCFYX[:, :, number : number + 1])
                yield vae.decoder(
                    latent_BC1YX,
                    feat_cache=vae._feat_map,
                    feat_idx=vae._conv_idx,
                    first_chunk=number == 0,
                )

    def finish(self, merged_BCTHW: Tensor) -> Tensor:
        """Return the picture of the merged tiles: patches unfolded, values clamped to [-1, 1]."""
        if self.patch > 1:
            merged_BCTHW = unpatchify(merged_BCTHW, self.patch)
        return merged_BCTHW.clamp(-1.0, 1.0)


@contextmanager
def _feature_cache(vae: Any) -> Iterator[None]:
    """Clear Wan's features between frames afterwards, even after out of memory."""
    vae.clear_cache()
    try:
        yield
    finally:
        vae.clear_cache()


def causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Return 0 for its own and earlier frames, -inf elsewhere: [(B,) S, S]. Read-only.

    Source: `prepare_causal_attention_mask` of AutoencoderKLHunyuanVideo15.
    """
    mask_SS = _causal_mask(n_frame, n_hw, dtype, device)
    return mask_SS if batch_size is None else mask_SS.expand(batch_size, -1, -1)


# Largest first, so that a rank's tiles of one shape are consecutive; 126 MB for a whole tile of 121
# frames in bfloat16.
@lru_cache(maxsize=2)
def _causal_mask(n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    frame_S = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    mask_SS = torch.zeros(len(frame_S), len(frame_S), dtype=dtype, device=device)
    return mask_SS.masked_fill_(frame_S[:, None] < frame_S, float("-inf"))
