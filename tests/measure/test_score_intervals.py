"""Intervals hold the truth as often as they say, by simulation; the judge is a stand-in.

A picture has a true quality, its two marks are whole numbers with noise of their own, and its score
is the root of their product: as the judges of edit benchmarks give it.
"""

from collections.abc import Callable

import numpy as np
import pytest

from hyimg_cli.measure.scores.intervals import (
    Floats,
    Samples,
    difference,
    estimate,
    limit_of_two_runs,
)

RUNS, NOISE = 400, 1.5
Rng = np.random.Generator


def qualities(rng: Rng, count: int) -> Floats:
    """True marks [S, 2]; 15 % of the edits failed."""
    marks = np.clip(rng.normal((7.5, 7.0), 1.3, (count, 2)), 0, 10)
    marks[rng.random(count) < 0.15, 0] = 1.0
    return marks


def judged(rng: Rng, marks: Floats, repeats: int) -> Floats:
    """Scores [S, R] of a judge with noise."""
    shape = (len(marks), repeats, 2)
    seen = np.clip(np.rint(marks[:, None] + rng.normal(0, NOISE, shape)), 0, 10)
    return np.sqrt(seen.prod(2))


def expected(rng: Rng, marks: Floats) -> Floats:
    return judged(rng, marks, 2000).mean(1)


def alone(values: Floats) -> Samples:
    return Samples(values, [str(n) for n in range(len(values))])


def covered(truth: float, mean: float, half: float | None) -> bool:
    assert half is not None
    return abs(mean - truth) <= half


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_the_interval_of_the_same_list_holds_its_mean(repeats: int) -> None:
    rng = np.random.default_rng(repeats)
    marks = qualities(rng, 606)
    truth = float(expected(rng, marks).mean())
    held = 0
    for _ in range(RUNS):
        found = estimate(alone(judged(rng, marks, repeats)))
        assert found is not None
        held += covered(truth, found.mean, found.same_list)
    assert 0.93 <= held / RUNS <= 0.97


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
def test_the_interval_of_new_pictures_holds_the_mean_of_all(repeats: int) -> None:
    rng = np.random.default_rng(10 + repeats)
    truth = float(judged(rng, qualities(rng, 400_000), 1).mean())
    held = 0
    for _ in range(RUNS):
        found = estimate(alone(judged(rng, qualities(rng, 606), repeats)))
        assert found is not None
        held += covered(truth, found.mean, found.new_pictures)
    assert 0.93 <= held / RUNS <= 0.97


def two_languages(rng: Rng, pictures: int) -> tuple[Floats, list[str]]:
    """Marks of each picture in two languages, alike but not equal, and the pictures' labels."""
    marks = qualities(rng, pictures)
    both = np.concatenate([np.clip(marks + rng.normal(0, 0.5, marks.shape), 0, 10)] * 2)
    return both, [str(n) for n in range(pictures)] * 2


def test_two_languages_of_a_picture_are_one_picture() -> None:
    rng = np.random.default_rng(21)
    truth = float(judged(rng, two_languages(rng, 200_000)[0], 1).mean())
    held = held_by_row = 0
    for _ in range(RUNS):
        marks, labels = two_languages(rng, 606)
        values = judged(rng, marks, 1)
        by_picture, by_row = estimate(Samples(values, labels)), estimate(alone(values))
        assert by_picture is not None
        assert by_row is not None
        held += covered(truth, by_picture.mean, by_picture.new_pictures)
        held_by_row += covered(truth, by_row.mean, by_row.new_pictures)
    assert 0.93 <= held / RUNS <= 0.97
    # What the labels are for.
    assert held_by_row / RUNS < 0.92


@pytest.mark.parametrize("pictures", [8, 30])
def test_few_pictures_give_wider_intervals_that_hold(pictures: int) -> None:
    rng = np.random.default_rng(31)
    truth = float(rng.normal(6, 1, 10).mean())
    held = held_list = 0
    for _ in range(RUNS):
        own = truth + rng.normal(0, 1.0, pictures)
        found = estimate(alone(own[:, None] + rng.normal(0, 0.7, (pictures, 2))))
        assert found is not None
        held += covered(truth, found.mean, found.new_pictures)
        held_list += covered(float(own.mean()), found.mean, found.same_list)
    assert 0.93 <= held / RUNS <= 0.97
    assert 0.93 <= held_list / RUNS <= 0.97


def test_a_mean_over_groups_has_their_weights() -> None:
    rng = np.random.default_rng(41)
    groups = ["add"] * 40 + ["text"] * 99
    centre = np.array([5.0] * 40 + [8.0] * 99)
    held = held_list = 0
    for _ in range(RUNS):
        own = centre + rng.normal(0, 1.0, 139)
        values = own[:, None] + rng.normal(0, 0.7, (139, 3))
        found = estimate(Samples(values, [str(n) for n in range(139)], groups))
        assert found is not None
        held += covered(6.5, found.mean, found.new_pictures)
        macro = (own[:40].mean() + own[40:].mean()) / 2
        held_list += covered(float(macro), found.mean, found.same_list)
    assert 0.93 <= held / RUNS <= 0.97
    assert 0.93 <= held_list / RUNS <= 0.97


