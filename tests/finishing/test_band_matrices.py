"""Filters as products with band matrices, against the loops of scipy and Pillow."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from hyimg_cli.finishing.planes import blurred
from hyimg_cli.finishing.registration import Motion

# What float32 rounds of levels up to 255.
CLOSE = 3e-4


@pytest.mark.parametrize("shape", [(70, 131), (3, 64, 65), (1, 200), (2, 130, 3), (7, 5)])
@pytest.mark.parametrize("sigma", [0.5, 1.5, 8.0, 32.0])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_blur_is_scipys(
    shape: tuple[int, ...], sigma: float, kind: type[np.floating[Any]]
) -> None:
    """Also if the picture is smaller than what is seen around a pixel."""
    array = np.random.default_rng(1).uniform(0, 255, shape).astype(kind)
    sigmas = (*(0.0 for _ in shape[:-2]), sigma, sigma)
    expected = ndimage.gaussian_filter(array, sigmas, mode="nearest", truncate=3.0)
    found = blurred(array, sigma)
    assert found.dtype == kind
    assert np.abs(found - expected).max() < CLOSE


@pytest.mark.parametrize(
    "motion",
    [
        Motion((1.01, 0.997), (3.2, -1.7)),
        Motion((0.98, 1.02), (-7.3, 9.9)),
        Motion((1.0, 1.0), (0.5, -0.25)),
        Motion((1.0, 1.0), (1.0, 0.0)),
    ],
)
@pytest.mark.parametrize("shape", [(3, 66, 130), (37, 61), (5, 4)])
def test_a_motion_is_pillows(motion: Motion, shape: tuple[int, ...]) -> None:
    """Beyond the border are the border's pixels, which Pillow has to be given."""
    planes = np.random.default_rng(2).uniform(0, 255, shape).astype(np.float32)
    (zoom_y, zoom_x), (y, x), pad = motion.zoom, motion.shift, 16
    how = (zoom_x, 0, x + pad, 0, zoom_y, y + pad)
    size = shape[-1], shape[-2]
    expected = [
        np.asarray(
            Image.fromarray(np.pad(plane, pad, mode="edge")).transform(
                size, Image.Transform.AFFINE, how, Image.Resampling.BICUBIC
            )
        )
        for plane in planes.reshape(-1, *shape[-2:])
    ]
    found = motion.applied(planes)
    assert found.dtype == np.float32
    assert np.abs(found - np.reshape(expected, shape)).max() < CLOSE


def test_no_motion_changes_nothing() -> None:
    planes = np.random.default_rng(3).uniform(0, 255, (3, 9, 9)).astype(np.float32)
    assert Motion().applied(planes) is planes
