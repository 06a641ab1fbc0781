"""Cut a latent grid into tiles and assign them to ranks; arithmetic only, no torch.

    one axis, latent cells      |---- tile ----|            tiles start every `stride` cells,
    (tile 16, stride 12)                   |---- tile ----|     the last may be shorter
                                           |-- | overlap: blended over `blend` pixels

"Pixel" is a cell of the decoder's output, which for a patchified VAE is not yet a picture's pixel.
Source of the rules: `tiled_decode` of diffusers' AutoencoderKLHunyuanVideo15 and AutoencoderKLWan
(0.42.1), `spatial_tiled_decode` of HunyuanImage-3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyimg_cli.errors import UsageError
from hyimg_cli.spec.card import TileRule


@dataclass(frozen=True)
class Tile:
    """One tile: its index in raster order, and its first and last-plus-one latent cells."""

    index: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        """Return its latent cells; the cost of decoding is proportional to them."""
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def shape(self) -> tuple[int, int]:
        """Return its latent rows and columns."""
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a grid of `rows` x `columns` latent cells, raster order, `across` in a row."""

    tiling: TileRule
    rows: int
    columns: int
    across: int
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> int:
        """Return the latent cells to decode, overlaps counted each time."""
        return sum(tile.area for tile in self.tiles)

    def above(self, tile: Tile) -> int | None:
        """Return the index of the tile above, None in the first row."""
        return tile.index - self.across if tile.index >= self.across else None

    def left_of(self, tile: Tile) -> int | None:
        """Return the index of the tile to the left, None in the first column."""
        return tile.index - 1 if tile.index % self.across else None


@dataclass(frozen=True)
class DecodeShare:
    """A rank's share of a decode: its tiles in order, latent cells, bytes that rank 0 receives."""

    rank: int
    tiles: tuple[int, ...]
    area: int
    sent_bytes: int


@dataclass(frozen=True)
class DecodeForecast:
    """The cost of a tiled decode, known before any weight is read; for `hyimg plan`.

    `speed_up_limit`: over one process that decodes the same tiles. `overlap_cost`: decoded area
    over the picture's.
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
        """Return the bytes that rank 0 receives; the other ranks receive only the latents."""
        return sum(share.sent_bytes for share in self.shares)


def halve_tiles(rule: TileRule) -> TileRule:
    """Return tiles of half the side, in whole cells."""
    assert rule.tile % 2 == rule.stride % 2 == 0, "checkpoints of wider cells are refused"
    return replace(rule, tile=rule.tile // 2, stride=rule.stride // 2)


def tile_plan(tiling: TileRule, rows: int, columns: int) -> TilePlan:
    """Return the tiles of a latent grid; one if the grid is no larger than a tile.

    Raises UsageError for a grid without cells.
    """
    if rows < 1 or columns < 1:
        raise UsageError(
            f"a latent grid of {rows}x{columns} has no cells",
            where="VAE tiling",
            hint="use a larger size",
            code="usage.vae-tiling",
        )
    if max(rows, columns) <= tiling.tile:
        return TilePlan(tiling, rows, columns, 1, (Tile(0, 0, rows, 0, columns),))
    tops = range(0, rows, tiling.stride)
    lefts = range(0, columns, tiling.stride)
    corners = ((top, left) for top in tops for left in lefts)
    tiles = (
        Tile(index, top, min(top + tiling.tile, rows), left, min(left + tiling.tile, columns))
        for index, (top, left) in enumerate(corners)
    )
    return TilePlan(tiling, rows, columns, len(lefts), tuple(tiles))


def assign_tiles(plan: TilePlan, ranks: int) -> list[tuple[Tile, ...]]:
    """Return every rank's tiles in the order to decode them; equal on all ranks.

    The largest tile goes to the least loaded rank, ties by tile index. Rank 0, which also merges,
    takes the smallest share that is not empty; ranks without tiles come last. Source: the LPT rule,
    Graham 1969.
    """
    shares: list[list[Tile]] = [[] for _ in range(ranks)]
    for tile in sorted(plan.tiles, key=lambda tile: (-tile.area, tile.index)):
        min(shares, key=_area).append(tile)
    shares.sort(key=lambda share: (not share, _area(share)))
    return [tuple(share) for share in shares]


def forecast(
    tiling: TileRule, grid: tuple[int, int], ranks: int, bytes_per_cell: int
) -> DecodeForecast:
    """Forecast the decode of a latent grid of (rows, columns) on `ranks` processes.

    `bytes_per_cell`: of everything decoded from one latent cell of the grid, all frames: frames x
    channels x pixels of a cell squared x bytes of a value.
    """
    plan = tile_plan(tiling, *grid)
    shares = []
    for rank, tiles in enumerate(assign_tiles(plan, ranks)):
        area = _area(tiles)
        sent_bytes = area * bytes_per_cell if rank else 0
        shares.append(DecodeShare(rank, tuple(tile.index for tile in tiles), area, sent_bytes))
    return DecodeForecast(
        across=plan.across,
        down=len(plan.tiles) // plan.across,
        shares=tuple(shares),
        speed_up_limit=plan.area / max(share.area for share in shares),
        overlap_cost=plan.area / (plan.rows * plan.columns),
    )


def _area(tiles: Sequence[Tile]) -> int:
    return sum(tile.area for tile in tiles)
