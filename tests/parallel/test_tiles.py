"""The tile rule against diffusers' loops, its refusals, and each rank's tiles."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.errors import UsageError
from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.tiles import assign_tiles, forecast, halve_tiles, tile_plan

HUNYUAN, WAN = TileRule(16, 12, 16), TileRule(32, 24, 8)
TILINGS = st.builds(
    lambda tile, stride, pixels: TileRule(tile, min(tile, stride), pixels),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
)


@pytest.mark.parametrize(
    ("grid", "tiles", "limits"),
    [
        ((30, 53), 15, (1.98, 3.81, 7.45)),
        ((30, 52), 15, (1.98, 3.85, 7.34)),
        ((45, 80), 28, (1.98, 3.82, 7.56)),
        ((22, 39), 8, (1.99, 3.33, 5.08)),
    ],
)
def test_tiles_and_limits_of_the_released_sizes(
    grid: tuple[int, int], tiles: int, limits: tuple[float, ...]
) -> None:
    found = [forecast(HUNYUAN, grid, ranks, 1) for ranks in (2, 4, 8)]
    assert [one.tiles for one in found] == [tiles] * 3
    assert tuple(round(one.speed_up_limit, 2) for one in found) == limits


def test_shapes_at_480p() -> None:
    shapes = [(t.bottom - t.top, t.right - t.left) for t in tile_plan(HUNYUAN, 30, 53).tiles]
    assert {shape: shapes.count(shape) for shape in set(shapes)} == {
        (16, 16): 8,
        (16, 5): 2,
        (6, 16): 4,
        (6, 5): 1,
    }


def test_bytes_at_480p() -> None:
    cell = 121 * 3 * 16 * 16 * 2
    found = forecast(HUNYUAN, (30, 53), 4, cell)
    assert sum(share.area for share in found.shares) * cell == 487_314_432
    assert found.shares[0].sent_bytes == 0
    # Rank 0 has the smallest share, so a little more than three quarters travels.
    assert found.received_bytes == 374_313_984
    assert 365e6 < found.received_bytes < 487e6 * 0.78
    assert found.overlap_cost == pytest.approx(1.65, abs=0.005)


def test_wan_counts_tiles_as_the_library_does() -> None:
    found = forecast(WAN, (60, 104), 4, 1)
    assert (found.down, found.across) == (3, 5)


def test_a_grid_of_one_tile_is_not_cut_even_past_a_stride() -> None:
    assert [(t.bottom, t.right) for t in tile_plan(HUNYUAN, 14, 16).tiles] == [(14, 16)]
    # One column more and the library cuts both ways.
    assert len(tile_plan(HUNYUAN, 14, 17).tiles) == 4


@given(TILINGS, st.integers(1, 40), st.integers(1, 40))
def test_kept_parts_cover_the_grid_once(tiling: TileRule, rows: int, columns: int) -> None:
    plan = tile_plan(tiling, rows, columns)
    seen = [[0] * columns for _ in range(rows)]
    for tile in plan.tiles:
        whole = len(plan.tiles) == 1
        down = tile.bottom - tile.top if whole else tiling.stride
        along = tile.right - tile.left if whole else tiling.stride
        for y, x in itertools.product(
            range(tile.top, min(tile.top + down, tile.bottom)),
            range(tile.left, min(tile.left + along, tile.right)),
        ):
            seen[y][x] += 1
    assert all(count == 1 for row in seen for count in row)


@given(TILINGS, st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_every_tile_has_one_rank_and_loads_are_even(
    tiling: TileRule, rows: int, columns: int, ranks: int
) -> None:
    plan = tile_plan(tiling, rows, columns)
    shares = assign_tiles(plan, ranks)
    assert sorted(tile.index for share in shares for tile in share) == list(range(len(plan.tiles)))
    loads = [sum(tile.area for tile in share) for share in shares]
    # Largest first: no rank is ahead of another by more than one tile.
    assert max(loads) - min(loads) <= max(tile.area for tile in plan.tiles)
    working = [load for load in loads if load]
    assert loads[0] == min(working)
    assert loads[len(working) :] == [0] * (ranks - len(working))


def test_tiles_that_leave_gaps_are_refused() -> None:
    with pytest.raises(AssertionError, match="cover the grid"):
        TileRule(24, 32, 8)


def test_half_a_tile_is_of_whole_cells() -> None:
    assert halve_tiles(WAN) == TileRule(16, 12, 8)


def test_a_grid_without_cells_is_refused() -> None:
    with pytest.raises(UsageError, match="no cells"):
        tile_plan(HUNYUAN, 0, 5)
