"""A crop of a photograph goes back to where it was."""

import numpy as np
import pytest

from hyimg_cli.finishing.placement import Placement, mapped_back
from hyimg_cli.media.images import SourceImage
from hyimg_cli.spec.job import Size, View

SIZE = (240, 320)


def waves() -> np.ndarray:
    """Waves along both axes, long enough to be drawn."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    levels = 127 + 60 * np.sin(2 * np.pi * x / 24) + 60 * np.sin(2 * np.pi * y / 28)
    return np.repeat(levels.round().astype(np.uint8)[..., None], 3, axis=2)


@pytest.mark.parametrize(
    ("crop", "drawn"),
    [
        ((40, 30, 200, 158), Size(128, 160)),
        ((0, 0, 160, 128), Size(64, 80)),
        ((217, 101, 320, 240), Size(160, 128)),
        ((41, 33, 140, 133), Size(96, 160)),
        ((10, 10, 74, 60), Size(200, 256)),
    ],
)
def test_what_is_seen_comes_back_to_its_place(crop: tuple[int, int, int, int], drawn: Size) -> None:
    source = waves()
    shown = SourceImage(source, "a", ()).seen_as(View("a.png", crop, drawn))
    assert shown.pixels.shape == (drawn.height, drawn.width, 3)
    place = Placement.cropped(SIZE, crop, shown.pixels.shape[:2])
    left, top, right, bottom = crop
    assert (place.x.window, place.y.window) == ((left, right), (top, bottom))
    back = mapped_back(shown.pixels, place, (top, bottom), (left, right))
    own = source[top:bottom, left:right]
    if drawn == Size(bottom - top, right - left):
        assert np.array_equal(back, own)
    for axis in (0, 1):
        slope = np.gradient(own[..., 0].astype(float), axis=axis)
        apart = (back[..., 0].astype(float) - own[..., 0]) * slope
        assert abs(apart[8:-8, 8:-8].sum() / (slope[8:-8, 8:-8] ** 2).sum()) < 0.005


def test_views_of_one_picture_are_other_pictures_of_the_same_file() -> None:
    source = SourceImage(waves(), "a", (), sha256="b")
    whole, *parts = (
        source.seen_as(view)
        for view in (
            View("a.png"),
            View("a.png", (0, 0, 100, 100), Size(64, 64)),
            View("a.png", (1, 0, 101, 100), Size(64, 64)),
            View("a.png", (0, 0, 100, 100), Size(64, 80)),
        )
    )
    assert whole == source
    assert len({one.digest for one in (whole, *parts)}) == 4
    assert {one.digests for one in parts} == {source.digests}
    assert len({one.stretched().digest for one in (whole, *parts)}) == 4
