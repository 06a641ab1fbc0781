"""Faster versions of scipy's and numpy's functions: equal results."""

from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from hyimg_cli.finishing import planes
from hyimg_cli.finishing.planes import by_bands, deeper, distance_to, median, range_within, within
from hyimg_cli.finishing.region import _slope, _to_the_border


@pytest.mark.parametrize("part", [0.0, 0.002, 0.1, 0.9, 0.998, 1.0])
@pytest.mark.parametrize("reach", [0.4, 1.0, 3.3, 12.0])
def test_what_is_near_a_mask_and_deep_in_it_is_so_by_the_distances(
    part: float, reach: float
) -> None:
    for shape in ((60, 47), (31, 90), (1, 9)):
        mask = np.random.default_rng(0).random(shape) < part
        mask[shape[0] // 2 :] = False
        assert np.array_equal(within(mask, reach), distance_to(mask) <= reach)
        assert np.array_equal(within(~mask, reach), distance_to(~mask) <= reach)
        assert np.array_equal(deeper(mask, reach), distance_to(~mask) > reach)
        assert np.array_equal(deeper(~mask, reach), distance_to(mask) > reach)


@pytest.mark.parametrize("shape", [(3, 40, 53), (2, 3, 2), (1, 1, 7)])
@pytest.mark.parametrize("reach", [1, 2])
def test_the_range_around_a_pixel_is_that_of_filters(shape: tuple[int, ...], reach: int) -> None:
    plane = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    size = (1, 2 * reach + 1, 2 * reach + 1)
    low, high = range_within(plane, reach)
    assert np.array_equal(low, ndimage.minimum_filter(plane, size, mode="nearest"))
    assert np.array_equal(high, ndimage.maximum_filter(plane, size, mode="nearest"))
    wider = range_within(plane, reach, 0.25)
    assert np.allclose(wider[1] - wider[0], 1.5 * (high - low))


@pytest.mark.parametrize("band", [1, 20, 10**6])
def test_bands_of_rows_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, band: int
) -> None:
    plane = np.random.default_rng(0).normal(size=(3, 41, 20)).astype(np.float32)
    whole, (low, high) = _slope(plane), range_within(plane, 2)
    monkeypatch.setattr(planes, "_BAND", band)
    assert np.array_equal(by_bands(_slope, plane, reach=1), whole)
    assert np.array_equal(range_within(plane, 2), (low, high))
    assert np.array_equal(by_bands(np.add, plane, plane), plane + plane)


@pytest.mark.parametrize("size", [1, 2, 101, 1000, 20_001, 65_536])
@pytest.mark.parametrize("digits", [0, 8])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_median_is_numpys(size: int, digits: int, kind: type[np.floating[Any]]) -> None:
    rng = np.random.default_rng(size)
    values = rng.laplace(0, 3, size).round(digits).astype(kind)
    for some in (values, np.abs(values), np.sort(values), np.where(values < 0, 0, values)):
        assert median(some) == np.median(some)


def test_a_median_far_from_that_of_a_sample_is_found() -> None:
    # Each value that a sample may take is the least.
    values = np.arange(1 << 16, dtype=np.float32)
    values[::16] = -1
    assert median(values) == np.median(values)


def test_an_edit_is_extended_from_the_nearest_pixel_that_was_drawn() -> None:
    random = np.random.default_rng(0)
    mask, valid = random.random((30, 40)) < 0.5, np.zeros((30, 40), bool)
    valid[3:24, 5:38] = True
    _, (y, x) = ndimage.distance_transform_edt(~valid, return_indices=True)
    assert np.array_equal(_to_the_border(mask, valid), mask[y, x])
    assert _to_the_border(mask, np.zeros_like(valid)) is mask
