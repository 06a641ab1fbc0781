"""Find the part of a picture that stays where a redraw replaced most of it, as behind a product.

Motion, colour drift and noise are usually those of the larger part. Here they come from the part
that stays: cells with detail that agree on one motion and nearly keep their colours are its seeds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import sqrt

import numpy as np
from scipy import ndimage

from hyimg_cli.finishing.colour import Drift, drift_of
from hyimg_cli.finishing.planes import (
    Mask,
    Plane,
    blurred,
    deeper,
    length,
    luma,
    numbers,
    opponent,
    reduced,
    resized,
    scale_of,
    within,
)
from hyimg_cli.finishing.region import BlurredView, EditMask, region
from hyimg_cli.finishing.registration import Motion, lightness, registered

# Cells are compared in a picture of about this side, in steps of half a cell, over these shifts.
_SIDE, _HALF, _SHIFTS = 320, 8, 6
_BAND, _ZOOMS = (1.0, 4.0), tuple(0.006 * n for n in (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5))
# A cell has detail from this contrast, in levels. It agrees from this correlation and within these
# factors of contrast; its colours may differ by these levels and this fraction of them.
_DETAIL, _ALIKE, _CONTRAST, _CAST = 2.0, 0.8, (0.7, 1.4), (5.0, 0.06)
# The minimum fraction of the picture that the seeds cover, and that stays; of the picture, and with
# seeds, for each of its components.
_LEAST_SEEDS, _LEAST_PART, _LEAST_COMPONENT, _SEEDED = 0.015, 0.06, 0.02, 0.1
# This fraction of the cells that are within the part agrees: 0.82 and more in new backgrounds, 0.47
# and less in drawings of edges.
_WITHIN, _LEAST_AGREE = 0.9, 0.65
# The rest of a restyled picture correlates with the source by more than this. A rest of fewer cells
# says nothing.
_MOST_ALIKE, _FEW = 0.3, 6
# Thinner parts than twice this have no place in the outline. Pixels at the border are not compared.
_OUTLINE, _RIM = 5.0, 3.0
# A component without seeds is equal if at most this fraction of it differs by more, once smooth.
_EQUAL, _UNEQUAL, _SMOOTH, _STEP = 2.5, 0.1, 6.0, 4
_SIDES, _AREA = 2 * _SHIFTS + 1, 4 * _HALF**2


@dataclass(frozen=True)
class Stays:
    """The part [Y, X] of a picture that stays, and how the redraw differs in it.

    `moved`: the redraw without motion and drift; `found`: the edit, everything else.
    """

    part: Mask
    motion: Motion
    drift: Drift
    moved: Plane
    found: EditMask


def stays_of(
    reference: Plane, drawn: Plane, seen: list[BlurredView], kept: Mask | None = None
) -> Stays | None:
    """Return the coherent part that a redraw left alone; None if there is none, as in a restyle.

    From levels [3, Y, X] and the reference's views. `kept` [Y, X]: the part that the user keeps,
    if it is given.
    """
    shape, both = reference.shape[1:], (lightness(reference), lightness(drawn))
    scale, cells = scale_of(shape), _Cells(reference, drawn) if kept is None else None
    if cells is not None:
        motion = registered(*both, ~cells.agreeing())
        seeds = cells.seeds(motion.applied(drawn))
    else:
        assert kept is not None, "there are no cells"
        motion, seeds = registered(*both, ~kept), kept
    if motion.is_too_far(shape) or seeds.mean() < _LEAST_SEEDS:
        return None
    undone, _ = _undone(reference, drawn, motion, seeds)
    found = region(undone, reference, seen, motion.inside(shape, _RIM * scale), seeds)
    part = _coherent(~found.mask, seeds, _differences(reference, undone), scale)
    if part.mean() < (_LEAST_SEEDS if cells is None else _LEAST_PART):
        return None
    if cells is not None and not (cells.agree_in(part) and cells.differ_outside(part)):
        return None
    again = registered(*both, ~part)
    motion = motion if again.is_too_far(shape) else again
    undone, drift = _undone(reference, drawn, motion, part)
    return Stays(part, motion, drift, undone, found)


def _undone(reference: Plane, drawn: Plane, motion: Motion, part: Mask) -> tuple[Plane, Drift]:
    """Return the redraw without its motion and the drift of a part, and that drift."""
    moved = motion.applied(drawn)
    drift = drift_of(reference, moved, ~part, scale_of(part.shape))
    return drift.undone(moved, reference), drift


class _Cells:
    """Overlapping cells of a source and its redraw, compared at every shift of a few pixels."""

    def __init__(self, reference: Plane, drawn: Plane) -> None:
        self._shape = reference.shape[1:]
        self._by = max(1, round(sqrt(self._shape[0] * self._shape[1]) / _SIDE))
        self._levels = reduced(reference, self._by)
        own, other = (_band(luma(reduced(one, self._by))) for one in (reference, drawn))
        self._power = _sums(np.square(own))
        self._has_detail = self._power > _DETAIL**2 * _AREA
        wide, (y, x), reach = np.pad(other, _SHIFTS), own.shape, range(_SIDES)
        places = [
            (slice(down, down + y), slice(right, right + x)) for down in reach for right in reach
        ]
        powers = np.stack([_sums(np.square(wide[place])) for place in places])
        common = np.stack([_sums(own * wide[place]) for place in places])
        self._alike = common / (np.sqrt(self._power * powers) + 1e-3)
        contrast = np.sqrt(powers / (self._power + 1e-3))
        low, high = _CONTRAST
        self._votes = self._has_detail & (self._alike > _ALIKE)
        self._votes &= (contrast > low) & (contrast < high)
        self._motion = max(self._motions(), key=lambda at: int(_taken(self._votes, at).sum()))

    def agreeing(self) -> Mask:
        """Return the pixels [Y, X] of the cells that agree on one motion."""
        return self._pixels_of(_taken(self._votes, self._motion))

    def seeds(self, moved: Plane) -> Mask:
        """Return those of the agreeing cells' pixels that nearly keep their colours."""
        own, other = (_sums(one) / _AREA for one in (self._levels, reduced(moved, self._by)))
        levels, part = _CAST
        keeps = (np.abs(other - own) < levels + part * own).all(axis=0)
        return self._pixels_of(_taken(self._votes, self._motion) & keeps)

    def agree_in(self, part: Mask) -> bool:
        """Return True if nearly all detail of the part [Y, X] is drawn as it was.

        In a dark part of a drawing of edges, a difference is small, but so is what agrees.
        """
        within_it = self._has_detail & (self._share(part) > _WITHIN)
        agreeing = _taken(self._votes, self._motion)[within_it]
        return agreeing.size > 0 and float(agreeing.mean()) > _LEAST_AGREE

    def differ_outside(self, part: Mask) -> bool:
        """Return True if the detail outside the part [Y, X] is new, as it is not in a restyle."""
        rest = self._has_detail & (self._share(part) == 0)
        alike = _taken(self._alike, self._motion)[rest]
        return alike.size < _FEW or float(np.median(alike)) < _MOST_ALIKE

    def _share(self, part: Mask) -> Plane:
        """Return how much of each cell is in the part."""
        return _sums(reduced(numbers(part), self._by)) / _AREA

    def _pixels_of(self, cells: Mask) -> Mask:
        blocks = ndimage.binary_dilation(np.pad(cells, (0, 1)), np.ones((2, 2)), origin=-1)
        side = _HALF * self._by
        large = np.kron(blocks, np.ones((side, side), bool))
        rest = [(0, max(0, n - m)) for n, m in zip(self._shape, large.shape, strict=True)]
        return np.pad(large, rest)[: self._shape[0], : self._shape[1]]

    def _motions(self) -> Iterator[np.ndarray]:
        """Yield the number of each cell's shift for every zoom and shift, small ones first."""
        centres = [_HALF * (np.arange(n) - (n - 1) / 2) for n in self._power.shape]
        reach = sorted(range(_SIDES), key=lambda n: abs(n - _SHIFTS))
        for zoom, down, right in product(_ZOOMS, reach, reach):
            y, x = (
                np.clip(np.round(at * zoom + shift), 0, _SIDES - 1).astype(int)
                for at, shift in zip(centres, (down, right), strict=True)
            )
            yield y[:, None] * _SIDES + x[None]


