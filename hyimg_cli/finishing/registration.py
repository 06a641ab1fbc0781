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
_ALIKE, _UNSURE = 9.0, 0.1


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

    Staying in place where what is left says too little.
    """
    zoom, shift, motion = np.zeros(2), np.zeros(2), Motion()
    sides = np.array(shown.shape, float)
    is_sure = False
    if without is not None:
        # Else the edit's own halo, in what is left of it behind the high-pass, would be followed.
        drawn = np.where(without, shown, drawn)
    for level in _LEVELS if max(shown.shape) < 512 else _LEVELS[:-1]:
        if min(shown.shape) / level < _LEAST_SIDE:
            continue
        near, far = (_high_passed(reduced(plane, level)) for plane in (shown, drawn))
        free = np.ones(near.shape, np.float32)
        if without is not None:
            free = numbers(reduced(numbers(without), level) == 0)
        for _ in range(_STEPS):
            centre = sides / 2
            motion = _about(centre / level, zoom, shift / level)
            step, error = _step(near, far, free, motion)
            zoom, shift = zoom + step[:2], shift + step[2:] * level
            is_sure = bool(error * level < _UNSURE)
            by = np.abs(step[2:]) + np.abs(step[:2]) * sides / 2 / level
            if by.max() < _STILL or np.abs(zoom).max() > 0.2:
                break
    return _about(sides / 2, zoom, shift) if is_sure else Motion()


def _about(centre: np.ndarray, zoom: np.ndarray, shift: np.ndarray) -> Motion:
    """A zoom around `centre`, and then a shift."""
    moved = shift - zoom * centre
    return Motion((1 + float(zoom[0]), 1 + float(zoom[1])), (float(moved[0]), float(moved[1])))


def _step(shown: Plane, drawn: Plane, free: Plane, motion: Motion) -> tuple[np.ndarray, float]:
    """A step of Gauss and Newton with Tukey's weights: zooms, shifts; and the error to expect of
    a shift, in pixels.
    """
    moved = motion.applied(drawn)
    residual = (shown - moved).ravel()
    # A pixel's difference alone: over longer ones fine texture has no slope.
    slopes = np.gradient(moved)
    columns = [
        (
            slopes[axis] * (np.arange(side) + 0.5 - side / 2).reshape((-1, 1)[:: 1 - 2 * axis])
        ).ravel()
        for axis, side in enumerate(moved.shape)
    ] + [slope.ravel() for slope in slopes]
    inside = (free * motion.inside(shown.shape, 1.5)).ravel()
    counted = residual[inside > 0]
    if counted.size < 64:
        return np.zeros(4), np.inf
    level = max(0.3, float(np.median(np.abs(counted - np.median(counted)))) * _TUKEY)
    weights = inside * np.square(np.clip(1 - np.square(residual / level), 0, None))
    jacobian = np.stack(columns)
    normal = (jacobian * weights) @ jacobian.T
    normal[np.diag_indices(4)] += 1e-3 * np.diag(normal) + 1e-6
    found = np.linalg.solve(normal, (jacobian * weights) @ residual)
    variance = float(weights @ np.square(residual) / max(1e-6, weights.sum()))
    errors = np.sqrt(np.diag(np.linalg.inv(normal))[2:] * (variance + 0.5) * _ALIKE)
    return np.asarray(found), float(errors.max())


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
