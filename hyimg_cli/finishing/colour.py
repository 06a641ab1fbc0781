"""Colours that a redraw drifted by, outside the edit: a gain and a bias for each channel, and a
field of low frequency.
"""

from dataclasses import dataclass

import numpy as np

from hyimg_cli.finishing.planes import (
    Mask,
    Plane,
    blurred,
    distance_to,
    numbers,
    reduced,
    resized,
    spread,
)

_STEP, _TUKEY, _TURNS = 4, 4.0, 8
# As if a gain of 1 had been seen on pixels that vary so much, in levels squared.
_PRIOR = 25.0
_FIELD, _MOST_FIELD, _FIELD_AWAY = 1 / 8, 6.0, 8.0
_DARKEST, _BRIGHTEST = 3.0, 252.0


@dataclass(frozen=True)
class Drift:
    """What turns drawn levels into those of the source: `gain * levels + bias + field`.

    `field` [3, y, x] is a small picture of the whole.
    """

    gain: np.ndarray
    bias: np.ndarray
    field: Plane

    def undone(self, levels: Plane, reference: Plane | None = None) -> Plane:
        """Levels [3, Y, X] of the whole picture without the drift. A channel that was clipped
        stands for anything beyond: there it is as far as `reference` says.
        """
        return self.undone_in(levels, None, reference)

    def undone_in(
        self,
        levels: Plane,
        box: tuple[float, float, float, float] | None,
        reference: Plane | None = None,
    ) -> Plane:
        """The same of a part; `box`: its left, top, right and bottom as parts of the whole."""
        y, x = self.field.shape[1:]
        part = None if box is None else (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        field = resized(self.field, (levels.shape[1], levels.shape[2]), part)
        found = levels * self.gain[:, None, None] + (self.bias[:, None, None] + field)
        if reference is None:
            return np.asarray(found, np.float32)
        found = np.where(levels >= _BRIGHTEST, np.maximum(found, reference), found)
        return np.asarray(
            np.where(levels <= _DARKEST, np.minimum(found, reference), found), np.float32
        )


def unmoved(drift: Drift) -> Drift:
    """No drift at all, in the shape of one."""
    return Drift(np.ones_like(drift.gain), np.zeros_like(drift.bias), np.zeros_like(drift.field))


def drift_of(reference: Plane, drawn: Plane, mask: Mask | None, scale: float) -> Drift:
    """The drift between levels [3, Y, X], as robust lines over blurred pixels outside the mask.

    Without a mask yet there is no field: it would follow the edit.
    """
    small = [reduced(blurred(levels, 3 * scale), _STEP) for levels in (reference, drawn)]
    free = np.ones(small[0].shape[1:], np.float32)
    if mask is not None:
        free = numbers(reduced(numbers(mask), _STEP) == 0)
    if free.sum() < 16:
        free[:] = 1
    lines = np.array([_line(r[free > 0], m[free > 0]) for r, m in zip(*small, strict=True)])
    gain, bias = lines[:, 0].astype(np.float32), lines[:, 1].astype(np.float32)
    flat = np.zeros((3, *small[0].shape[1:]), np.float32)
    if mask is None:
        return Drift(gain, bias, flat)
    left = small[0] - Drift(gain, bias, flat).undone(small[1])
    away = reduced(distance_to(mask), _STEP) if mask.any() else np.full(free.shape, np.inf)
    weights = numbers(away > _FIELD_AWAY * scale) * _near(left)
    weights *= numbers((small[1].min(0) > _DARKEST) & (small[1].max(0) < _BRIGHTEST))
    field, trust = spread(left, weights, _FIELD * max(free.shape))
    field *= np.clip(trust * 10, 0, 1)
    return Drift(gain, bias, np.clip(field, -_MOST_FIELD, _MOST_FIELD))


def _line(reference: np.ndarray, drawn: np.ndarray) -> tuple[float, float]:
    """Gain and bias of a channel, by Tukey's weights; the gain is drawn towards 1."""
    weights, gain, bias = np.ones_like(drawn), 1.0, float(np.median(reference - drawn))
    for _ in range(_TURNS):
        residual = np.abs(reference - gain * drawn - bias)
        level = max(0.5, 1.4826 * float(np.median(residual)))
        weights = np.square(np.clip(1 - np.square(residual / (_TUKEY * level)), 0, None))
        total = max(1e-6, float(weights.sum()))
        r, m = float(weights @ reference) / total, float(weights @ drawn) / total
        varies = float(weights @ np.square(drawn - m)) / total
        together = float(weights @ ((drawn - m) * (reference - r))) / total
        gain = (together + _PRIOR) / (varies + _PRIOR)
        bias = r - gain * m
    return gain, bias


def _near(left: Plane) -> Plane:
    """Trust in what is left by drift: little where an edit was overseen."""
    size = np.abs(left).max(0)
    level = max(1.0, 1.4826 * float(np.median(size)))
    return np.asarray(np.square(np.clip(1 - np.square(size / (4 * level)), 0, None)), np.float32)
