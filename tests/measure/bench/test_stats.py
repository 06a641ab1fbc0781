"""Intervals of a few repetitions: their coverage by simulation, their edges by hand."""

import numpy as np
import pytest

from hyimg_cli.measure.bench.verdict import is_steady, median_interval, spread_of


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 9, 12])
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    generator = np.random.default_rng(n)
    samples = generator.exponential(size=(4000, n))
    intervals = [median_interval(list(row)) for row in samples]
    hit = np.mean([one["low"] <= np.log(2) <= one["high"] for one in intervals])
    assert hit == pytest.approx(intervals[0]["coverage"], abs=0.03)


def test_more_values_give_a_narrower_interval() -> None:
    few, many = median_interval([1.0, 2.0, 3.0]), median_interval([float(n) for n in range(20)])
    assert (few["low"], few["median"], few["high"], few["coverage"]) == (1.0, 2.0, 3.0, 0.75)
    assert many["coverage"] >= 0.9
    assert (many["low"], many["high"]) == (5.0, 14.0)


def test_spread() -> None:
    assert spread_of([3.0, 1.0, 2.0]) == {"n": 3, "median": 2.0, "min": 1.0, "max": 3.0}


def test_steady_is_more_than_a_disturbed_run() -> None:
    even = [1.0, 1.01, 0.99, 1.02, 1.0]
    slower = [one + 0.3 for one in even]
    assert is_steady(even, slower, 0.1)
    assert is_steady(slower, even, 0.1)
    assert is_steady(even, [*slower[:4], 1.0], 0.1), "one run in five may be without it"
    assert not is_steady(even, slower, 0.4), "too little to matter"
    assert not is_steady(even, [*even[:3], 1.5, 1.6], 0.1), "two disturbed runs"
    scattered = [1.0, 2.0, 0.5, 1.5, 3.0]
    assert not is_steady(scattered, [one + 0.3 for one in scattered], 0.1), "noise is larger"
