"""A VAE's tiled decode, in one process or spread over ranks, with the same bits either way.

    rank 0   latents ─▶ every rank with tiles   own tiles ▸ merge, tile by tile as they arrive
    rank r   its tiles, largest first; each is sent, at its exact size, as soon as it is decoded

Only rank 0 receives pixels. Tiles are never padded, decoded at exactly the shapes that one process
would decode, and merged in raster order. A batch is decoded item by item.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns, T frame, H W pixels
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hyimg_cli.kernels.devices import synchronize
from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import DecodeReport, RankReport
from hyimg_cli.tiling.blend import merge, pixel_shape
from hyimg_cli.tiling.tiles import Tile, TilePlan, assign_tiles, tile_plan


class TiledVae(Protocol):
    """The interface of an autoencoder that ranks decode with; all have the same weights.

    `tiling`: the tiles of the library. `tile_channels`: channels that `decode_tile` returns, three
    times a patch's pixels.
    """

    tiling: TileRule
    tile_channels: int

    def tile_frames(self, latent_frames: int) -> int:
        """Return the frames that `decode_tile` returns for this many latent frames."""

    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """Decode one tile with all frames, [B, C, T, H, W], in the latents' dtype and device.

        Not re-entrant if features are kept between frames.
        """

    def finish(self, merged_BCTHW: Tensor) -> Tensor:
        """Return merged tiles as pixels: patches unfolded and values clamped as the VAE does."""
        return merged_BCTHW


def decode_tiled(vae: TiledVae, latents_BCFYX: Tensor, tiling: TileRule | None = None) -> Tensor:
    """Decode latents tile by tile in this process: [B, C, T, H, W].

    Needs memory for two rows of tiles and the picture. `tiling`: replaces the VAE's own.
    """
    items = [_item(vae, item, tiling or vae.tiling) for item in latents_BCFYX.split(1)]
    return items[0] if len(items) == 1 else torch.cat(items)


class PatchParallelDecoder:
    """The tiled decode over the first `ranks` of a pool, which hold the autoencoder as a part.

    Equal to `decode_tiled`, and so to the library's own `tiled_decode`, to the bit. `report` tells
    about the last decode.
    """

    def __init__(self, pool: RankPool, *, ranks: int | None = None, part: str = "vae") -> None:
        self._pool = pool
        self._ranks = pool.size if ranks is None else ranks
        self._part = part
        self.report: DecodeReport | None = None

    def decode(self, latents_BCFYX: Tensor, tiling: TileRule | None = None) -> Tensor:
        """Return the picture [B, C, T, H, W] of latents on rank 0's device, in their dtype.

        `tiling` replaces the VAE's own. Raises RankError if a rank dies or fails,
        torch.OutOfMemoryError if one has too little memory.
        """
        items = [self._decode(latents, tiling) for latents in latents_BCFYX.split(1)]
        return items[0] if len(items) == 1 else torch.cat(items)

    def _decode(self, latents_1CFYX: Tensor, tiling: TileRule | None) -> Tensor:
        started = perf_counter()
        vae: TiledVae = self._pool.here.parts[self._part]
        plan = tile_plan(tiling or vae.tiling, *latents_1CFYX.shape[-2:])
        shares = assign_tiles(plan, self._ranks)
        # Ranks without tiles get no message and no latents, and wait for nothing.
        working = sum(bool(share) for share in shares)
        job = TiledJob(
            self._part, plan, tuple(shares), tuple(latents_1CFYX.shape), latents_1CFYX.dtype
        )
        gathering = _Gathering(job, self._pool.here, latents_1CFYX.contiguous())
        reports = self._pool.run(
            decode_share, job, ranks=working, own=partial(gathering.run, working)
        )
        idle = [RankReport(rank, 0, 0, 0.0, 0, 0) for rank in range(working, self._ranks)]
        seconds = gathering.gather_s, gathering.merge_s, perf_counter() - started
        self.report = DecodeReport((*reports, *idle), *(round(one, 6) for one in seconds))
        return gathering.picture_BCTHW


@dataclass(frozen=True)
class TiledJob:
    """One item to decode, as sent to every rank: part, tiles, their ranks, latents."""

    part: str
    plan: TilePlan
    shares: tuple[tuple[Tile, ...], ...]
    latents_shape: tuple[int, ...]
    dtype: torch.dtype

    def tile_shape(self, vae: TiledVae, tile: Tile) -> tuple[int, ...]:
        """Return the shape of a decoded tile, [1, C, T, H, W]."""
        frames = vae.tile_frames(self.latents_shape[2])
        return (1, vae.tile_channels, frames, *pixel_shape(self.plan, tile))


def decode_share(rank: Rank, job: TiledJob) -> RankReport:
    """Task of ranks 1, 2, …: receive the latents, decode this rank's tiles, send each at once."""
    vae: TiledVae = rank.parts[job.part]
    latents = torch.empty(job.latents_shape, dtype=job.dtype, device=rank.device)
    dist.recv(latents, 0)
    share, sending, sent_bytes, busy_s = job.shares[rank.number], [], 0, 0.0
    for tile in share:
        started = perf_counter()
        pixels = _decoded_tile(vae, latents, tile, job)
        synchronize([rank.device])  # so that a rank is charged for its own tiles
        busy_s += perf_counter() - started
        sending.append((dist.isend(pixels, 0, tag=tile.index), pixels))
        sent_bytes += pixels.nbytes
    for work, _held in sending:
        _wait_for(work)
    busy_s = round(busy_s, 6)
    return RankReport(rank.number, len(share), _area(share), busy_s, latents.nbytes, sent_bytes)


