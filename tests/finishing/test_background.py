"""A new background leaves its subject as it is: the minority stays."""

from functools import cache

import numpy as np
import pytest
from scipy import ndimage
from simulated_backgrounds import background, restyle
from simulated_edits import fitted, photograph

from hyimg_cli.finishing.composite import Bytes
from hyimg_cli.finishing.halo import halo_doubts, halo_of
from hyimg_cli.finishing.outside import Edit, Result, edit_of, put_back
from hyimg_cli.finishing.placement import Placement

SIDE = 192
Drawing = tuple[np.ndarray, np.ndarray, np.ndarray]


@cache
def before_white(share: float, is_redrawn: bool, photo: str = "astronaut.png") -> Drawing:
    """An ellipse of a photograph before white, perfect or redrawn; its opacity."""
    source = fitted(photograph(photo), (SIDE, SIDE))
    y, x = (np.mgrid[:SIDE, :SIDE] + 0.5) / SIDE - 0.5
    inside = np.hypot(y / 1.1, x / 0.9) < np.sqrt(share / np.pi)
    alpha = ndimage.gaussian_filter(inside.astype(float), 0.6)
    truth = source * alpha[..., None] + 255 * (1 - alpha[..., None])
    if is_redrawn:
        truth = ndimage.gaussian_filter(truth, (0.5, 0.5, 0)) * (1.01, 1, 0.99)
        truth = np.roll(truth, 1, axis=1)
        truth += np.random.default_rng(1).normal(0, 1.5, truth.shape)
    return source, np.clip(np.round(truth), 0, 255).astype(np.uint8), alpha


def compared(
    source: np.ndarray, drawn: np.ndarray, given: Bytes | None = None
) -> tuple[Edit, Result]:
    edit = edit_of(
        drawn, source, Placement.stretched(source.shape[:2], drawn.shape[:2]), given=given
    )
    return edit, put_back(source, drawn, source, edit, given)


def inner(alpha: np.ndarray) -> np.ndarray:
    """What is three pixels and more within a subject."""
    return np.asarray(ndimage.distance_transform_edt(alpha > 0.999) > 3)


@pytest.mark.parametrize(
    ("share", "is_redrawn"),
    [
        (0.14, True),
        (0.57, False),
        *(
            pytest.param(share, is_redrawn, marks=pytest.mark.thorough)
            for share, is_redrawn in ((0.14, False), (0.33, False), (0.33, True), (0.57, True))
        ),
    ],
)
def test_the_subject_before_a_new_background_is_the_sources(share: float, is_redrawn: bool) -> None:
    source, drawn, alpha = before_white(share, is_redrawn)
    edit, result = compared(source, drawn)
    assert (edit.kind, edit.reasons) == ("background", ())
    assert edit.mask.mean() == pytest.approx(1 - share, abs=0.04)
    kept = inner(alpha)
    assert np.array_equal(result.pixels[kept], source[kept])
    # Some of the old background is as white as the new one.
    replaced = alpha < 0.01
    assert (result.matte[replaced] > 0).mean() > 0.97
    assert np.abs(result.pixels[replaced].astype(int) - 255).mean() < 2
    is_shifted = edit.motion.shift[1] == pytest.approx(1, abs=0.15)
    assert is_shifted == is_redrawn


def test_a_restyled_picture_has_no_part_that_stays() -> None:
    one = restyle(np.random.default_rng(3), "tinted", SIDE, SIDE)
    edit, result = compared(one.source, one.drawn)
    assert edit.kind == "global"
    assert edit.reasons
    assert result.matte.min() == 255


@pytest.mark.thorough
def test_black_in_a_drawing_of_edges_is_no_part_that_stays() -> None:
    rng = np.random.default_rng(77)
    *_, one = [restyle(rng, "edges", 484, 352) for _ in range(5)]
    edit, _ = compared(one.reference, one.drawn)
    assert edit.kind == "global"


@pytest.mark.thorough
@pytest.mark.parametrize(("glow", "is_told"), [(0.0, False), (30.0, True), (-30.0, True)])
def test_a_glow_along_the_subject_is_told(glow: float, is_told: bool) -> None:
    rng = np.random.default_rng(902)
    one = background(rng, "noise", "gradient", 0.3, 484, 352, glow=glow)
    edit, _ = compared(one.reference, one.drawn)
    halo = halo_of(edit)
    assert halo is not None
    assert bool(halo_doubts(halo)) is is_told


@pytest.mark.thorough
def test_two_parts_with_soft_borders_stay_before_another_photograph() -> None:
    one = background(np.random.default_rng(6), "two", "photograph", 0.4, SIDE, SIDE, soft=2)
    edit, result = compared(one.source, one.drawn)
    assert edit.kind == "background"
    kept = inner(one.subject)
    assert (result.pixels == one.source).all(axis=2)[kept].mean() > 0.99


def test_a_region_that_leaves_out_a_part_is_compared_by_that_part() -> None:
    source, drawn, alpha = before_white(0.14, True)
    given = np.where(alpha > 0.5, 0, 255).astype(np.uint8)
    edit, result = compared(source, drawn, given)
    assert (edit.kind, edit.reasons) == ("background", ())
    assert edit.spill == pytest.approx(0, abs=0.02)
    assert edit.motion.shift[1] == pytest.approx(1, abs=0.15)
    assert np.array_equal(result.pixels[given == 0], source[given == 0])
    # What the user keeps was drawn in another style, so nothing is learned from it.
    restyled = restyle(np.random.default_rng(3), "night", SIDE, SIDE)
    edit, result = compared(restyled.source, restyled.drawn, given)
    assert edit.kind == "local"
    assert edit.reasons
    assert np.array_equal(result.pixels[given == 0], restyled.source[given == 0])
