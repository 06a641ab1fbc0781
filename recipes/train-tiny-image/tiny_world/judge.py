"""Read the scene of a small-world picture from its pixels alone.

The background comes from the border ring, the colour from the pixels that differ from it, shape and
size from the overlap with drawn templates, and the place from the centre of gravity.

Shapes: Y X rows, columns · C colour channels · N templates.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tiny_world.draw import coverage
from tiny_world.scenes import PALETTE, PICTURE_PX, PLACES, SHAPES, SIZES, Scene

_SIZE_BORDER_PX = (SIZES["small"] + SIZES["large"]) / 2
_MIN_OVERLAP = 0.8
_MAX_COLOUR_DISTANCE = 60.0
_EDGE_GAIN = 2.5


@dataclass(frozen=True)
class Verdict:
    """The scene seen, how well the shape fits (0..1), and how far the colours are off."""

    scene: Scene | None
    overlap: float
    colour_distance: float

    @property
    def is_clean(self) -> bool:
        """True for a well-formed shape in colours of the palette."""
        is_shaped = self.scene is not None and self.overlap >= _MIN_OVERLAP
        return is_shaped and self.colour_distance <= _MAX_COLOUR_DISTANCE

    def wrong(self, wanted: Scene, facts: Iterable[str]) -> tuple[str, ...]:
        """Return the `facts` that are not as wanted; all of them if the picture is not clean."""
        if self.scene is None or not self.is_clean:
            return tuple(facts)
        return tuple(f for f in facts if getattr(self.scene, f) != getattr(wanted, f))


def judge(picture_CYX: Tensor) -> Verdict:
    """Return the verdict on one uint8 picture [3, 64, 64]."""
    pixels_CYX = picture_CYX.float()
    background_C = _border(pixels_CYX).median(dim=1).values
    contrast_YX = (pixels_CYX - background_C[:, None, None]).norm(dim=0)
    if contrast_YX.amax() < 25:
        return Verdict(None, 0.0, 0.0)
    core_YX = contrast_YX > 0.8 * contrast_YX.flatten().kthvalue(contrast_YX.numel() - 30).values
    colour_C = pixels_CYX[:, core_YX].median(dim=1).values
    background, background_distance = _nearest_colour(background_C)
    colour, colour_distance = _nearest_colour(colour_C)
    cover_YX = _cover(pixels_CYX, background_C, colour_C)
    if not (cover_YX > 0.5).any():
        return Verdict(None, 0.0, 0.0)
    shape, overlap, radius, middle = _fitted(cover_YX)
    place = min(PLACES, key=lambda name: _distance(PLACES[name], middle))
    size = "small" if radius < _SIZE_BORDER_PX else "large"
    seen = Scene(shape, colour, background, place, size)
    return Verdict(seen, overlap, max(background_distance, colour_distance))


def _border(pixels_CYX: Tensor) -> Tensor:
    rows = torch.cat([pixels_CYX[:, 0], pixels_CYX[:, -1]], dim=1)
    return torch.cat([rows, pixels_CYX[:, :, 0], pixels_CYX[:, :, -1]], dim=1)


def _nearest_colour(colour_C: Tensor) -> tuple[str, float]:
    distances = {n: (colour_C - torch.tensor(rgb)).norm().item() for n, rgb in PALETTE.items()}
    name = min(distances, key=distances.__getitem__)
    return name, distances[name]


def _cover(pixels_CYX: Tensor, background_C: Tensor, colour_C: Tensor) -> Tensor:
    """Return the share of the shape's colour in each pixel, [Y, X] in 0..1.

    Stray colours count as 0.5. Edges are sharpened: a soft outline is not another shape.
    """
    axis_C = colour_C - background_C
    offset_CYX = pixels_CYX - background_C[:, None, None]
    share_YX = (offset_CYX * axis_C[:, None, None]).sum(0) / axis_C.square().sum()
    stray_YX = (offset_CYX - share_YX * axis_C[:, None, None]).norm(dim=0) > _MAX_COLOUR_DISTANCE
    sharp_YX = (share_YX - 0.5) * _EDGE_GAIN + 0.5
    return torch.where(stray_YX, torch.tensor(0.5), sharp_YX.clamp(0, 1))


def _fitted(cover_YX: Tensor) -> tuple[str, float, float, tuple[float, float]]:
    """Return the template with the best overlap: shape, overlap, radius, middle (down, right)."""
    area, down, right = _moments(cover_YX)
    fits = []
    for shape in SHAPES:
        unit_area, unit_down, unit_right = _unit_moments(shape)
        radius = (area / unit_area) ** 0.5
        middle = (down - unit_down * radius, right - unit_right * radius)
        template_YX = coverage([shape], torch.tensor([middle]), torch.tensor([radius]))[0]
        joint = torch.minimum(template_YX, cover_YX).sum()
        overlap = (joint / torch.maximum(template_YX, cover_YX).sum()).item()
        fits.append((overlap, shape, radius, middle))
    overlap, shape, radius, middle = max(fits)
    return shape, overlap, radius, middle


def _moments(cover_YX: Tensor) -> tuple[float, float, float]:
    """Return area and centre of gravity (down, right) from the picture's middle, in pixels."""
    axis = torch.arange(PICTURE_PX) + 0.5 - PICTURE_PX / 2
    area = cover_YX.sum().item()
    down, right = (cover_YX.sum(1) @ axis).item(), (cover_YX.sum(0) @ axis).item()
    return area, down / area, right / area


@cache
def _unit_moments(shape: str) -> tuple[float, float, float]:
    """Return the same for the shape of radius 1 whose box is centred."""
    radius = 28.0
    area, down, right = _moments(coverage([shape], torch.zeros(1, 2), torch.tensor([radius]))[0])
    return area / radius**2, down / radius, right / radius


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2
