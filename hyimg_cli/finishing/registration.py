"""Find how a redraw moved, robustly: a zoom and a shift per axis, or none.

Rotation and local flow are left out on purpose: flow would bend a real edit back into its source.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hyimg_cli.finishing.band_matrices import cubic, filtered
from hyimg_cli.finishing.planes import Mask, Plane, blurred, median, numbers, opponent, reduced

_HIGH_PASS, _TUKEY = 6.0, 4.7 * 1.4826
_LEVELS, _LEAST_SIDE, _STEPS, _STILL = (8, 4, 2, 1), 24, 12, 0.005
# Beyond these, the picture was reframed.
_MOST_ZOOM, _MOST_SHIFT = 0.03, 0.02
# Residuals of neighbours are correlated: this many pixels count as one. In pixels of the drawn
# picture, on the finest levels.
_ALIKE, _UNSURE = 9.0, 0.1
# The part of the slopes that both pictures share; below it they are noise.
_ALIKE_SLOPES = 0.3
# A zoom counts half. A closer place may fit worse by this factor.
_ZOOM, _AS_GOOD = 0.5, 1.05
# A picture is flat except for edges if these differ by this factor. The edges are trusted if their
# motion leaves at most this part, up to a model's usual drift in zoom and shift.
_EDGES, _EXPLAINED, _MOST_DRIFT = 12.0, 0.7, (0.015, 0.01)


@dataclass(frozen=True)
class Motion:
    """A point at x of the reference is drawn at `zoom * x + shift`; vertical first.

    `is_sure`: the picture shows enough to tell this shift from others.
    """

    zoom: tuple[float, float] = (1.0, 1.0)
    shift: tuple[float, float] = (0.0, 0.0)
    is_sure: bool = field(default=True, compare=False)

    def is_too_far(
        self, shape: tuple[int, ...], most: tuple[float, float] = (_MOST_ZOOM, _MOST_SHIFT)
    ) -> bool:
        """Return True if a picture of this size was reframed: the motion exceeds a model's drift.

        `most`: a zoom, and a shift as a fraction of the side.
        """
        zoomed = max(abs(zoom - 1) for zoom in self.zoom) > most[0]
        centre = [
            abs((zoom - 1) * side / 2 + shift) / side
            for zoom, shift, side in zip(self.zoom, self.shift, shape, strict=False)
        ]
        return zoomed or max(centre) > most[1]

    def applied(self, array: Plane) -> Plane:
        """Return planes [..., Y, X] moved back onto the reference (bicubic)."""
        if self == Motion():
            return array
        (zoom_y, zoom_x), (y, x) = self.zoom, self.shift
        height, width = array.shape[-2:]
        return filtered(array, cubic(height, zoom_y, y), cubic(width, zoom_x, x))

    def inside(self, shape: tuple[int, int], rim: float) -> Mask:
        """Return the reference's pixels that were drawn, `rim` pixels or more from the border."""
        y, x = (
            (at >= rim) & (at <= side - rim)
            for at, side in ((self._at(axis, shape[axis]), shape[axis]) for axis in (0, 1))
        )
        return np.asarray(y[:, None] & x[None])

    def _at(self, axis: int, side: int) -> Plane:
        centres = np.arange(side, dtype=np.float32) + np.float32(0.5)
        return np.asarray(self.zoom[axis] * centres + self.shift[axis], np.float32)


def lightness(levels: Plane) -> Plane:
    """Return the lightness in levels, from all three channels [3, Y, X]."""
    return np.asarray(opponent(levels)[0] / 0.392, np.float32)


def registered(shown: Plane, drawn: Plane, without: Mask | None = None) -> Motion:
    """Return the motion between two planes of luma. `without`: edited pixels.

    It stays in place in each direction that the picture does not determine: along stripes, or for
    the zoom if all structure is in one place.
    """
    if without is not None:
        # Otherwise the halo of the edit itself, which the high-pass leaves, would be followed.
        return _refined(_levels(shown, np.where(without, shown, drawn), without), shown.shape)[0]
    levels = _levels(shown, drawn, None)
    motion, left = _refined(levels, shown.shape)
    if not levels or not levels[-1].is_flat_but_for_edges():
        return motion
    # Only the flat part was trusted: also try the edges' motion, if it explains them.
    other, less = _refined(_levels(shown, drawn, np.zeros(shown.shape, bool)), shown.shape)
    motion = other if less < _EXPLAINED * left else motion
    # A single object has moved rather than drifted this far.
    is_drift = not motion.is_too_far(shown.shape, _MOST_DRIFT)
    return motion if is_drift or motion.is_too_far(shown.shape) else Motion(is_sure=False)


def _levels(shown: Plane, drawn: Plane, without: Mask | None) -> "list[_PyramidLevel]":
    steps = _LEVELS if max(shown.shape) < 512 else _LEVELS[:-1]
    return [
        _PyramidLevel.of(shown, drawn, without, by)
        for by in steps
        if min(shown.shape) / by >= _LEAST_SIDE
    ]


def _refined(levels: "list[_PyramidLevel]", shape: tuple[int, ...]) -> tuple[Motion, float]:
    """Return the motion, coarse levels first, and the remaining difference along edges."""
    found, left, is_sure = np.zeros(4), 0.0, False
    for level in levels:
        start, (found, left, is_sure) = found, level.refined(found)
        if level is levels[-1] and np.abs(start / level.units).max() > 1:
            # A repeating pattern fits in many places: the nearest one counts.
            nearest, least, _ = level.refined(np.zeros(4))
            found, left = (nearest, least) if least <= _AS_GOOD * left else (found, left)
    motion = _about(np.array(shape) / 2, found[:2], found[2:])
    return replace(motion, is_sure=is_sure), left