def _coherent(same: Mask, seeds: Mask, differs: Plane, scale: float) -> Mask:
    """Return the components with enough seeds, and flat ones that are equal; without thin parts."""
    depth = max(1.0, _OUTLINE * scale)
    labels, count = ndimage.label(within(deeper(same, depth), depth) & same)
    area = np.maximum(1, np.bincount(labels.ravel(), minlength=count + 1))
    seeded, unequal = (
        np.bincount(labels[where], minlength=count + 1) for where in (seeds, differs > _EQUAL)
    )
    stays = (seeded > _SEEDED * area) | (unequal < _UNEQUAL * area)
    stays &= area >= _LEAST_COMPONENT * same.size
    stays[0] = False
    return np.asarray(stays[labels])


def _differences(reference: Plane, undone: Plane) -> Plane:
    """Return the distance [Y, X] of blurred colours, in which noise is small."""
    shape = reference.shape[1], reference.shape[2]
    own, other = (opponent(reduced(one, _STEP)) for one in (reference, undone))
    return resized(length(blurred(other - own, _SMOOTH * scale_of(shape) / _STEP)), shape)


def _band(plane: Plane) -> Plane:
    return np.asarray(blurred(plane, _BAND[0]) - blurred(plane, _BAND[1]))


def _sums(plane: Plane) -> Plane:
    """Return the sums of planes [..., Y, X] over overlapping cells."""
    y, x = (side // _HALF for side in plane.shape[-2:])
    blocks = plane[..., : y * _HALF, : x * _HALF].reshape(*plane.shape[:-2], y, _HALF, x, _HALF)
    sums = blocks.sum((-3, -1))
    rows = sums[..., 1:, :] + sums[..., :-1, :]
    return np.asarray(rows[..., 1:] + rows[..., :-1])


def _taken(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the value of each cell [y, x] at its own shift."""
    return np.asarray(np.take_along_axis(values, at[None], 0)[0])