@pytest.mark.parametrize(("own", "other"), [(2, 2), (3, 1), (3, 3)])
def test_two_honest_runs_are_within_their_limit_and_a_shift_is_not(own: int, other: int) -> None:
    rng = np.random.default_rng(own * 10 + other)
    marks = qualities(rng, 606)
    false_alarms = found = 0
    for _ in range(RUNS):
        values, claim = judged(rng, marks, own), float(judged(rng, marks, other).mean())
        limit, mean = limit_of_two_runs(alone(values), other), float(values.mean())
        assert limit is not None
        false_alarms += abs(mean - claim) > limit
        found += abs(mean - claim - 0.3) > limit
    assert false_alarms / RUNS <= 0.07
    assert found / RUNS >= 0.95


def test_paired_differences_hold_and_are_narrower_than_unpaired_ones() -> None:
    rng = np.random.default_rng(51)
    held, widths = 0, []
    for _ in range(RUNS):
        own = rng.normal(6, 1.5, 200)
        pair = [
            Samples(
                (own + shift)[:, None] + rng.normal(0, 0.7, (200, 2)), [str(n) for n in range(200)]
            )
            for shift in (0.2 + rng.normal(0, 0.4, 200), np.zeros(200))
        ]
        found, first = difference(*pair), estimate(pair[0])
        assert found is not None
        assert first is not None
        held += covered(0.2, found.mean, found.new_pictures)
        widths.append((found.new_pictures or 0) / (first.new_pictures or 1))
    assert 0.93 <= held / RUNS <= 0.97
    assert np.mean(widths) < 0.65


def test_the_share_of_noise_is_the_judges_part() -> None:
    rng = np.random.default_rng(61)
    values = rng.normal(6, 1.0, 5000)[:, None] + rng.normal(0, 2.0, (5000, 4))
    found = estimate(alone(values))
    assert found is not None
    # One picture in four parts of noise, each averaged over four scores: half of the variance.
    assert found.noise_share == pytest.approx(0.5, abs=0.03)


def test_what_cannot_be_known_is_none() -> None:
    once = estimate(alone(np.array([[5.0], [6.0], [7.0]])))
    assert once is not None
    assert (once.same_list, once.noise_share, once.mean) == (None, None, 6.0)
    one = estimate(alone(np.array([[5.0, 6.0]])))
    assert one is not None
    assert one.new_pictures is None
    assert one.same_list is not None
    assert estimate(alone(np.array([[np.nan, np.nan]]))) is None
    # A judge that never differs: no noise was seen, which is said.
    same = estimate(alone(np.array([[5.0, 5.0], [6.0, 6.0]])))
    assert same is not None
    assert (same.same_list, same.is_constant) == (0.0, True)


def test_equal_runs_differ_by_nothing_and_missing_values_are_left_out() -> None:
    values = np.array([[5.0, 6.0], [7.0, np.nan], [np.nan, np.nan], [4.0, 4.5]])
    same = difference(alone(values), alone(values))
    assert same is not None
    assert (same.mean, same.samples, same.is_told_apart) == (0.0, 3, False)
    found = estimate(alone(values))
    assert found is not None
    assert found.mean == pytest.approx((5.5 + 7 + 4.25) / 3)
    worst = estimate(alone(values).with_missing_as(0.0))
    assert worst is not None
    assert worst.mean == pytest.approx((5.5 + 3.5 + 0 + 4.25) / 4)


def test_resampling_pictures_gives_the_same_width(bootstrap: Callable[..., float]) -> None:
    rng = np.random.default_rng(71)
    marks, labels = two_languages(rng, 300)
    values = judged(rng, marks, 2)
    found = estimate(Samples(values, labels))
    assert found is not None
    assert found.new_pictures == pytest.approx(bootstrap(rng, values.mean(1), labels), rel=0.06)


@pytest.fixture
def bootstrap() -> Callable[..., float]:
    """Half the width of a percentile bootstrap over pictures."""

    def half(rng: Rng, values: Floats, labels: list[str]) -> float:
        _, picture = np.unique(np.asarray(labels), return_inverse=True)
        sums, counts = np.bincount(picture, values), np.bincount(picture)
        draws = rng.integers(len(sums), size=(4000, len(sums)))
        means = sums[draws].sum(1) / counts[draws].sum(1)
        low, high = np.percentile(means, (2.5, 97.5))
        return float(high - low) / 2

    return half
