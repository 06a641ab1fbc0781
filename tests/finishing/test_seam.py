"""The seam of an edit: a cast that was not undone, and a region that cuts the edit off."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from PIL import Image
from simulated_edits import Case, case, fitted, photograph

from hyimg_cli.finishing.outside import Edit, edit_of
from hyimg_cli.finishing.placement import AxisMap, Placement
from hyimg_cli.finishing.planes import opponent
from hyimg_cli.finishing.seam import Seam, seam_of


@cache
def made(kind: str, name: str = "coffee", seed: int = 5) -> Case:
    source = fitted(photograph(f"{name}.png"), (400, 600))
    return case(kind, kind, source, np.random.default_rng(seed), 0.1e6)


def edit(one: Case, box: tuple[int, int, int, int] | None = None, mode: str = "limit") -> Edit:
    given = None
    if box is not None:
        given = np.zeros(one.source.shape[:2], np.uint8)
        given[box[1] : box[3], box[0] : box[2]] = 255
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    return edit_of(one.drawn, one.reference, place, given=given, mode=mode)


def seam(found: Edit) -> Seam:
    measured = seam_of(found)
    assert measured is not None
    return measured


def level(seam: Seam, name: str) -> float:
    value = getattr(seam, name)
    assert value is not None
    return float(value)


def region(one: Case, wider: float) -> tuple[int, int, int, int]:
    """Return the box of an edit, wider by a part of its sides."""
    left, top, right, bottom = Image.fromarray(one.mask).getbbox() or (0, 0, 1, 1)
    x, y = (round(wider * side / 2) for side in (right - left, bottom - top))
    height, width = one.mask.shape
    return max(0, left - x), max(0, top - y), min(width, right + x), min(height, bottom + y)


@cache
def paste() -> Edit:
    return edit(made("paste"))


@pytest.mark.parametrize("levels", [3.0, 5.0])
def test_a_cast_that_was_not_undone_is_measured(levels: float) -> None:
    clean = seam(paste())
    assert level(clean, "cast") < 1.5
    colour = np.array([[[1.0]], [[0.4]], [[0.8]]], np.float32)
    colour *= levels / np.linalg.norm(opponent(colour))
    cast = seam(replace(paste(), drawn=paste().drawn + colour))
    assert level(cast, "cast") == pytest.approx(levels, abs=level(clean, "cast") + 0.1)
    wave = np.where(np.arange(paste().mask.shape[1]) < paste().mask.shape[1] // 2, -1, 1)
    uneven = seam(replace(paste(), drawn=paste().drawn + colour * wave))
    assert level(uneven, "step") > levels - level(clean, "step") > level(uneven, "cast") - 3
    assert level(cast, "own") == level(clean, "own"), "the source's, not the redraw's"


@pytest.mark.parametrize(
    ("side", "mode"),
    [
        (0, "limit"),
        (3, "instead"),
        *(pytest.param(n, "limit", marks=pytest.mark.thorough) for n in (1, 2, 3)),
    ],
)
def test_an_edit_that_goes_on_beyond_its_region_is_told(side: int, mode: str) -> None:
    box, wider = region(made("paste"), 0), [*region(made("paste"), 0.05)]
    sides = [box[2] - box[0], box[3] - box[1]] * 2
    assert not seam(edit(made("paste"), region(made("paste"), 0.05), mode)).doubts
    wider[side] = box[side] + round(sides[side] / 3) * (1 if side < 2 else -1)
    found = seam(edit(made("paste"), tuple(wider), mode))
    assert found.doubts == (f"the edit goes on beyond the region ({found.cut:.0%} of its border)",)
    assert 0.02 < found.cut < 0.5
    assert found.cut_step > 3.5


@pytest.mark.parametrize(
    ("name", "kind", "seed", "wider"),
    [
        ("motorcycle_left", "text", 3, 0.05),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (
                ("motorcycle_left", "text", 3, 0.2),
                ("motorcycle_left", "recolour", 0, 0.05),
                ("coffee", "fill", 0, 0.2),
            )
        ),
    ],
)
def test_the_rim_of_an_edit_and_redrawn_texture_do_not_go_on(
    name: str, kind: str, seed: int, wider: float
) -> None:
    one = made(kind, name, seed)
    found = edit(one, region(one, wider))
    assert found.allowed is not None
    assert (found.found & ~found.allowed).any(), "something is found beyond the region"
    assert seam(found).doubts == ()


def test_around_a_region_of_a_whole_new_picture_everything_counts() -> None:
    found = seam(edit(made("night"), (200, 100, 420, 300)))
    assert level(found, "cast") > 10
    assert (found.cut, found.doubts) == (0.0, ()), "its warning is that of the whole picture"


def test_a_result_that_is_the_source_or_all_new_has_no_seam() -> None:
    assert seam_of(edit(made("none"))) is None
    assert seam_of(replace(paste(), kind="global")) is None


def test_a_region_that_is_the_whole_picture_has_no_border() -> None:
    whole = np.ones_like(paste().mask)
    found = seam(replace(paste(), allowed=whole))
    assert found == seam(paste())
    assert (found.cut, found.cut_step) == (0.0, 0.0)
    assert seam(replace(paste(), allowed=whole, mask=whole)).cast is None


def test_the_area_of_a_crops_edit_is_that_of_the_photograph() -> None:
    one = made("paste")
    (height, width), drawn = one.source.shape[:2], one.drawn.shape
    y, x = (drawn[0] / height, drawn[1] / width)
    around = Placement(
        AxisMap(4 * height, drawn[0], y, 50 * y), AxisMap(5 * width, drawn[1], x, 70 * x)
    )
    given = np.zeros((4 * height, 5 * width), np.uint8)
    given[50 : 50 + height, 70 : 70 + width] = 255
    part = edit_of(one.drawn, one.reference, around, given=given)
    assert part.area == pytest.approx(paste().area / 20)
    assert part.measures == paste().measures, "the verdict is on what was drawn"
    assert part.kind == "local"
    assert not part.doubts
