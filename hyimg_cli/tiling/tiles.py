"""How a latent grid is cut into tiles, and which rank decodes which; arithmetic only, no torch.

    one axis, latent cells      |---- tile ----|            tiles start every `stride` cells,
    (tile 16, stride 12)                   |---- tile ----|     the last may be shorter
                                           |-- | overlap: blended over `blend` pixels

"Pixel" is a cell of what the decoder puts out, which for a patchified VAE is not yet a picture's
pixel. Source of the rules: `tiled_decode` of diffusers' AutoencoderKLHunyuanVideo15 and
AutoencoderKLWan (0.42.1), `spatial_tiled_decode` of HunyuanImage-3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from hyimg_cli.errors import UsageError
from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import Size


@dataclass(frozen=True)
class TileAxis:
    """The rule along rows or columns: `tile` and `stride` in latent cells, `pixels` of one cell.

    Raises UsageError where tiles would leave gaps, so only rules that cover the grid exist.
    """

    tile: int
    stride: int
    pixels: int

    def __post_init__(self) -> None:
        if not (0 < self.stride <= self.tile and self.pixels > 0):
            raise _refused(
                f"tiles of {self.tile} latent cells every {self.stride} cells do not cover a grid",
                "the stride must be at least 1 and at most the tile",
            )

    @property
    def blend(self) -> int:
        """Pixels over which a tile fades in from the one before it."""
        return (self.tile - self.stride) * self.pixels

    @property
    def keep(self) -> int:
        """Pixels of a tile that stay in the picture; a last, shorter tile has no more."""
        return self.stride * self.pixels

    @property
    def halved(self) -> "TileAxis | None":
        """Tiles half as long; None where that would be no whole cells."""
        if self.tile % 2 or self.stride % 2:
            return None
        return TileAxis(self.tile // 2, self.stride // 2, self.pixels)


@dataclass(frozen=True)
class Tiling:
    """The rule of a VAE."""

    rows: TileAxis
    columns: TileAxis

    @property
    def halved(self) -> "Tiling | None":
        """Tiles of a quarter of the area; None where that would be no whole cells."""
        rows, columns = self.rows.halved, self.columns.halved
        return None if rows is None or columns is None else Tiling(rows, columns)

    @classmethod
    def by_overlap(
        cls, sample_min: Sequence[int], latent_min: Sequence[int], overlap: float, pixels: int
    ) -> "Tiling":
        """From the knobs of AutoencoderKLHunyuanVideo15 and HunyuanImage-3: tile in pixels and in
        latent cells (rows, columns), overlap as a share of a tile, pixels of a cell.

        Raises UsageError where the library would put out a picture of another size (measured: it
        does so without an error), or would ignore the knob.
        """
        axes = [
            _overlap_axis(*tile, overlap, pixels)
            for tile in zip(sample_min, latent_min, strict=True)
        ]
        return cls(*axes)

    @classmethod
    def by_stride(
        cls, sample_min: Sequence[int], sample_stride: Sequence[int], pixels: int, patch: int = 1
    ) -> "Tiling":
        """From the knobs of AutoencoderKLWan: tile and stride in pixels (rows, columns), pixels of
        a latent cell, and of a patch where the decoder puts out patches.

        Raises UsageError where the library would round a knob, or leave gaps.
        """
        axes = [
            _stride_axis(*tile, pixels, patch)
            for tile in zip(sample_min, sample_stride, strict=True)
        ]
        return cls(*axes)

    @classmethod
    def of_card(cls, rule: TileRule, pixels: int) -> "Tiling":
        """From a model card's square rule and the pixels of a latent cell."""
        axis = TileAxis(rule.tile_cells, rule.stride_cells, pixels)
        if axis.blend != rule.blend_pixels:
            what = f"a blend of {rule.blend_pixels} px is not the overlap of {axis.blend} px"
            raise _refused(what, "blend over exactly the pixels that two tiles share")
        return cls(axis, axis)


