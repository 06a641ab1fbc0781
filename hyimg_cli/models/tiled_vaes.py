"""The autoencoders whose decode can be cut into tiles: their rule, one tile, and the last touch.

What is the same for all (cutting, ranks, merging) is in `parallel`; what each class does to a tile
is here, and nothing is guessed: a class that is not named is refused, because leaving out a layer
that another class has would give a wrong picture without an error.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns, T frame, H W pixels
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import TABLE_BYTES, text_of
from hyimg_cli.loading.checkpoint import refuse_special
from hyimg_cli.tiling.tiles import Tiling

if TYPE_CHECKING:
    from hyimg_cli.parallel.ranks import Rank


class OverlapTiled:
    """AutoencoderKLHunyuanVideo15: the decoder sees all frames of a tile at once, nothing else.

    Its mid block's mask is made by `causal_mask`: the same values, without the library's loop of
    one launch per row for every tile.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        for attention in vae.decoder.mid_block.attentions:
            if attention is not None:
                attention.prepare_causal_attention_mask = causal_mask
        self.tiling = Tiling.by_overlap(
            (vae.tile_sample_min_height, vae.tile_sample_min_width),
            (vae.tile_latent_min_height, vae.tile_latent_min_width),
            vae.tile_overlap_factor,
            vae.spatial_compression_ratio,
        )

    def tile_frames(self, latent_frames: int) -> int:
        """Frames decoded from `latent_frames`: the first latent frame gives one, others more."""
        return _causal_frames(latent_frames, self.vae.temporal_compression_ratio)

    @property
    def tile_channels(self) -> int:
        """Channels of what `decode_tile` returns."""
        return int(self.vae.config.out_channels)

    @torch.no_grad()
    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """One tile decoded, [B, C, T, H, W]."""
        pixels_BCTHW: Tensor = self.vae.decoder(latents_BCFYX)
        return pixels_BCTHW

    def finish(self, merged_BCTHW: Tensor) -> Tensor:
        """The picture of the merged tiles: as it is."""
        return merged_BCTHW


class StrideTiled:
    """AutoencoderKLWan: frame by frame through a feature cache, patches put together at the end."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.patch = int(vae.config.patch_size or 1)
        self.tiling = Tiling.by_stride(
            (vae.tile_sample_min_height, vae.tile_sample_min_width),
            (vae.tile_sample_stride_height, vae.tile_sample_stride_width),
            vae.spatial_compression_ratio,
            self.patch,
        )

    def tile_frames(self, latent_frames: int) -> int:
        """Frames decoded from `latent_frames`."""
        return _causal_frames(latent_frames, 2 ** sum(self.vae.temperal_upsample))

    @property
    def tile_channels(self) -> int:
        """Channels of what `decode_tile` returns: a patch's pixels are still channels."""
        return int(self.vae.config.out_channels)

    @torch.no_grad()
    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """One tile decoded, [B, C, T, H, W]. Not re-entrant: the cache lies on the module."""
        vae = self.vae
        vae.clear_cache()
        frames = []
        for number in range(latents_BCFYX.shape[2]):
            vae._conv_idx = [0]
            latent_BC1YX = vae.post_quant_conv(latents_BCFYX[:, :, number : number + 1])
            frames.append(
                vae.decoder(
                    latent_BC1YX,
                    feat_cache=vae._feat_map,
                    feat_idx=vae._conv_idx,
                    first_chunk=number == 0,
                )
            )
        vae.clear_cache()
        return torch.cat(frames, dim=2)

    def finish(self, merged_BCTHW: Tensor) -> Tensor:
        """The picture of the merged tiles: patches unfolded, values clamped to [-1, 1]."""
        if self.patch > 1:
            from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

            merged_BCTHW = unpatchify(merged_BCTHW, self.patch)
        return merged_BCTHW.clamp(-1.0, 1.0)


TiledVideoVae = OverlapTiled | StrideTiled
_BY_CLASS: dict[str, Callable[[Any], TiledVideoVae]] = {
    "AutoencoderKLHunyuanVideo15": OverlapTiled,
    "AutoencoderKLWan": StrideTiled,
}


def tiled_vae(vae: Any) -> TiledVideoVae:
    """A loaded autoencoder of diffusers, ready to decode in tiles by its own knobs.

    Raises CheckpointError for a class whose tiled decode is not known here, UsageError for knobs
    that the library mishandles.
    """
    name = type(vae).__name__
    if name not in _BY_CLASS:
        raise CheckpointError(
            f"{name} has no tiled decode here",
            hint=f"known: {', '.join(_BY_CLASS)}; leave tiling and its ranks out",
            code="checkpoint.vae-class",
        )
    return _BY_CLASS[name](vae)


@dataclass(frozen=True)
class TiledVaeLoader:
    """Loads the autoencoder in `folder` on a rank: what every rank of a decode is given.

    `folder` holds `config.json` and its safetensors (a pipeline's `vae`). All ranks, the writing
    one too, load from disk: weights built in memory lie elsewhere and may round otherwise.
    """

    folder: Path
    dtype: torch.dtype

    def __call__(self, rank: Rank) -> TiledVideoVae:
        return load_tiled_vae(self.folder, self.dtype, rank.device)


def load_tiled_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> TiledVideoVae:
    """The autoencoder in `folder`, for inference. Raises CheckpointError."""
    import diffusers

    try:
        name = json.loads(text_of(folder / "config.json", TABLE_BYTES))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"config.json names no autoencoder: {error!r}",
            where=str(folder),
            hint="give the vae folder of a checkpoint in the diffusers layout",
            code="checkpoint.vae-config",
        ) from None
    if name not in _BY_CLASS:
        raise CheckpointError(
            f"{name} has no tiled decode here", where=str(folder), code="checkpoint.vae-class"
        )
    refuse_special(folder)
    vae = getattr(diffusers, name).from_pretrained(folder, dtype=dtype, local_files_only=True)
    vae.requires_grad_(False).eval()
    return tiled_vae(vae.to(device))


def causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """0 where a position may look, its own and earlier frames; -inf elsewhere: [(B,) S, S].

    Source: `prepare_causal_attention_mask` beside AutoencoderKLHunyuanVideo15. Read-only.
    """
    mask_SS = _causal_mask(n_frame, n_hw, dtype, device)
    return mask_SS if batch_size is None else mask_SS.expand(batch_size, -1, -1)


# Largest first, so a rank's tiles of one shape follow each other; 126 MB for a whole tile of 121
# frames in bfloat16.
@lru_cache(maxsize=2)
def _causal_mask(n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    frame_S = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    mask_SS = torch.zeros(len(frame_S), len(frame_S), dtype=dtype, device=device)
    return mask_SS.masked_fill_(frame_S[:, None] < frame_S, float("-inf"))


def _causal_frames(latent_frames: int, stride: int) -> int:
    return (latent_frames - 1) * stride + 1
