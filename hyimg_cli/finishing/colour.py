"""Colour drift of a redraw outside the edit: gain, bias, contrast, saturation, smooth field."""

from dataclasses import dataclass

import numpy as np

from hyimg_cli.finishing.planes import (
    Mask,
    Plane,
    blurred,
    by_bands,
    distance_to,
    median,
    numbers,
    reduced,
    resized,
    spread,
)

_STEP, _TUKEY, _TURNS = 4, 4.0, 8
# Acts as if this much of the picture had these colours without drift: otherwise a fit to a few
# colours would make up the others.
_STILL = 0.02
_ALL_COLOURS = np.stack(np.meshgrid(*[np.linspace(0, 255, 3)] * 3)).reshape(3, -1)
_FIELD, _MOST_FIELD, _FIELD_AWAY = 1 / 8, 6.0, 8.0
_DARKEST, _BRIGHTEST = 3.0, 252.0


@dataclass(frozen=True)
class Drift:
    """Map from drawn levels to those of the source: `levels + mixing @ terms + bias + field`.

    `mixing` [3, 6] acts on the three channels and on the curves of each; `field` [3, y, x] is a
    small picture of the whole. `keeps_clipped`: white and black channels stay so, because a drift
    that was fitted to a part of the picture says nothing about a white that is new.
    """

    mixing: np.ndarray
    bias: np.ndarray
    field: Plane
    keeps_clipped: bool = False

    def undone(self, levels: Plane, reference: Plane | None = None) -> Plane:
        """Return levels [3, Y, X] of the whole picture without the drift.

        A clipped channel may have had any value beyond the limit; there the result takes the
        distance from `reference`.
        """
        return self.undone_in(levels, None, reference)

    def undone_in(
        self,
        levels: Plane,
        box: tuple[float, float, float, float] | None,
        reference: Plane | None = None,
    ) -> Plane:
        """Return a part without the drift; `box`: its sides as fractions of the whole."""
        y, x = self.field.shape[1:]
        part = None if box is None else (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        field = resized(self.field, (levels.shape[1], levels.shape[2]), part)
        if self.keeps_clipped:
            reference = levels
        given = (levels, field) if reference is None else (levels, field, reference)
        return by_bands(self._undone_with, *given)

    def _undone_with(self, levels: Plane, field: Plane, reference: Plane | None = None) -> Plane:
        found = np.tensordot(self.mixing, _terms(levels), axes=1)
        found += levels
        found += self.bias[:, None, None] + field
        if reference is not None:
            np.maximum(found, reference, out=found, where=levels >= _BRIGHTEST)
            np.minimum(found, reference, out=found, where=levels <= _DARKEST)
        return np.asarray(found, np.float32)


def unmoved(drift: Drift) -> Drift:
    """Return the identity drift."""
    mixing, bias, field = (np.zeros_like(one) for one in (drift.mixing, drift.bias, drift.field))
    return Drift(mixing, bias, field)


def drift_of(reference: Plane, drawn: Plane, mask: Mask | None, scale: float) -> Drift:
    """Fit the drift between levels [3, Y, X] robustly to blurred pixels outside the mask.

    Without a mask no field is fitted, because it would follow the edit.
    """
    return drift_between(smoothed(reference, scale), smoothed(drawn, scale), mask, scale)


def smoothed(levels: Plane, scale: float) -> Plane:
    """Return the blurred and reduced levels to which a drift is fitted, [3, y, x]."""
    return reduced(blurred(levels, 3 * scale), _STEP)


def drift_between(reference: Plane, drawn: Plane, mask: Mask | None, scale: float) -> Drift:
    """Fit the drift as `drift_of` does, between levels that are `smoothed` already."""
    small = reference, drawn
    free = np.ones(small[0].shape[1:], np.float32)
    if mask is not None:
        free = numbers(reduced(numbers(mask), _STEP) == 0)
    if free.sum() < 16:
        free[:] = 1
    terms = _terms(small[1])[:, free > 0]
    fits = [_fit(r[free > 0], m[free > 0], terms) for r, m in zip(*small, strict=True)]
    mixing, bias = (np.array(part, np.float32) for part in zip(*fits, strict=True))
    flat = np.zeros((3, *small[0].shape[1:]), np.float32)
    if mask is None:
        return Drift(mixing, bias, flat)
    left = small[0] - Drift(mixing, bias, flat).undone(small[1])
    away = reduced(distance_to(mask), _STEP) if mask.any() else np.full(free.shape, np.inf)
    weights = numbers(away > _FIELD_AWAY * scale) * _near(left)
    weights *= numbers((small[1].min(0) > _DARKEST) & (small[1].max(0) < _BRIGHTEST))
    field, trust = spread(left, weights, _FIELD * max(free.shape))
    field *= np.clip(trust * 10, 0, 1)
    return Drift(mixing, bias, np.clip(field, -_MOST_FIELD, _MOST_FIELD))


def _terms(levels: Plane) -> Plane:
    """Return levels [3, ...] and the rise of their curves between black and white: [6, ...]."""
    return np.concatenate([levels, levels * (255 - levels) * (4 / 255)])


def _fit(reference: np.ndarray, drawn: np.ndarray, terms: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit terms [6, N] and a bias to a reference channel, with Tukey's weights and shrinkage."""
    change, still = reference - drawn, _terms(_ALL_COLOURS)
    # Once, not in each product.
    terms = terms.astype(np.float64)
    mixing, bias = np.zeros(len(terms)), median(change)
    for _ in range(_TURNS):
        residual = np.abs(change - mixing @ terms - bias)
        level = max(0.5, 1.4826 * median(residual))
        weights = np.square(np.clip(1 - np.square(residual / (_TUKEY * level)), 0, None))
        weights /= max(1e-6, float(weights.sum()))
        mean = (terms @ weights + _STILL * still.mean(1)) / (1 + _STILL)
        away, beyond = terms - mean[:, None], still - mean[:, None]
        weighted = away * weights
        normal = weighted @ away.T + _STILL / still.shape[1] * beyond @ beyond.T
        mixing = np.linalg.solve(normal, weighted @ change)
        bias = float(weights @ change) / (1 + _STILL) - float(mixing @ mean)
    return mixing, bias


def _near(left: Plane) -> Plane:
    """Return weights for the remaining difference: low where an edit may have been missed."""
    size = np.abs(left).max(0)
    level = max(1.0, 1.4826 * float(np.median(size)))
    return np.asarray(np.square(np.clip(1 - np.square(size / (4 * level)), 0, None)), np.float32)
