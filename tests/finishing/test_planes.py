"""Faster versions of scipy's functions: equal results."""

import numpy as np
import pytest
from scipy import ndimage

from hyimg_cli.finishing.planes import deeper, distance_to, range_within, within


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
