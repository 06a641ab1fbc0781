"""Means of scores with 95 % intervals, each for one question.

    the same list   what if the same judge scored the same pictures again? Only its noise counts,
                    which repeated scores show
    new pictures    what if other pictures of this kind were drawn and scored? The choice of
                    pictures counts, too

Both are computed from variances, not by resampling: they are the same each time, and with few
pictures a percentile bootstrap is too narrow. Rows that share a source picture (its edits, seeds,
languages) are one picture: resampled one by one they give an interval that is too narrow. Shapes:
S samples, R repeats; a value that is missing is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]
_UPPER = 0.975


@dataclass(frozen=True)
class Samples:
    """Scores `values` [S, R] of samples; `pictures` [S] and `groups` [S] are their labels.

    `groups`: the mean is over the groups' means; None for a mean over samples.
    """

    values: Floats
    pictures: Sequence[str]
    groups: Sequence[str] | None = None

    def with_missing_as(self, value: float) -> "Samples":
        return Samples(np.where(np.isnan(self.values), value, self.values), *self._labels)

    @property
    def _labels(self) -> tuple[Sequence[str], Sequence[str] | None]:
        return self.pictures, self.groups


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its intervals; None where nothing can be said.

    `same_list`: needs repeated scores. `new_pictures`: needs two pictures. `noise_share`: the
    judge's part of the variance behind `new_pictures`. `samples`, `pictures`: with a value.
    `repeats`: the mean number of values of a sample. `is_constant`: repeated scores never differed.
    """

    mean: float
    same_list: float | None
    new_pictures: float | None
    noise_share: float | None
    samples: int
    pictures: int
    repeats: float
    is_constant: bool

    def interval(self, half: float | None) -> tuple[float, float] | None:
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def is_told_apart(self) -> bool:
        """True if 0 is outside the interval for new pictures."""
        return self.new_pictures is not None and abs(self.mean) > self.new_pictures


def estimate(samples: Samples) -> Estimate | None:
    """Return the mean of the samples with a value; None if there are none."""
    return _estimate([samples], [1.0])


def difference(a: Samples, b: Samples) -> Estimate | None:
    """Return the mean of `a - b` over samples with a value in both; rows are paired."""
    return _estimate([a, b], [1.0, -1.0])


def limit_of_two_runs(samples: Samples, repeats: int) -> float | None:
    """Return how far two means of the same pictures by the same judge may be apart, 95 %.

    `samples`: of one run. `repeats`: scores per picture of the other. None without repeated scores.
    """
    noise = _Noise(samples.values, _weights(samples, _has_value(samples.values)))
    return noise.half_width(1 / noise.counts + 1 / repeats)


def _has_value(values: Floats) -> NDArray[np.bool_]:
    return np.asarray(~np.isnan(values).all(1))


def _weights(samples: Samples, is_used: NDArray[np.bool_]) -> Floats:
    """Return each sample's weight in the mean [S], 0 for those without a value."""
    if samples.groups is None:
        return np.asarray(is_used / max(1, is_used.sum()))
    _, group = np.unique(np.asarray(samples.groups), return_inverse=True)
    counts = np.bincount(group, is_used)
    weights: Floats = is_used / np.maximum(1, counts)[group] / max(1, (counts > 0).sum())
    return weights


