"""Draw scenes: signed distances of each shape, half-pixel coverage, a whole batch at once.

Shapes: B batch · Y X rows, columns · C colour channels · N table rows · V corners · P points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from tiny_world.scenes import PALETTE, PICTURE_PX, PLACES, SHAPES, SIZES, Scene

_TABLE_CELLS = 193
_TABLE_REACH = 1.5
_JITTER_PX = 1.2
_JITTER_SCALE = 0.06
_JITTER_TINT = 9.0


@dataclass(frozen=True)
class Jitter:
    """How each picture differs from the exact scene; a source and its target share it.

    `shift_B2` is (down, right) in pixels, `scale_B` a factor on the size. `tint_BC` is added to
    both colours.
    """

    shift_B2: Tensor
    scale_B: Tensor
    tint_BC: Tensor


def jitter(count: int, generator: torch.Generator, *, tinted: bool = False) -> Jitter:
    """Return uniform jitter for `count` pictures; colours stay exact unless `tinted`."""
    uniform_B6 = torch.rand(count, 6, generator=generator) * 2 - 1
    return Jitter(
        shift_B2=uniform_B6[:, :2] * _JITTER_PX,
        scale_B=1 + uniform_B6[:, 2] * _JITTER_SCALE,
        tint_BC=uniform_B6[:, 3:] * (_JITTER_TINT if tinted else 0.0),
    )


def no_jitter(count: int) -> Jitter:
    """Return no jitter: every shape exactly in its place and colour."""
    return Jitter(torch.zeros(count, 2), torch.ones(count), torch.zeros(count, 3))


def render(scenes: Sequence[Scene], jitter: Jitter) -> Tensor:
    """Return pictures uint8 [B, 3, Y, X]."""
    middle_B2 = torch.tensor([PLACES[scene.place] for scene in scenes]) + jitter.shift_B2
    radius_B = torch.tensor([SIZES[scene.size] for scene in scenes]) * jitter.scale_B
    coverage_BYX = coverage([scene.shape for scene in scenes], middle_B2, radius_B).unsqueeze(1)
    shape_BC11 = _colours([scene.colour for scene in scenes])
    background_BC11 = _colours([scene.background for scene in scenes])
    pixels_BCYX = background_BC11 + coverage_BYX * (shape_BC11 - background_BC11)
    tinted_BCYX = pixels_BCYX + jitter.tint_BC[:, :, None, None]
    return tinted_BCYX.round().clamp(0, 255).to(torch.uint8)


def to_unit(pixels_BCYX: Tensor) -> Tensor:
    """Return uint8 pictures as float32 in [-1, 1]."""
    return pixels_BCYX.float() / 127.5 - 1


def to_bytes(pixels_BCYX: Tensor) -> Tensor:
    """Return pictures in [-1, 1] as uint8, clamped."""
    return ((pixels_BCYX.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def coverage(shapes: Sequence[str], middle_B2: Tensor, radius_B: Tensor) -> Tensor:
    """Return how much of each pixel the shape covers, [B, Y, X] in 0..1.

    `middle_B2` is (down, right) in pixels from the middle of the picture, `radius_B` in pixels.
    """
    tables_BNN = torch.stack([_distance_table(shape) for shape in shapes])
    axis = torch.arange(PICTURE_PX) + 0.5 - PICTURE_PX / 2
    y_BY = (axis - middle_B2[:, :1]) / radius_B[:, None]
    x_BX = (axis - middle_B2[:, 1:]) / radius_B[:, None]
    grid_BYX2 = torch.stack(
        [
            x_BX[:, None, :].expand(-1, PICTURE_PX, -1),
            y_BY[:, :, None].expand(-1, -1, PICTURE_PX),
        ],
        dim=-1,
    )
    distance_BYX = functional.grid_sample(
        tables_BNN[:, None], grid_BYX2 / _TABLE_REACH, padding_mode="border", align_corners=True
    )[:, 0]
    return (0.5 - distance_BYX * radius_B[:, None, None]).clamp(0, 1)


def _colours(names: Sequence[str]) -> Tensor:
    return torch.tensor([PALETTE[name] for name in names], dtype=torch.float32)[:, :, None, None]


@cache
def _distance_table(shape: str) -> Tensor:
    """Return the signed distance to the shape of radius 1 on a grid, negative inside, [N, N]."""
    assert shape in SHAPES, shape
    axis = torch.linspace(-_TABLE_REACH, _TABLE_REACH, _TABLE_CELLS)
    y_NN, x_NN = torch.meshgrid(axis, axis, indexing="ij")
    if shape == "circle":
        return torch.hypot(x_NN, y_NN) - 0.95
    points_P2 = torch.stack([x_NN, y_NN], dim=-1).reshape(-1, 2)
    corners_V2 = torch.tensor(_corners(shape))
    return _polygon_distance(points_P2, corners_V2).reshape(_TABLE_CELLS, _TABLE_CELLS)


def _corners(shape: str) -> list[tuple[float, float]]:
    """Return corners (x, y) with y down; the box of every shape is centred on the origin."""
    outlines = {
        "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
        "triangle": [(0.0, -0.92), (1.0, 0.92), (-1.0, 0.92)],
        "diamond": [(0.0, -1.0), (0.8, 0.0), (0.0, 1.0), (-0.8, 0.0)],
    }
    if shape == "star":
        return _boxed([_spoke(k, 1.0 if k % 2 == 0 else 0.42) for k in range(10)])
    if shape == "heart":
        return _boxed([_heart_point(2 * math.pi * k / 60) for k in range(60)])
    return outlines[shape]


def _spoke(k: int, length: float) -> tuple[float, float]:
    angle = math.pi * k / 5
    return length * math.sin(angle), -length * math.cos(angle)


def _heart_point(angle: float) -> tuple[float, float]:
    """Return points of a heart.

    Source: the well-known parametric heart, 16 sin^3 against a cosine series.
    """
    lobes = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle)
    return 16 * math.sin(angle) ** 3, math.cos(4 * angle) - lobes


def _boxed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the outline with a centred box, whose longer half side is 1."""
    xs, ys = zip(*points, strict=True)
    middle = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    half = max(max(xs) - min(xs), max(ys) - min(ys)) / 2
    return [((x - middle[0]) / half, (y - middle[1]) / half) for x, y in points]


def _polygon_distance(points_P2: Tensor, corners_V2: Tensor) -> Tensor:
    """Return the signed distance [P] to a closed polygon; inside by crossing parity."""
    start_1V2, edge_1V2 = corners_V2[None], (corners_V2.roll(-1, 0) - corners_V2)[None]
    offset_PV2 = points_P2[:, None] - start_1V2
    along_PV = ((offset_PV2 * edge_1V2).sum(-1) / (edge_1V2**2).sum(-1)).clamp(0, 1)
    nearest_P = (offset_PV2 - along_PV[..., None] * edge_1V2).norm(dim=-1).amin(dim=1)
    y_P1 = points_P2[:, 1:]
    above_PV = (start_1V2[..., 1] > y_P1) != ((start_1V2 + edge_1V2)[..., 1] > y_P1)
    slope_1V = edge_1V2[..., 0] / torch.where(
        edge_1V2[..., 1] == 0, torch.ones(()), edge_1V2[..., 1]
    )
    crosses_PV = above_PV & (offset_PV2[..., 0] < slope_1V * offset_PV2[..., 1])
    return torch.where(crosses_PV.sum(1) % 2 == 1, -nearest_P, nearest_P)
