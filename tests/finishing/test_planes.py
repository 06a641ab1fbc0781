"""Masks grown and worn off are looked at where they are, and are those of the whole picture."""

import numpy as np
import pytest

from hyimg_cli.finishing.planes import deeper, distance_to, within


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
