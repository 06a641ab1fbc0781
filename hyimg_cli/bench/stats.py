"""Medians, spreads and intervals of a few repetitions, without assuming a distribution."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Spread:
    """Some repetitions of one figure."""

    n: int
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(len(values), statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Interval:
    """A median and the order statistics around it that hold the true one with `coverage`."""

    median: float
    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], coverage: float = 0.9) -> Interval:
    """The narrowest symmetric pair of order statistics that covers the median often enough.

    Exact for any continuous distribution: the number of values below the true median is binomial.
    With few values it is their whole range, and `coverage` says what that is worth.
    """
    ordered, n = sorted(values), len(values)
    for cut in range((n - 1) // 2, -1, -1):
        covered = 1 - 2 * sum(comb(n, k) for k in range(cut + 1)) / 2**n
        if covered >= coverage or cut == 0:
            return Interval(
                statistics.median(ordered), ordered[cut], ordered[n - 1 - cut], max(covered, 0.0)
            )
    raise AssertionError("there is at least one value")


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    """By how much every value of one side lies above every value of the other; 0 where they mix.

    Positive where `b` is above. With five values each chance alone separates 2 of 252 cases.
    """
    if max(a) < min(b):
        return min(b) - max(a)
    return max(b) - min(a) if max(b) < min(a) else 0.0
