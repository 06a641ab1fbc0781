"""Distances against sums written out by hand."""

import math

import numpy as np
import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.quality import metrics
from hyimg_cli.quality.metrics import PIXEL_METRICS, number_to_json


def noise(height: int = 24, width: int = 32, seed: int = 0) -> metrics.Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def distance(a: metrics.Pixels, b: metrics.Pixels) -> metrics.Distance:
    return metrics.distance(a, b, PIXEL_METRICS.values())


def test_equal_pictures_are_at_no_distance() -> None:
    found = distance(noise(), noise())
    shares = dict.fromkeys(metrics.SHARES, 1.0)
    assert found == {"psnr": math.inf, "ssim": 1.0, "cosine": 1.0, "max_abs": 0, **shares}
    assert number_to_json(found["psnr"]) == "inf"


def test_distances_are_those_of_the_sums() -> None:
    a, b = noise(), noise(seed=1)
    levels = np.abs(a.astype(int) - b.astype(int))
    found = distance(a, b)
    assert found["psnr"] == pytest.approx(10 * math.log10(255**2 / np.mean(levels**2.0)))
    assert found["max_abs"] == levels.max()
    shares = [found[name] for name in ("equal_share", *(f"within_{n}" for n in (5, 10, 20, 50)))]
    assert shares == [np.mean(levels <= most) for most in (0, 5, 10, 20, 50)]
    assert distance(b, a) == found
    assert metrics.error_of_psnr(metrics.psnr(a, b)) == pytest.approx(np.mean(levels**2.0))


def test_differences_do_not_wrap_around() -> None:
    a, b = np.zeros((16, 16, 3), np.uint8), np.full((16, 16, 3), 255, np.uint8)
    assert metrics.max_abs(a, b) == 255
    assert metrics.psnr(a, b) == pytest.approx(0.0, abs=1e-12)
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
    assert distance(noise(10, 64), noise(10, 64))["ssim"] is None
    with pytest.raises(UsageError, match="11 pixels"):
        metrics.ssim(noise(10, 64), noise(10, 64))


@pytest.mark.parametrize(
    "measure", [distance, metrics.psnr, metrics.ssim, metrics.max_abs, metrics.level_differences]
)
def test_another_size_is_an_error(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(UsageError, match="32x24 and 24x32"):
        measure(noise(24, 32), noise(32, 24))


def test_cosine_is_exactly_1_for_equal_pictures_and_0_beside_a_black_one() -> None:
    picture = np.random.default_rng(3).integers(0, 256, (31, 17, 3), dtype=np.uint8)
    black = np.zeros_like(picture)
    cosine = PIXEL_METRICS["cosine"].measure
    assert (cosine(picture, picture), cosine(black, black)) == (1.0, 1.0)
    assert cosine(picture, black) == 0.0
    assert 0.4 < cosine(picture, 255 - picture) < 0.6, "values of noise"