@dataclass(frozen=True)
class Tile:
    """One tile: its place in raster order, and its first and last-plus-one latent cells."""

    index: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        """Latent cells; decoding costs in proportion to it."""
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def shape(self) -> tuple[int, int]:
        """Latent rows and columns."""
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a grid of `rows` x `columns` latent cells, raster order, `across` in a row."""

    tiling: Tiling
    rows: int
    columns: int
    across: int
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> int:
        """Latent cells that are decoded, overlaps counted as often as they are."""
        return sum(tile.area for tile in self.tiles)

    def above(self, tile: Tile) -> int | None:
        """Index of the tile above, None in the first row."""
        return tile.index - self.across if tile.index >= self.across else None

    def left_of(self, tile: Tile) -> int | None:
        """Index of the tile at the left, None in the first column."""
        return tile.index - 1 if tile.index % self.across else None


@dataclass(frozen=True)
class DecodeShare:
    """One rank's share of a tiled decode: tiles by index in the order it decodes them, their
    latent cells, and the bytes that rank 0 receives from it."""

    rank: int
    tiles: tuple[int, ...]
    area: int
    sent_bytes: int


@dataclass(frozen=True)
class DecodeForecast:
    """The cost of a tiled decode: for `hyimg plan`, known before any weight is read.

    `speed_up_limit`: of the decoder's work against one process that decodes the same tiles.
    `overlap_cost`: decoded area over the picture's.
    """

    across: int
    down: int
    shares: tuple[DecodeShare, ...]
    speed_up_limit: float
    overlap_cost: float

    @property
    def tiles(self) -> int:
        return self.across * self.down

    @property
    def received_bytes(self) -> int:
        """Bytes that rank 0 receives from all others; they receive nothing but the latents."""
        return sum(share.sent_bytes for share in self.shares)


def tile_plan(tiling: Tiling, rows: int, columns: int) -> TilePlan:
    """The tiles of a latent grid; one, of the grid's own size, where it is no larger than a tile.

    Raises UsageError for a grid without cells.
    """
    if rows < 1 or columns < 1:
        raise _refused(f"a latent grid of {rows}x{columns} has no cells", "ask for a larger size")
    if rows <= tiling.rows.tile and columns <= tiling.columns.tile:
        return TilePlan(tiling, rows, columns, 1, (Tile(0, 0, rows, 0, columns),))
    tops = range(0, rows, tiling.rows.stride)
    lefts = range(0, columns, tiling.columns.stride)
    corners = ((top, left) for top in tops for left in lefts)
    tiles = (
        Tile(
            index,
            *(top, min(top + tiling.rows.tile, rows)),
            *(left, min(left + tiling.columns.tile, columns)),
        )
        for index, (top, left) in enumerate(corners)
    )
    return TilePlan(tiling, rows, columns, len(lefts), tuple(tiles))


def assigned(plan: TilePlan, ranks: int) -> list[tuple[Tile, ...]]:
    """Every rank's tiles, in the order to decode them; every rank computes the same lists.

    Largest first to the least loaded rank, ties by tile index. Rank 0, which merges too, takes the
    smallest of the shares that are not empty; ranks without tiles come last. Source: the LPT rule,
    Graham 1969.
    """
    shares: list[list[Tile]] = [[] for _ in range(ranks)]
    for tile in sorted(plan.tiles, key=lambda tile: (-tile.area, tile.index)):
        min(shares, key=_area).append(tile)
    shares.sort(key=lambda share: (not share, _area(share)))
    return [tuple(share) for share in shares]


def forecast(
    tiling: Tiling, grid: tuple[int, int], ranks: int, bytes_per_cell: int
) -> DecodeForecast:
    """Forecast the decode of a latent grid of (rows, columns) on `ranks` processes.

    `bytes_per_cell`: of everything decoded from one latent cell of the grid, all frames: frames x
    channels x pixels of a cell squared x bytes of a value.
    """
    plan = tile_plan(tiling, *grid)
    lists = assigned(plan, ranks)
    shares = tuple(
        DecodeShare(
            rank,
            tuple(tile.index for tile in tiles),
            _area(tiles),
            _area(tiles) * bytes_per_cell if rank else 0,
        )
        for rank, tiles in enumerate(lists)
    )
    return DecodeForecast(
        across=plan.across,
        down=len(plan.tiles) // plan.across,
        shares=shares,
        speed_up_limit=plan.area / max(share.area for share in shares),
        overlap_cost=plan.area / (plan.rows * plan.columns),
    )


def video_forecast(
    card: VideoCard, size: Size, num_frames: int, ranks: int, value_bytes: int
) -> DecodeForecast:
    """Forecast a video's decode; `value_bytes` of the autoencoder's dtype: 2 or 4."""
    pixels = card.pixels_per_cell
    _, rows, columns = card.latent_grid(size, num_frames)
    cell = bytes_per_cell(num_frames, pixels, value_bytes)
    return forecast(Tiling.of_card(card.tiles, pixels), (rows, columns), ranks, cell)


def bytes_per_cell(frames: int, pixels: int, value_bytes: int, channels: int = 3) -> int:
    """Bytes decoded from one latent cell: `frames` and `pixels` as the file will have them."""
    return frames * channels * pixels * pixels * value_bytes


def _area(tiles: Sequence[Tile]) -> int:
    return sum(tile.area for tile in tiles)


def _overlap_axis(sample_min: int, latent_min: int, overlap: float, pixels: int) -> TileAxis:
    if not 0 < overlap < 1:
        raise _refused(
            f"a tile overlap of {overlap} is not between 0 and 1",
            "the library silently keeps its own overlap for 0; give 0.25, or leave tiling off",
        )
    if sample_min != latent_min * pixels:
        raise _refused(
            f"a tile of {sample_min} px is not {latent_min} latent cells of {pixels} px",
            f"set both: {latent_min} cells are {latent_min * pixels} px",
        )
    # As the library rounds; anything that rounds would shift tiles against their crops.
    stride = int(latent_min * (1 - overlap))
    if sample_min - int(sample_min * overlap) != stride * pixels:
        raise _refused(
            f"{latent_min} latent cells x an overlap of {overlap} is not a whole number",
            f"for {latent_min} cells: {_whole_overlaps(latent_min)}",
        )
    return TileAxis(latent_min, stride, pixels)


def _whole_overlaps(cells: int) -> str:
    """A few overlaps that are whole cells, in words."""
    steps = accumulate([max(1, cells // 8)] * 4)
    return ", ".join(f"{step / cells:.6g}" for step in steps if step < cells)


def _stride_axis(sample_min: int, sample_stride: int, pixels: int, patch: int) -> TileAxis:
    for name, value in (("tile", sample_min), ("stride", sample_stride)):
        if value < pixels or value % pixels:
            raise _refused(
                f"a tile {name} of {value:g} px is not a whole number of latent cells",
                f"give a multiple of {pixels} px, {pixels * max(1, ceil(value / pixels))} say",
            )
    return TileAxis(sample_min // pixels, sample_stride // pixels, pixels // patch)


def _refused(what: str, hint: str) -> UsageError:
    return UsageError(what, where="VAE tiling", hint=hint, code="usage.vae-tiling")
