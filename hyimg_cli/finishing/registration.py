"""How a redraw moved: a zoom and a shift for each axis, found robustly, or not used.

Rotation and local flow are left out on purpose: flow bends a real edit back into its source.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from hyimg_cli.finishing.planes import Mask, Plane, blurred, numbers, reduced

_HIGH_PASS, _TUKEY = 6.0, 4.7 * 1.4826
_LEVELS, _LEAST_SIDE, _STEPS, _STILL = (8, 4, 2, 1), 24, 12, 0.005
# Beyond these the picture was framed anew.
_MOST_ZOOM, _MOST_SHIFT = 0.03, 0.02
# Residuals of neighbours are alike: so many pixels count as one. In pixels of the drawn picture.
_ALIKE, _UNSURE, _UNSURE_COARSE = 9.0, 0.1, 0.1
# Part of the slopes that both pictures have: below it they are noise. A zoom counts half.
_ALIKE_SLOPES, _ZOOM, _AS_GOOD = 0.3, 0.5, 1.05


@dataclass(frozen=True)
class Motion:
    """A point at x of what was shown is drawn at `zoom * x + shift`; vertical first."""

    zoom: tuple[float, float] = (1.0, 1.0)
    shift: tuple[float, float] = (0.0, 0.0)

    def is_too_far(self, shape: tuple[int, ...]) -> bool:
        """Whether it is more than a drift of the model: a picture of this size was reframed."""
        zoomed = max(abs(zoom - 1) for zoom in self.zoom) > _MOST_ZOOM
        centre = [
            abs((zoom - 1) * side / 2 + shift) / side
            for zoom, shift, side in zip(self.zoom, self.shift, shape, strict=False)
        ]
        return zoomed or max(centre) > _MOST_SHIFT

    def applied(self, array: Plane) -> Plane:
        """Planes [..., Y, X] moved back over what was shown (bicubic)."""
        if self == Motion():
            return array
        flat = array.reshape(-1, *array.shape[-2:])
        return np.stack([self._moved(plane) for plane in flat]).reshape(array.shape)

    def inside(self, shape: tuple[int, int], rim: float) -> Mask:
        """Pixels of what was shown that were drawn, `rim` pixels from the border and further."""
        y, x = (
            (at >= rim) & (at <= side - rim)
            for at, side in ((self._at(axis, shape[axis]), shape[axis]) for axis in (0, 1))
        )
        return np.asarray(y[:, None] & x[None])

    def _at(self, axis: int, side: int) -> Plane:
        centres = np.arange(side, dtype=np.float32) + np.float32(0.5)
        return np.asarray(self.zoom[axis] * centres + self.shift[axis], np.float32)

    def _moved(self, plane: Plane) -> Plane:
        # Pillow gives nothing outside: a border of the last pixels goes round first.
        pad = 2 + int(max(abs(_far(self, plane.shape))))
        wide = np.pad(plane, pad, mode="edge")
        (zoom_y, zoom_x), (y, x) = self.zoom, self.shift
        how = (zoom_x, 0, x + pad, 0, zoom_y, y + pad)
        size = plane.shape[::-1]
        moved = Image.fromarray(wide).transform(
            size, Image.Transform.AFFINE, how, Image.Resampling.BICUBIC
        )
        return np.asarray(moved)


def registered(shown: Plane, drawn: Plane, without: Mask | None = None) -> Motion:
    """The motion between two planes of luma. `without`: pixels that were edited.

    It stays in place in each direction of which the picture says too little: along stripes, or of
    the zoom where all there is stands together.
    """
    if without is not None:
        # Else the edit's own halo, in what is left of it behind the high-pass, would be followed.
        return _registered(shown, np.where(without, shown, drawn), without)
    motion = _registered(shown, drawn, None)
    if motion != Motion():
        return motion
    # Of a page with a line of text the flat part alone was believed.
    return _registered(shown, drawn, np.zeros(shown.shape, bool))


def _registered(shown: Plane, drawn: Plane, without: Mask | None) -> Motion:
    levels = _LEVELS if max(shown.shape) < 512 else _LEVELS[:-1]
    found = np.zeros(4)
    for by in (by for by in levels if min(shown.shape) / by >= _LEAST_SIDE):
        level = _Level.of(shown, drawn, without, by)
        start, (found, left) = found, level.refined(found)
        if by == levels[-1] and np.abs(start / level.units).max() > 1:
            # What repeats itself fits in many places: the nearest one counts.
            nearest, least = level.refined(np.zeros(4))
            found = nearest if least <= _AS_GOOD * left else found
    return _about(np.array(shown.shape) / 2, found[:2], found[2:])


def _about(centre: np.ndarray, zoom: np.ndarray, shift: np.ndarray) -> Motion:
    """A zoom around `centre`, and then a shift."""
    moved = shift - zoom * centre
    return Motion((1 + float(zoom[0]), 1 + float(zoom[1])), (float(moved[0]), float(moved[1])))


@dataclass(frozen=True)
class _Level:
    """Both pictures at a part of their size, high-passed; what is `free` counts. A motion is two
    zooms and two shifts in pixels of the whole size, vertical first.
    """

    shown: Plane
    drawn: Plane
    free: Plane
    by: int
    has_edit: bool

    @classmethod
    def of(cls, shown: Plane, drawn: Plane, without: Mask | None, by: int) -> "_Level":
        near, far = (_high_passed(reduced(plane, by)) for plane in (shown, drawn))
        free = np.ones(near.shape, np.float32)
        if without is not None:
            free = numbers(reduced(numbers(without), by) == 0)
        return cls(near, far, free, by, without is not None)

    @property
    def units(self) -> np.ndarray:
        """What moves the middle by a pixel of this level, or the border by a part of one: where a
        zoom and a shift would do, it is a shift.
        """
        return np.array([*(2 * _ZOOM / np.array(self.shown.shape)), self.by, self.by])

    def refined(self, motion: np.ndarray) -> tuple[np.ndarray, float]:
        """The motion from here, by Gauss and Newton with Tukey's weights, in the directions that
        both pictures tell of; and the difference that it leaves along the shown one's edges.
        """
        for _ in range(_STEPS):
            normal, _, right, noise, _ = self._equations(motion)
            values, ways = np.linalg.eigh(normal)
            known = _errors(values, noise) < 1
            step = ways[:, known] @ (ways.T @ right / np.maximum(values, 1e-6))[known]
            motion = motion + step * self.units
            if np.abs(step).max() * self.by < _STILL or np.abs(motion[:2]).max() > 0.2:
                break
        normal, common, _, noise, left = self._equations(motion)
        values, ways = np.linalg.eigh(normal)
        # Noise has slopes, too, but not the same ones in both.
        alike = np.diag(ways.T @ common @ ways) > _ALIKE_SLOPES * values
        sure = alike & (_errors(values, noise) * self.by < max(_UNSURE, _UNSURE_COARSE * self.by))
        ways = ways[:, sure]
        return ways @ (ways.T @ (motion / self.units)) * self.units, left

    def _equations(
        self, motion: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
        """The normal matrix [4, 4] in units, the same of slopes that both pictures have, the right
        side, the noise of a pixel, and the difference along edges.
        """
        centre = np.array(self.shown.shape) / 2
        where = _about(centre, motion[:2], motion[2:] / self.by)
        moved = where.applied(self.drawn)
        residual = (self.shown - moved).ravel()
        inside = (self.free * where.inside(self.shown.shape, 1.5)).ravel()
        counted = residual[inside > 0]
        own, other = (_slopes(plane) for plane in (self.shown, moved))
        if counted.size < 64:
            return np.zeros((4, 4)), np.zeros((4, 4)), np.zeros(4), 1.0, np.inf
        edges = inside * np.square(own[2:]).sum(0)
        left = float(edges @ np.abs(residual) / max(1e-6, edges.sum()))
        spread = float(np.median(np.abs(counted - np.median(counted))))
        if self.has_edit:
            # What differs without it moved, though most of the picture be flat.
            spread = max(spread, left)
        level = max(0.3, spread * _TUKEY)
        weights = inside * np.square(np.clip(1 - np.square(residual / level), 0, None))
        noise = float(weights @ np.square(residual) / max(1e-6, weights.sum()))
        weighted = other * weights
        common = weighted @ own.T
        return weighted @ other.T, (common + common.T) / 2, weighted @ residual, noise, left


def _errors(values: np.ndarray, noise: float) -> np.ndarray:
    """To be expected of a motion, in pixels, along the normal matrix's own directions."""
    return np.asarray(np.sqrt((noise + 0.5) * _ALIKE / np.maximum(values, 1e-6)))


def _slopes(plane: Plane) -> Plane:
    """By how much each pixel changes with a unit of each zoom and shift, [4, Y * X]."""
    # A pixel's difference alone: over longer ones fine texture has no slope.
    slopes = np.gradient(plane)
    zooms = [
        slope * (_ZOOM * (2 * np.arange(side) + 1 - side) / side).reshape((-1, 1)[:: 1 - 2 * axis])
        for axis, (slope, side) in enumerate(zip(slopes, plane.shape, strict=True))
    ]
    return np.stack([*zooms, *slopes]).reshape(4, -1).astype(np.float32)


def _high_passed(plane: Plane) -> Plane:
    return np.asarray(plane - blurred(plane, _HIGH_PASS))


def _far(motion: Motion, shape: tuple[int, ...]) -> np.ndarray:
    """How far the corners move, in pixels."""
    return np.asarray(
        [
            corner * (zoom - 1) * side + shift
            for zoom, shift, side in zip(motion.zoom, motion.shift, shape, strict=True)
            for corner in (0, 1)
        ]
    )
