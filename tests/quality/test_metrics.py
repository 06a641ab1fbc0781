"""Distances against sums written out by hand."""

import json
import math

import numpy as np
import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.quality import metrics
from hyimg_cli.quality.metrics import Distance, distance


def noise(height: int = 24, width: int = 32, seed: int = 0) -> metrics.Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_equal_pictures_are_at_no_distance() -> None:
    found = distance(noise(), noise())
    assert found == Distance(math.inf, 1.0, 0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["psnr"] == "inf"
    assert Distance.from_json(found.to_json() | {"name": "x"}) == found


def test_distances_are_those_of_the_sums() -> None:
    a, b = noise(), noise(seed=1)
    levels = np.abs(a.astype(int) - b.astype(int))
    found = distance(a, b)
    assert found.psnr == pytest.approx(10 * math.log10(255**2 / np.mean(levels**2.0)))
    assert found.max_abs == levels.max()
    shares = (found.equal_share, found.within_5, found.within_10, found.within_20, found.within_50)
    assert shares == tuple(np.mean(levels <= most) for most in (0, 5, 10, 20, 50))
    assert distance(b, a) == found
    assert metrics.error_of_psnr(found.psnr) == pytest.approx(np.mean(levels**2.0))


def test_differences_do_not_wrap_around() -> None:
    a, b = np.zeros((16, 16, 3), np.uint8), np.full((16, 16, 3), 255, np.uint8)
    assert distance(a, b).max_abs == 255
    assert distance(a, b).psnr == pytest.approx(0.0, abs=1e-12)
    assert metrics.share_within(a, b, 254) == 0.0


def test_ssim_is_that_of_the_paper() -> None:
    """One channel at one place, by the formula; the picture is just one window large."""
    a, b = noise(11, 11), noise(11, 11, seed=1)
    steps = np.arange(-5, 6)
    line = np.exp(-(steps**2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    expected = []
    for channel in range(3):
        x, y = a[..., channel].astype(float), b[..., channel].astype(float)
        mean_x, mean_y = (window * x).sum(), (window * y).sum()
        var_x, var_y = (window * x**2).sum() - mean_x**2, (window * y**2).sum() - mean_y**2
        covariance = (window * x * y).sum() - mean_x * mean_y
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
        expected.append(above / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)))
    assert metrics.ssim(a, b) == pytest.approx(np.mean(expected), abs=1e-9)


def test_a_picture_below_the_window_has_no_ssim() -> None:
    assert distance(noise(10, 64), noise(10, 64)).ssim is None
    with pytest.raises(UsageError, match="11 pixels"):
        metrics.ssim(noise(10, 64), noise(10, 64))


@pytest.mark.parametrize(
    "measure", [distance, metrics.psnr, metrics.ssim, metrics.max_abs, metrics.level_differences]
)
def test_another_size_is_an_error(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(UsageError, match="32x24 and 24x32"):
        measure(noise(24, 32), noise(32, 24))
