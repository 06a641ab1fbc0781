"""A new background says what to look at: hair, glass, shadows, and a product without detail."""

import numpy as np
import pytest
from simulated_backgrounds import background, restyle

from hyimg_cli.finishing.doubts import background_doubts
from hyimg_cli.finishing.outside import edit_of
from hyimg_cli.finishing.placement import Placement

SIDE, SOURCE_SIDE = 352, 484
# What a doubt says, by the trait of the background. A cutout has an outline in its source, too.
SAID = {
    "": "",
    "cutout": "",
    "hair": "hair and glass",
    "glass": "hair and glass",
    "shadow": "a shadow",
    "flat": "without detail",
}


def doubts(seed: int, trait: str, backdrop: str, source_side: int, side: int) -> tuple[str, ...]:
    rng = np.random.default_rng(seed)
    one = background(rng, "noise", backdrop, 0.3, source_side, side, soft=3, trait=trait)
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    edit = edit_of(one.drawn, one.reference, place)
    assert edit.kind == ("global" if trait == "flat" else "background")
    return background_doubts(edit, one.drawn)


@pytest.mark.parametrize(
    "trait",
    ["hair", "flat", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("", "shadow"))],
)
def test_a_small_new_background_says_what_to_look_at(trait: str) -> None:
    check(trait, doubts(5, trait, "white", 192, 192))


@pytest.mark.thorough
@pytest.mark.parametrize("backdrop", ["white", "gradient"])
@pytest.mark.parametrize("trait", SAID)
def test_a_new_background_says_what_to_look_at(trait: str, backdrop: str) -> None:
    check(trait, doubts(77, trait, backdrop, SOURCE_SIDE, SIDE))


def check(trait: str, said: tuple[str, ...]) -> None:
    if SAID[trait]:
        assert any(SAID[trait] in one for one in said), said
        # Glass is darker than a plain background, too, which is no second doubt.
        assert trait != "glass" or len(said) == 1, said
    else:
        assert said == ()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["sepia", "edges", "other"])
def test_a_restyle_has_no_flat_part_that_should_stay(how: str) -> None:
    one = restyle(np.random.default_rng(8), how, SOURCE_SIDE, SIDE)
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    assert background_doubts(edit_of(one.drawn, one.reference, place), one.drawn) == ()
