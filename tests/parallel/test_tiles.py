"""The tile rule against the library's loops, its refusals, and who decodes what."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.errors import UsageError
from hyimg_cli.spec.card import TileRule, VideoCard, VideoDefaults
from hyimg_cli.spec.job import Size
from hyimg_cli.tiling.tiles import (
    TileAxis,
    Tiling,
    assigned,
    bytes_per_cell,
    forecast,
    tile_plan,
    video_forecast,
)

HUNYUAN = Tiling.by_overlap((256, 256), (16, 16), 0.25, 16)
WAN = Tiling.by_stride((256, 256), (192, 192), 8)
WAN_PATCHES = Tiling.by_stride((256, 256), (192, 192), 16, patch=2)
AXES = st.builds(
    lambda tile, stride, pixels: TileAxis(tile, min(tile, stride), pixels),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
)
TILINGS = st.builds(Tiling, AXES, AXES)


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
    cell = bytes_per_cell(frames=121, pixels=16, value_bytes=2)
    found = forecast(HUNYUAN, (30, 53), 4, cell)
    assert sum(share.area for share in found.shares) * cell == 487_314_432
    assert found.shares[0].sent_bytes == 0
    # Rank 0 has the smallest share, so a little more than three quarters travels.
    assert found.received_bytes == 374_313_984
    assert 365e6 < found.received_bytes < 487e6 * 0.78
    assert found.overlap_cost == pytest.approx(1.65, abs=0.005)


def test_a_video_by_its_card() -> None:
    card = VideoCard(
        model="m",
        family="hunyuan_video15",
        name="m",
        is_trained=True,
        size_multiple=16,
        pixels_per_cell=16,
        frame_stride=4,
        latent_channels=32,
        max_prompt_tokens=1000,
        tiles=TileRule(16, 12, 64),
        component_bytes=(),
        defaults=VideoDefaults(Size(480, 848), 121, 24, 50, 6.0, 5.0),
    )
    cell = bytes_per_cell(frames=121, pixels=16, value_bytes=2)
    found = video_forecast(card, Size(720, 1280), 121, 4, 2)
    assert found == forecast(HUNYUAN, (45, 80), 4, cell)
    assert (found.tiles, round(found.speed_up_limit, 2)) == (28, 3.82)


def test_wan_counts_tiles_as_the_library_does() -> None:
    assert (WAN.rows.tile, WAN.rows.stride, WAN.rows.blend) == (32, 24, 64)
    found = forecast(WAN, (60, 104), 4, 1)
    assert (found.down, found.across) == (3, 5)
    assert (WAN_PATCHES.rows.tile, WAN_PATCHES.rows.keep, WAN_PATCHES.rows.blend) == (16, 96, 32)


def test_a_card_has_the_same_rule() -> None:
    assert Tiling.of_card(TileRule(16, 12, 64), 16) == HUNYUAN
    with pytest.raises(UsageError, match="not the overlap"):
        Tiling.of_card(TileRule(16, 12, 48), 16)


def test_a_grid_of_one_tile_is_not_cut_even_past_a_stride() -> None:
    assert [(t.bottom, t.right) for t in tile_plan(HUNYUAN, 14, 16).tiles] == [(14, 16)]
    # One column more and the library cuts both ways.
    assert len(tile_plan(HUNYUAN, 14, 17).tiles) == 4


@given(TILINGS, st.integers(1, 40), st.integers(1, 40))
def test_kept_parts_cover_the_grid_once(tiling: Tiling, rows: int, columns: int) -> None:
    plan = tile_plan(tiling, rows, columns)
    seen = [[0] * columns for _ in range(rows)]
    for tile in plan.tiles:
        whole = len(plan.tiles) == 1
        down = tile.bottom - tile.top if whole else tiling.rows.stride
        along = tile.right - tile.left if whole else tiling.columns.stride
        for y, x in itertools.product(
            range(tile.top, min(tile.top + down, tile.bottom)),
            range(tile.left, min(tile.left + along, tile.right)),
        ):
            seen[y][x] += 1
    assert all(count == 1 for row in seen for count in row)


@given(TILINGS, st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_every_tile_has_one_rank_and_loads_are_even(
    tiling: Tiling, rows: int, columns: int, ranks: int
) -> None:
    plan = tile_plan(tiling, rows, columns)
    shares = assigned(plan, ranks)
    assert sorted(tile.index for share in shares for tile in share) == list(range(len(plan.tiles)))
    loads = [sum(tile.area for tile in share) for share in shares]
    # Largest first: no rank is ahead of another by more than one tile.
    assert max(loads) - min(loads) <= max(tile.area for tile in plan.tiles)
    working = [load for load in loads if load]
    assert loads[0] == min(working)
    assert loads[len(working) :] == [0] * (ranks - len(working))


@pytest.mark.parametrize("overlap", [0.1, 0.2, 0.3, 0.4])
def test_overlaps_that_the_library_gets_wrong_are_refused(overlap: float) -> None:
    with pytest.raises(UsageError, match="not a whole number") as raised:
        Tiling.by_overlap((256, 256), (16, 16), overlap, 16)
    assert "0.25" in raised.value.hint


@pytest.mark.parametrize("overlap", [0.0625, 0.125, 0.25, 0.5])
def test_overlaps_of_whole_cells_are_taken(overlap: float) -> None:
    tiling = Tiling.by_overlap((256, 256), (16, 16), overlap, 16)
    assert tiling.rows.blend == int(256 * overlap)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (((256, 256), (16, 16), 0.0), "between 0 and 1"),
        (((256, 256), (16, 16), 1.0), "between 0 and 1"),
        (((192, 256), (16, 16), 0.25), "192 px is not 16"),
        (((256, 256), (16, 12), 0.25), "256 px is not 12"),
        (((240, 240), (15, 15), 0.25), "not a whole number"),
        (((160, 160), (10, 10), 0.25), "not a whole number"),
    ],
)
def test_knobs_that_give_another_size_are_refused(knobs: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Tiling.by_overlap(*knobs, 16)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("sample_min", "stride", "message"),
    [
        (250, 192, "tile of 250 px"),
        (256, 190, "stride of 190 px"),
        (256, 4, "stride of 4 px"),
        (192, 256, "do not cover"),
    ],
)
def test_strides_that_leave_gaps_are_refused(sample_min: int, stride: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Tiling.by_stride((sample_min, 256), (stride, 192), 8)


def test_a_grid_without_cells_is_refused() -> None:
    with pytest.raises(UsageError, match="no cells"):
        tile_plan(HUNYUAN, 0, 5)
