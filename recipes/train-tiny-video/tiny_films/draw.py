"""Draw scenes as films, with the picture world's shapes.

Shapes: B films · C colour channels · T frames · H W rows, columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tiny_world.draw import coverage
from tiny_world.scenes import PALETTE, SIZES
from torch import Tensor

from tiny_films.world import BACKGROUND, FRAMES, MOTIONS, Scene

TRAVEL_PX = 28.0
RADIUS_PX = SIZES["small"]
_ALONG_PX = 3.0
_ACROSS_PX = 8.0
_SCALE = 0.06
_TINT = 9.0


@dataclass(frozen=True)
class Jitter:
    """How each film of a batch differs from the exact scene.

    The middle of its path (down, right) as fractions of the free room, a factor on the size, and an
    offset of both colours.
    """

    shift_B2: Tensor
    scale_B: Tensor
    tint_BC: Tensor


def jitter(count: int, generator: torch.Generator, *, is_tinted: bool = False) -> Jitter:
    """Return uniform jitter for `count` films; colours stay exact unless tinted."""
    uniform_B6 = torch.rand(count, 6, generator=generator) * 2 - 1
    return Jitter(
        shift_B2=uniform_B6[:, :2],
        scale_B=1 + uniform_B6[:, 2] * _SCALE,
        tint_BC=uniform_B6[:, 3:] * (_TINT if is_tinted else 0.0),
    )


def no_jitter(count: int) -> Jitter:
    """Return no jitter: every path through the middle, every size and colour exact."""
    return Jitter(torch.zeros(count, 2), torch.ones(count), torch.zeros(count, 3))


def render(scenes: Sequence[Scene], jitter: Jitter, stretch: slice = slice(None)) -> Tensor:
    """Return films in -1..1, float32 [B, 3, T, H, W], or some of their frames.

    Paths are straight, at one speed.
    """
    middle_BT2 = paths(scenes, jitter)[:, stretch]
    frames = middle_BT2.shape[1]
    radius_B = RADIUS_PX * jitter.scale_B
    cover_BHW = coverage(
        [scene.shape for scene in scenes for _ in range(frames)],
        middle_BT2.flatten(0, 1),
        radius_B.repeat_interleave(frames),
    )
    cover_B1THW = cover_BHW.unflatten(0, (len(scenes), frames))[:, None]
    shape_BC111 = _colours([scene.colour for scene in scenes])
    background_BC111 = _colours([BACKGROUND] * len(scenes))
    pixels_BCTHW = background_BC111 + cover_B1THW * (shape_BC111 - background_BC111)
    tinted_BCTHW = pixels_BCTHW + jitter.tint_BC[:, :, None, None, None]
    return tinted_BCTHW.clamp(0, 255) / 127.5 - 1


def paths(scenes: Sequence[Scene], jitter: Jitter) -> Tensor:
    """Return the shape's middle in every frame, (down, right) in pixels from the film's.

    [B, T, 2].
    """
    direction_B2 = torch.tensor([MOTIONS[scene.motion] for scene in scenes])
    room_B2 = torch.where(direction_B2 != 0, _ALONG_PX, _ACROSS_PX)
    share_T = torch.linspace(-0.5, 0.5, FRAMES)
    along_BT2 = TRAVEL_PX * share_T[None, :, None] * direction_B2[:, None]
    return along_BT2 + (jitter.shift_B2 * room_B2)[:, None]


def to_bytes(film_CTHW: Tensor) -> Tensor:
    """Return a film in -1..1 as uint8 frames [T, 3, H, W]."""
    levels_CTHW = ((film_CTHW.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return levels_CTHW.transpose(0, 1)


def _colours(names: Sequence[str]) -> Tensor:
    return torch.tensor([PALETTE[name] for name in names], dtype=torch.float32)[
        :, :, None, None, None
    ]
