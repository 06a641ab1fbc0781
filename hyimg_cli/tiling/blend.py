"""Blend decoded tiles into one picture, with the same bits as diffusers' `tiled_decode`.

diffusers fades row by row in Python; a tile is blended with its neighbours after their own
blending. Here each border is two products and a sum over the whole strip, with the same rounding:
products in float32 (or wider), each rounded to the tiles' dtype, then added in that dtype.
"""

# Legend: B batch, C channel, T frame, H W pixel rows and columns
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.tiles import Tile, TilePlan

TileOf = Callable[[Tile], Tensor]


def merge(plan: TilePlan, tile_of: TileOf) -> Tensor:
    """Return the picture [B, C, T, H, W] of tiles [B, C, T, h, w], which are overwritten.

    `tile_of` is called once per tile, in raster order, and at most one row of tiles is held: a
    caller that decodes on demand needs memory for two rows of tiles and the picture. Source:
    `tiled_decode`, `blend_v`, `blend_h` of diffusers' AutoencoderKLHunyuanVideo15.
    """
    rule = plan.tiling
    # Pixels over which a tile fades in, and pixels of it that are kept; a shorter last tile has
    # fewer.
    blend, keep = (rule.tile - rule.stride) * rule.pixels, rule.stride * rule.pixels
    held: dict[int, Tensor] = {}
    picture: Tensor | None = None
    for tile in plan.tiles:
        own = tile_of(tile)
        assert own.shape[-2:] == pixel_shape(plan, tile), "a tile is decoded at its exact size"
        above, left = plan.above(tile), plan.left_of(tile)
        if above is not None:
            blend_(held.pop(above), own, blend, dim=-2)
        if left is not None:
            blend_(held[left], own, blend, dim=-1)
        held[tile.index] = own
        if len(plan.tiles) == 1:
            return own
        if picture is None:
            picture = own.new_empty(*own.shape[:-2], *_picture_shape(plan))
        _kept_part(picture, plan, tile).copy_(own[..., :keep, :keep])
    assert picture is not None, "a plan has at least one tile"
    return picture


def blend_(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """Fade in the first `extent` rows (dim -2) or columns (-1) of `tile` from `before`.

    In place. The extent is limited to the smaller of both.
    """
    extent = min(before.shape[dim], tile.shape[dim], extent)
    if not extent:
        return tile
    wide = torch.promote_types(tile.dtype, torch.float32)
    fade_in, fade_out = _weights(extent, dim, wide, tile.device)
    old = before.narrow(dim, before.shape[dim] - extent, extent)
    new = tile.narrow(dim, 0, extent)
    new.copy_((old * fade_out).to(tile.dtype) + (new * fade_in).to(tile.dtype))
    return tile


def pixel_shape(plan: TilePlan, tile: Tile) -> tuple[int, int]:
    """Return the rows and columns of pixels of a decoded tile."""
    rows, columns = tile.bottom - tile.top, tile.right - tile.left
    return rows * plan.tiling.pixels, columns * plan.tiling.pixels


@lru_cache(maxsize=32)
def _weights(extent: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return the weights of the new tile, y / extent, and the old one, 1 - y / extent.

    Divided in float64, then rounded, as torch does with a Python number.
    """
    shape = (extent, 1) if dim == -2 else (extent,)
    fade = torch.arange(extent, dtype=torch.float64) / extent
    return tuple(side.to(dtype).view(shape).to(device) for side in (fade, 1 - fade))


def _picture_shape(plan: TilePlan) -> tuple[int, int]:
    return plan.rows * plan.tiling.pixels, plan.columns * plan.tiling.pixels


def _kept_part(picture: Tensor, plan: TilePlan, tile: Tile) -> Tensor:
    """Return the part of the picture that a tile fills."""
    rows = _span(plan.tiling, tile.top, picture.shape[-2])
    columns = _span(plan.tiling, tile.left, picture.shape[-1])
    return picture[..., rows, columns]


def _span(rule: TileRule, cell: int, pixels: int) -> slice:
    start = cell * rule.pixels
    return slice(start, min(start + rule.stride * rule.pixels, pixels))