class _Noise:
    """The noise of a judge, from samples that it scored more than once.

    A sample that it scored once has the noise of the others on average.
    """

    def __init__(self, values: Floats, weights: Floats) -> None:
        used = weights > 0
        self._weights, values = weights[used], values[used]
        self.counts = (~np.isnan(values)).sum(1)
        self._is_repeated = self.counts > 1
        centred = values - np.nanmean(values, axis=1, keepdims=True)
        sums = np.nansum(centred**2, axis=1)
        free = np.maximum(1, self.counts - 1)
        pooled = sums.sum() / max(1, (self.counts - 1).sum())
        self._variances = np.where(self._is_repeated, sums / free, pooled)

    @property
    def is_known(self) -> bool:
        return bool(self._is_repeated.any())

    @property
    def is_constant(self) -> bool:
        return self.is_known and not self._variances.any()

    def parts(self, shares: Floats) -> Floats:
        """Return each sample's part of the mean's variance; `shares` of its own variance [S]."""
        return np.asarray(self._weights**2 * self._variances * shares)

    def half_width(self, shares: Floats) -> float | None:
        return _half_width([self], [self.parts(shares)]) if self.is_known else None

    def degrees(self, parts: Floats) -> float:
        """Return the sum in Welch's denominator, of the samples that tell the noise."""
        free = self.counts[self._is_repeated] - 1
        return float((parts[self._is_repeated] ** 2 / (free + 2)).sum())

    def known_part(self, parts: Floats) -> float:
        """Return the sum of the parts whose variance was seen, not taken from the others."""
        return float(parts[self._is_repeated].sum())


def _half_width(noises: Sequence[_Noise], parts: Sequence[Floats]) -> float:
    """Return the half width of an interval by the noise of one or two runs.

    Source: Welch 1947 for the degrees of freedom of a sum of variances that are few draws each.
    """
    pairs = [*zip(noises, parts, strict=True)]
    variance = sum(float(own.sum()) for own in parts)
    known = sum(noise.known_part(own) for noise, own in pairs)
    below = sum(noise.degrees(own) for noise, own in pairs)
    if not variance or not below:
        return 0.0
    return float(stdtrit(max(1.0, known**2 / below - 2), _UPPER) * np.sqrt(variance))


def _estimate(sides: Sequence[Samples], signs: Sequence[float]) -> Estimate | None:
    first = sides[0]
    used = np.logical_and.reduce([_has_value(side.values) for side in sides])
    if not used.any():
        return None
    weights = _weights(first, used)
    values = sum(
        sign * np.nanmean(side.values[used], axis=1)
        for side, sign in zip(sides, signs, strict=True)
    )
    own = np.asarray(values)
    noises = [_Noise(side.values, weights) for side in sides]
    parts = [noise.parts(1 / noise.counts) for noise in noises]
    is_known = all(noise.is_known for noise in noises)
    spread, pictures = _by_picture(own, weights[used], _chosen(first, used))
    noise_variance = sum(float(one.sum()) for one in parts)
    return Estimate(
        mean=float(weights[used] @ own),
        same_list=_half_width(noises, parts) if is_known else None,
        new_pictures=None if spread is None else spread[0],
        noise_share=min(1.0, noise_variance / spread[1])
        if is_known and spread and spread[1]
        else None,
        samples=int(used.sum()),
        pictures=pictures,
        repeats=float(np.mean([noise.counts.mean() for noise in noises])),
        is_constant=all(noise.is_constant for noise in noises),
    )


def _chosen(samples: Samples, used: NDArray[np.bool_]) -> Samples:
    groups = samples.groups
    return Samples(
        samples.values[used],
        [one for one, is_used in zip(samples.pictures, used, strict=True) if is_used],
        groups and [one for one, is_used in zip(groups, used, strict=True) if is_used],
    )


def _by_picture(
    values: Floats, weights: Floats, samples: Samples
) -> tuple[tuple[float, float] | None, int]:
    """Return half the interval's width and the variance for new pictures, and their number.

    The variance of a weighted mean over clusters: each picture is one draw. Source: Liang & Zeger
    1986, with the correction C / (C - G) for C pictures and G means.
    """
    _, picture = np.unique(np.asarray(samples.pictures), return_inverse=True)
    labels = samples.groups or [""] * len(values)
    _, group = np.unique(np.asarray(labels), return_inverse=True)
    means = np.bincount(group, values) / np.bincount(group)
    sums = np.bincount(picture, weights * (values - means[group]))
    count, free = len(sums), len(sums) - len(means)
    if free < 1:
        return None, count
    variance = float((sums**2).sum()) * count / free
    return (float(stdtrit(free, _UPPER) * np.sqrt(variance)), variance), count
