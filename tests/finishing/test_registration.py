"""Registration of pictures that hardly show a shift: the redraw stays in place."""

import numpy as np
import pytest
from scipy import ndimage

from hyimg_cli.finishing.registration import Motion, registered

SHAPE = (256, 320)
Y, X = np.mgrid[: SHAPE[0], : SHAPE[1]] + 0.5
BY = (0.8, -1.3)


def disc(centre: tuple[int, int], radius: float) -> np.ndarray:
    return np.clip(radius - np.hypot(Y - centre[0], X - centre[1]) + 0.5, 0, 1)


def redrawn(levels: np.ndarray, by: tuple[float, float] = BY) -> np.ndarray:
    """Moved by so much down and right, softer, and with a grain of its own."""
    moved = ndimage.shift(levels, by, order=3, mode="nearest")
    grain = ndimage.gaussian_filter(np.random.default_rng(7).normal(size=SHAPE), 0.8)
    return ndimage.gaussian_filter(moved, 0.5) + 1.5 * grain / grain.std()


def middle(motion: Motion) -> list[float]:
    """How far the middle of the picture moved."""
    return [
        (zoom - 1) * side / 2 + shift
        for zoom, shift, side in zip(motion.zoom, motion.shift, SHAPE, strict=True)
    ]


FLAT = np.full(SHAPE, 170.0)
EDIT = disc((150, 200), 40) * 120


@pytest.mark.parametrize("own", [FLAT, 20 + X * 0.7, FLAT + ndimage.gaussian_filter(FLAT, 9)])
@pytest.mark.parametrize("edit", [EDIT, EDIT * 0])
def test_a_picture_without_structure_stays_in_place(own: np.ndarray, edit: np.ndarray) -> None:
    """Noise has slopes of its own, and the edit is none of the source's."""
    own = own + np.random.default_rng(1).normal(0, 0.6, SHAPE)
    for without in (None, edit > 0):
        motion = registered(own, redrawn(own - edit), without)
        assert motion == Motion()
        assert not motion.is_sure


@pytest.mark.parametrize("axis", [0, 1])
def test_stripes_say_nothing_of_a_shift_along_them(axis: int) -> None:
    own = 128 + 80 * np.sign(np.sin((Y, X)[axis] * 2 * np.pi / 40))
    motion = registered(own, redrawn(own - EDIT), EDIT > 0)
    assert motion.zoom == pytest.approx((1, 1), abs=2e-3)
    assert middle(motion)[1 - axis] == pytest.approx(0, abs=0.05)
    assert middle(motion)[axis] == pytest.approx(BY[axis], abs=0.15)
    assert not motion.is_sure


@pytest.mark.parametrize("period", [9, 16])
def test_of_the_places_where_a_pattern_fits_the_nearest_counts(period: int) -> None:
    own = 128 + 60 * np.sin(X * 2 * np.pi / period) * np.sin(Y * 2 * np.pi / period)
    motion = registered(own, redrawn(own))
    assert motion.zoom == pytest.approx((1, 1), abs=2e-3)
    assert middle(motion) == pytest.approx(BY, abs=0.2)


@pytest.mark.parametrize("by", [BY, (-3.1, -2.2)])
def test_a_mark_in_one_corner_is_a_shift_and_no_zoom(by: tuple[float, float]) -> None:
    own = 255 - disc((60, 70), 24) * 200 + disc((60, 76), 9) * 150
    motion = registered(own, redrawn(own - EDIT, by), EDIT > 0)
    assert motion.zoom == pytest.approx((1, 1), abs=2e-3)
    assert middle(motion) == pytest.approx(by, abs=0.25)


def test_a_thing_that_is_all_there_is_was_moved_and_drifted_no_further_than_models_do() -> None:
    far = registered(FLAT - EDIT, redrawn(FLAT - EDIT, (4, 6)))
    assert far == Motion()
    near = registered(FLAT - EDIT, redrawn(FLAT - EDIT, BY))
    assert middle(near) == pytest.approx(BY, abs=0.3)
    assert near.is_sure


def test_a_line_of_text_on_a_page_is_held_to_without_an_edit() -> None:
    own = np.full(SHAPE, 255.0)
    own[40:54, 30:280] -= 200 * (np.random.default_rng(2).random((14, 250)) > 0.6)
    own = ndimage.gaussian_filter(own, 0.7)
    motion = registered(own, redrawn(own, (1.2, 2.4)))
    at = [
        (zoom - 1) * p + s for zoom, p, s in zip(motion.zoom, (47, 155), motion.shift, strict=True)
    ]
    assert at == pytest.approx((1.2, 2.4), abs=0.3)