def _about(centre: np.ndarray, zoom: np.ndarray, shift: np.ndarray) -> Motion:
    """Return a zoom around `centre`, followed by a shift."""
    moved = shift - zoom * centre
    return Motion((1 + float(zoom[0]), 1 + float(zoom[1])), (float(moved[0]), float(moved[1])))


@dataclass(frozen=True)
class _PyramidLevel:
    """Both pictures at a reduced size, high-passed; only `free` pixels count.

    A motion is two zooms and two shifts in pixels of the whole size, vertical first.
    """

    shown: Plane
    drawn: Plane
    free: Plane
    by: int
    has_edit: bool

    @classmethod
    def of(cls, shown: Plane, drawn: Plane, without: Mask | None, by: int) -> "_PyramidLevel":
        near, far = (_high_passed(reduced(plane, by)) for plane in (shown, drawn))
        free = np.ones(near.shape, np.float32)
        if without is not None:
            free = numbers(reduced(numbers(without), by) == 0)
        return cls(near, far, free, by, without is not None)

    @property
    def units(self) -> np.ndarray:
        """Return the units of the parameters, which move the middle or the border by a pixel."""
        return np.array([*(2 * _ZOOM / np.array(self.shown.shape)), self.by, self.by])

    def refined(self, motion: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Return a refined motion, its difference along edges, and whether the shift is determined.

        By Gauss and Newton with Tukey's weights, in the directions that both pictures show.
        """
        for _ in range(_STEPS):
            told = self._equations(motion)
            values, ways = np.linalg.eigh(told.normal)
            known = _errors(values, told.noise) < 1
            step = ways[:, known] @ (ways.T @ told.right / np.maximum(values, 1e-6))[known]
            motion = motion + step * self.units
            if np.abs(step).max() * self.by < _STILL or np.abs(motion[:2]).max() > 0.2:
                break
        told = self._equations(motion)
        values, ways = np.linalg.eigh(told.normal)
        # Noise has slopes too, but different ones in the two pictures.
        alike = np.diag(ways.T @ told.common @ ways) > _ALIKE_SLOPES * values
        ways = ways[:, alike & (_errors(values, told.noise) * min(self.by, 2) < _UNSURE)]
        is_sure = bool((np.square(ways[2:]).sum(1) > 0.5).all())
        return ways @ (ways.T @ (motion / self.units)) * self.units, told.left, is_sure

    @cached_property
    def _own_slopes(self) -> Plane:
        return _slopes(self.shown)

    @cached_property
    def _own_edges(self) -> Plane:
        return np.asarray(np.square(self._own_slopes[2:]).sum(0))

    def is_flat_but_for_edges(self) -> bool:
        """Return True if edges differ far more than the rest of the picture, all in place."""
        told = self._equations(np.zeros(4))
        return told.left > _EDGES * told.spread

    def _equations(self, motion: np.ndarray) -> "_Equations":
        centre = np.array(self.shown.shape) / 2
        where = _about(centre, motion[:2], motion[2:] / self.by)
        moved = where.applied(self.drawn)
        residual = (self.shown - moved).ravel()
        inside = (self.free * where.inside(self.shown.shape, 1.5)).ravel()
        counted = residual[inside > 0]
        if counted.size < 64:
            return _Equations(np.zeros((4, 4)), np.zeros((4, 4)), np.zeros(4), 1.0, np.inf, np.inf)
        own, other = self._own_slopes, _slopes(moved)
        edges = inside * self._own_edges
        left = float(edges @ np.abs(residual) / max(1e-6, float(edges.sum())))
        spread = median(np.abs(counted - np.float32(median(counted))))
        # Without the edit, what differs has moved, even if most of the picture is flat.
        level = max(0.3, _TUKEY * (max(spread, left) if self.has_edit else spread))
        weights = inside * np.square(np.clip(1 - np.square(residual / level), 0, None))
        noise = float(weights @ np.square(residual) / max(1e-6, float(weights.sum())))
        weighted = other * weights
        common = weighted @ own.T
        return _Equations(
            weighted @ other.T, (common + common.T) / 2, weighted @ residual, noise, left, spread
        )


@dataclass(frozen=True)
class _Equations:
    """The normal matrix [4, 4] in units, that of the shared slopes, the right side, and noise.

    Also the difference along the reference's edges and in the middle.
    """

    normal: np.ndarray
    common: np.ndarray
    right: np.ndarray
    noise: float
    left: float
    spread: float


def _errors(values: np.ndarray, noise: float) -> np.ndarray:
    """Return the expected errors of a motion, in pixels, along the matrix's eigenvectors."""
    return np.asarray(np.sqrt((noise + 0.5) * _ALIKE / np.maximum(values, 1e-6)))


def _slopes(plane: Plane) -> Plane:
    """Return each pixel's change per unit of each zoom and shift, [4, Y * X]."""
    # The difference between adjacent pixels: over longer ones, fine texture has no slope.
    rows, columns = np.gradient(plane)
    found = np.empty((4, *plane.shape), np.float32)
    for axis, slope in enumerate((rows, columns)):
        side = plane.shape[axis]
        units = _ZOOM * (2 * np.arange(side) + 1 - side) / side
        # Multiplied with 64 bits, then rounded.
        np.multiply(
            slope, units[:, None] if axis == 0 else units, out=found[axis], casting="same_kind"
        )
        found[2 + axis] = slope
    return found.reshape(4, -1)


def _high_passed(plane: Plane) -> Plane:
    return np.asarray(plane - blurred(plane, _HIGH_PASS))
