"""Medians, spreads and intervals of a few repetitions, without assuming a distribution."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


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


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Some repetitions of one figure: their number, median and extremes."""
    middle = statistics.median(values)
    return {"n": len(values), "median": middle, "min": min(values), "max": max(values)}


def is_steady(a: Sequence[float], b: Sequence[float], least: float) -> bool:
    """True where two sides differ by more than `least` and more than they scatter.

    The medians must be apart by three median deviations of either side, and four of five pairs,
    each measured side by side, by more than `least` in the same direction.
    """
    apart = statistics.median(b) - statistics.median(a)
    if abs(apart) <= max(least, 3 * _deviation(a), 3 * _deviation(b)):
        return False
    sign = 1 if apart > 0 else -1
    agreeing = sum(sign * (two - one) > least for one, two in zip(a, b, strict=True))
    return agreeing >= 0.8 * len(a)


def _deviation(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
