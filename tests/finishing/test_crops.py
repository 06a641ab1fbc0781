"""The part of a photograph that is drawn for an edit of a region: of its rule, all that is said."""

import math
import random
from collections.abc import Iterator

import pytest
from conftest import thorough_but

from hyimg_cli.finishing.crops import crop_of
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import Box

# Sizes of a few models, by the ways in which they differ: fine steps, coarse ones, one alone.
_FINE = [Size(rows * 16, round(4096 / rows) * 16) for rows in range(46, 92)]
_COARSE = [Size(1024, 1024), Size(768, 1024), Size(1024, 768), Size(576, 1024), Size(1024, 576)]
_KONTEXT = [Size(b, a) for a, b in KINDS["FluxKontextPipeline"].fitted_sizes]
SIZES = {"fine": _FINE, "coarse": _COARSE, "Kontext's": _KONTEXT, "one": [Size(64, 64)]}
PHOTO = Size(3000, 4000)


def cases(count: int, seed: int) -> Iterator[tuple[Box, Size]]:
    """Boxes of 1x1 to the whole in photographs of 200 to 12,000 pixels."""
    numbers = random.Random(seed)
    while count:
        width, height = (round(math.exp(numbers.uniform(5.3, 9.4))) for _ in "xy")
        if not 1 / 3 < width / height < 3:
            continue
        wide, high = (
            max(1, round(side * math.exp(numbers.uniform(-9, 0)))) for side in (width, height)
        )
        left, top = numbers.randint(0, width - wide), numbers.randint(0, height - high)
        yield (left, top, left + wide, top + high), Size(height, width)
        count -= 1


@pytest.mark.parametrize("count", thorough_but([500], [500, 10_000]))
@pytest.mark.parametrize("name", SIZES)
def test_a_crop_contains_its_region_and_is_not_stretched(name: str, count: int) -> None:
    sizes, whole = SIZES[name], 0
    for region, source in cases(count, seed=count):
        crop = crop_of(region, source, sizes)
        if crop is None:
            whole += 1
            continue
        left, top, right, bottom = crop.box
        assert 0 <= left <= region[0] < region[2] <= right <= source.width
        assert 0 <= top <= region[1] < region[3] <= bottom <= source.height
        assert crop.drawn in sizes
        width, height = right - left, bottom - top
        assert crop.scale == pytest.approx(
            math.sqrt(width * height / crop.drawn.width / crop.drawn.height)
        )
        if width == source.width or height == source.height:
            continue
        # Both axes have one scale, exactly; there is room around the region, and more of it than
        # of the region.
        assert width * crop.drawn.height == height * crop.drawn.width
        assert width * height >= 2 * (region[2] - region[0]) * (region[3] - region[1])
        # No more than four times enlarged, if the photograph has so many pixels.
        one = math.gcd(crop.drawn.width, crop.drawn.height)
        larger = (width + crop.drawn.width // one, height + crop.drawn.height // one)
        assert crop.scale >= 0.25 or larger[0] > source.width or larger[1] > source.height
    assert whole < count / 10


@pytest.mark.parametrize(
    ("region", "width", "height", "scale"),
    [
        ((1200, 1000, 2000, 1600), 1152, 928, 1.0),  # less context, so that nothing is resampled
        ((1900, 1400, 1990, 1460), 264, 248, 0.25),  # more, so that it is not enlarged further
        ((1900, 1400, 2300, 1700), 825, 775, 0.78),  # a half on each side
        ((100, 2000, 1100, 2040), 1440, 736, 1.0),  # a line of text
        ((0, 0, 90, 60), 264, 248, 0.25),  # in a corner: moved, not cut
        ((500, 500, 2900, 2100), 3096, 2494, 2.69),  # as much again around it as it has itself
    ],
)
def test_crops_of_a_large_photograph(region: Box, width: int, height: int, scale: float) -> None:
    sizes = [
        *(Size(1024, 1024), Size(992, 1056), Size(928, 1152), Size(736, 1440)),
        *(Size(1056, 992), Size(1152, 928)),
    ]
    crop = crop_of(region, PHOTO, sizes)
    assert crop is not None
    left, top, right, bottom = crop.box
    assert (right - left, bottom - top) == (width, height)
    assert round(crop.scale, 2) == scale


@pytest.mark.parametrize("region", [(0, 0, 4000, 3000), (100, 100, 3900, 2900)])
def test_a_region_of_nearly_everything_is_drawn_as_the_whole(region: Box) -> None:
    assert crop_of(region, PHOTO, _FINE) is None


@pytest.mark.parametrize("context", [0.0, 0.25, 0.5, 1.0, 4.0])
def test_a_context_that_is_given_is_kept(context: float) -> None:
    region = (1500, 1200, 2100, 1500)
    crop = crop_of(region, PHOTO, _FINE, context)
    more = round(600 * context)
    if context == 4:
        assert crop is None
        return
    assert crop is not None
    left, top, right, bottom = crop.box
    assert right - left >= min(PHOTO.width, 600 + 2 * more)
    assert bottom - top >= min(PHOTO.height, 300 + 2 * more)
    # Grown to a shape of the list, not more: by the next whole number of it, and to one to one.
    grown = max((right - left) / (600 + 2 * more), (bottom - top) / (300 + 2 * more))
    assert grown < 2.2


def test_a_region_that_moves_a_little_mostly_keeps_its_crop() -> None:
    """Then the edit is finished again without a model."""
    moved = [crop_of((left, 1000, left + 800, 1600), PHOTO, _FINE) for left in range(1000, 1400)]
    assert len({one.box for one in moved if one}) <= 7
