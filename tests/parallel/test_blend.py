"""The merge: diffusers' own bits, and cut-then-blend is the identity."""

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.blend import blend_, merge, pixel_shape
from hyimg_cli.tiling.tiles import Tile, TilePlan, tile_plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILINGS = st.builds(
    lambda t, s, p: TileRule(t, min(s, t), p), *[st.integers(1, 7)] * 2, st.integers(1, 3)
)


class Library:
    """The blending loops of the library, without its network."""

    blend_v = AutoencoderKLHunyuanVideo15.blend_v
    blend_h = AutoencoderKLHunyuanVideo15.blend_h

    def merged(self, plan: TilePlan, tiles: list[Tensor]) -> Tensor:
        """What `tiled_decode` does behind its decoder."""
        rule = plan.tiling
        blend, keep = (rule.tile - rule.stride) * rule.pixels, rule.stride * rule.pixels
        grid = [tiles[i : i + plan.across] for i in range(0, len(tiles), plan.across)]
        rows = []
        for i, row in enumerate(grid):
            cut = []
            for j, tile in enumerate(row):
                if i > 0:
                    tile = self.blend_v(grid[i - 1][j], tile, blend)
                if j > 0:
                    tile = self.blend_h(row[j - 1], tile, blend)
                cut.append(tile[..., :keep, :keep])
            rows.append(torch.cat(cut, dim=-1))
        return torch.cat(rows, dim=-2)


def random_tiles(plan: TilePlan, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, 2, 2, *pixel_shape(plan, tile)) for tile in plan.tiles]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", [(30, 53), (45, 17), (17, 45), (19, 17)])
def test_equal_to_the_library(grid: tuple[int, int], dtype: torch.dtype) -> None:
    tiling = TileRule(16, 12, 2)
    plan = tile_plan(tiling, *grid)
    tiles = random_tiles(plan, dtype)
    expected = Library().merged(plan, [tile.clone() for tile in tiles])
    assert torch.equal(merge(plan, lambda tile: tiles[tile.index]), expected)


@settings(deadline=None, max_examples=60)
@given(TILINGS, st.integers(1, 25), st.integers(1, 25), st.sampled_from(DTYPES))
def test_equal_to_the_library_for_any_rule(
    tiling: TileRule, rows: int, columns: int, dtype: torch.dtype
) -> None:
    plan = tile_plan(tiling, rows, columns)
    tiles = random_tiles(plan, dtype)
    copies = [tile.clone() for tile in tiles]
    expected = copies[0] if len(tiles) == 1 else Library().merged(plan, copies)
    merged = merge(plan, lambda tile: tiles[tile.index])
    assert torch.equal(merged, expected)
    assert merged.shape[-2:] == (rows * tiling.pixels, columns * tiling.pixels)


@settings(deadline=None, max_examples=60)
@given(TILINGS, st.integers(1, 25), st.integers(1, 25))
def test_cut_then_blend_is_the_picture(tiling: TileRule, rows: int, columns: int) -> None:
    plan = tile_plan(tiling, rows, columns)
    height, width = rows * tiling.pixels, columns * tiling.pixels
    picture = torch.arange(height * width, dtype=torch.float64).view(1, 1, 1, height, width)

    def tile_of(tile: Tile) -> Tensor:
        top, left = tile.top * tiling.pixels, tile.left * tiling.pixels
        down, along = pixel_shape(plan, tile)
        return picture[..., top : top + down, left : left + along].clone()

    assert torch.allclose(merge(plan, tile_of), picture, rtol=1e-12)


def test_tiles_are_let_go_row_by_row() -> None:
    plan = tile_plan(TileRule(16, 12, 2), 90, 40)
    alive, most = set[int](), 0

    class Watched(torch.Tensor):
        pass

    import weakref

    def tile_of(tile: Tile) -> Tensor:
        nonlocal most
        pixels = torch.zeros(1, 1, 1, *pixel_shape(plan, tile))
        alive.add(tile.index)
        weakref.finalize(pixels, alive.discard, tile.index)
        most = max(most, len(alive))
        return pixels

    merge(plan, tile_of)
    assert len(plan.tiles) == 32
    assert most <= plan.across + 2


def test_an_extent_longer_than_a_tile_is_cut_to_it() -> None:
    before, tile = torch.ones(1, 1, 1, 4, 3), torch.zeros(1, 1, 1, 2, 3)
    blend_(before, tile, 8, dim=-2)
    assert tile[0, 0, 0, :, 0].tolist() == [1.0, 0.5]