class _Gathering:
    """Rank 0's side of a decode: latents out, own tiles, the others' tiles in, all merged."""

    def __init__(self, job: TiledJob, rank: Rank, latents_1CFYX: Tensor) -> None:
        self._job, self._rank = job, rank
        self._latents = latents_1CFYX
        self._vae: TiledVae = rank.parts[job.part]
        self._own: dict[int, Tensor] = {}
        self._arriving: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self.gather_s = self.merge_s = 0.0

    def run(self, working: int) -> RankReport:
        """Do rank 0's share, with the picture in `picture_BCTHW`."""
        sending = [dist.isend(self._latents, other) for other in range(1, working)]
        # Receives are posted before the first tile is ready, so it travels while rank 0 decodes.
        for other in range(1, working):
            for tile in self._job.shares[other]:
                self._arriving[tile.index] = self._receive_tile(tile, other)
        received_bytes = sum(pixels.nbytes for _, pixels in self._arriving.values())
        share = self._job.shares[0]
        started = perf_counter()
        for tile in share:
            self._own[tile.index] = _decoded_tile(self._vae, self._latents, tile, self._job)
        synchronize([self._rank.device])
        busy_s = round(perf_counter() - started, 6)
        started = perf_counter()
        merged = merge(self._job.plan, self._tile)
        self.picture_BCTHW = self._vae.finish(merged)
        for work in sending:
            _wait_for(work)
        self.merge_s = perf_counter() - started - self.gather_s
        sent_bytes = self._latents.nbytes * len(sending)
        return RankReport(0, len(share), _area(share), busy_s, received_bytes, sent_bytes)

    def _receive_tile(self, tile: Tile, sender: int) -> tuple[dist.Work | None, Tensor]:
        pixels = torch.empty(
            self._job.tile_shape(self._vae, tile), dtype=self._job.dtype, device=self._rank.device
        )
        return dist.irecv(pixels, sender, tag=tile.index), pixels

    def _tile(self, tile: Tile) -> Tensor:
        if tile.index in self._own:
            return self._own.pop(tile.index)
        work, pixels = self._arriving.pop(tile.index)
        started = perf_counter()
        _wait_for(work)
        self.gather_s += perf_counter() - started
        return pixels


def _decoded_tile(vae: TiledVae, latents_1CFYX: Tensor, tile: Tile, job: TiledJob) -> Tensor:
    pixels = vae.decode_tile(latents_of(latents_1CFYX, tile)).contiguous()
    expected = job.tile_shape(vae, tile)
    assert (tuple(pixels.shape), pixels.dtype) == (expected, job.dtype), (
        f"a tile of {tuple(pixels.shape)} {pixels.dtype} where {expected} {job.dtype} was announced"
    )
    return pixels


def latents_of(latents_BCFYX: Tensor, tile: Tile) -> Tensor:
    """Return a view of a tile's latents."""
    return latents_BCFYX[..., tile.top : tile.bottom, tile.left : tile.right]


def _item(vae: TiledVae, latents_1CFYX: Tensor, tiling: TileRule) -> Tensor:
    plan = tile_plan(tiling, *latents_1CFYX.shape[-2:])
    return vae.finish(merge(plan, lambda tile: vae.decode_tile(latents_of(latents_1CFYX, tile))))


def _wait_for(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def _area(tiles: Sequence[Tile]) -> int:
    return sum(tile.area for tile in tiles)
