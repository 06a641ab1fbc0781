"""Which part of a photograph a model sees when it edits one region of it, and in which size.

A photograph has more pixels than a model draws. So only the region is drawn, with enough around it
to see what it belongs to, to register the redraw and to measure its colours. What decides how well
it comes back is the number of source pixels per drawn pixel.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import gcd, isqrt, sqrt

from hyimg_cli.spec.job import MOST_CROPS, Size
from hyimg_cli.spec.options import Box

# Part of the region's longer side that is shown on each of its sides, and the pixels at least.
_CONTEXT, _LEAST = 0.5, 64
# The region fills at most one half of the crop: a redraw is registered by the rest.
_CROP_PER_REGION = 2
# A crop is enlarged at most so many times: beyond it, a model sees no more, and less of the rest.
_ENLARGED = 4
# A crop nearly as large as what is drawn becomes exactly as large: nothing is resampled. In
# percent.
_NEARLY = 92
# A stretch of less is not seen, nor does it matter: both axes have their own scale.
_STRETCH = 0.02
# Parts of a region share a crop if it has at most so many times the source pixels per drawn one.
_MOST_LOSS = 1.3
# A crop begins at a multiple of this part of its side, so a region that moves a little keeps it.
_STEPS = 16


@dataclass(frozen=True)
class Crop:
    """A part of a photograph, and the size in which it is drawn."""

    box: Box
    drawn: Size

    @property
    def scale(self) -> float:
        """Return the source pixels per drawn pixel, along a side."""
        left, top, right, bottom = self.box
        return sqrt((right - left) * (bottom - top) / (self.drawn.width * self.drawn.height))


def crop_of(
    region: Box, source: Size, sizes: Sequence[Size], context: float | None = None
) -> Crop | None:
    """Return the crop in which a region is edited; None for the whole photograph, or no size.

    It contains the region, lies in the photograph, and has the shape of one of the `sizes`, unless
    it needs a whole side of the photograph. `context`: the part of the region's longer side that is
    shown on each side. By default a half, and less of it where the crop would be reduced: down to
    one that the region fills by half.
    """
    best = _best((region,), source, sizes, context) if sizes else None
    return best[0] if best and best[0].box != (0, 0, source.width, source.height) else None


def crops_of(
    parts: Sequence[Box], source: Size, sizes: Sequence[Size], context: float | None = None
) -> tuple[Crop, ...]:
    """Return the crops in which the parts of a region are edited, two at most and of one size.

    Parts whose common crop is nearly as fine as their own share it; the pair that loses the least
    comes first. Empty for the whole photograph, no parts or no size.
    """
    if not (parts and sizes):
        return ()

    @cache
    def scale_of(part: Box) -> float:
        return _best((part,), source, sizes, context)[0].scale

    def loss_of(pair: tuple[Box, Box]) -> tuple[float, float]:
        both = scale_of(around(pair))
        loss = both / min(map(scale_of, pair))
        return (1.0 if both <= 1 else loss), loss

    groups = [*parts]
    while len(groups) > 1:
        pair = min(combinations(groups, 2), key=loss_of)
        if len(groups) <= MOST_CROPS and loss_of(pair)[0] > _MOST_LOSS:
            break
        groups = [around(pair), *(one for one in groups if one not in pair)]
    if len(groups) > 1:
        crops = _best(sorted(groups), source, sizes, context)
        if max(crop.scale for crop in crops) * _MOST_LOSS < scale_of(around(groups)):
            return crops
    crop = crop_of(around(groups), source, sizes, context)
    return () if crop is None else (crop,)


def around(boxes: Iterable[Box]) -> Box:
    """Return the smallest box with all of these; there is one at least."""
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def shared_out(parts: Iterable[Box], crops: Sequence[Box]) -> list[list[Box]]:
    """Return for each crop the parts of a region that are drawn in it.

    Each is in one: of those with all of it, that with the nearest middle.
    """

    def far(part: Box, crop: Box) -> tuple[bool, int]:
        x, y = (abs(part[n] + part[n + 2] - crop[n] - crop[n + 2]) for n in (0, 1))
        return not holds(crop, part), max(x, y)

    found: list[list[Box]] = [[] for _ in crops]
    for part in parts:
        found[min(range(len(crops)), key=lambda n: far(part, crops[n]))].append(part)
    return found


def holds(outer: Box, inner: Box) -> bool:
    """Return True if a box has all of another one."""
    (left, top, right, bottom), (x0, y0, x1, y1) = outer, inner
    return left <= x0 and top <= y0 and x1 <= right and y1 <= bottom


def _best(
    regions: Sequence[Box], source: Size, sizes: Sequence[Size], context: float | None
) -> tuple[Crop, ...]:
    """Return the crops of regions in the one size that is best for the worst of them."""
    found = [
        tuple(Crop(_box_of(region, source, size, context), size) for region in regions)
        for size in sizes
    ]
    return min(found, key=lambda crops: max(map(_faults, crops, regions)))


def _faults(crop: Crop, region: Box) -> tuple[float, float, int, int]:
    """Return what makes a crop worse than another one, the most important first.

    A stretch; the scale; what lacks around the region where least is shown, as several crops are
    drawn one to one; a shape, so that the order is total.
    """
    left, top, right, bottom = crop.box
    width, height = right - left, bottom - top
    shapes = sorted((width * crop.drawn.height, height * crop.drawn.width))
    stretch = max(0.0, shapes[1] / shapes[0] - 1 - _STRETCH)
    room = min(width - (region[2] - region[0]), height - (region[3] - region[1]))
    return round(stretch, 3), crop.scale, -room, crop.drawn.width


def _box_of(region: Box, source: Size, size: Size, context: float | None) -> Box:
    """Return the crop for one size: a whole number of times the size's smallest whole shape."""
    left, top, right, bottom = region
    width, height = right - left, bottom - top
    side = max(width, height)
    # One to one is `same` times the shape.
    same = gcd(size.width, size.height)
    shape_x, shape_y = size.width // same, size.height // same

    def around(pixels: int) -> int:
        """Return how many times the shape shows so many pixels on each side of the region."""
        x, y = min(source.width, width + 2 * pixels), min(source.height, height + 2 * pixels)
        return max(_up(x, shape_x), _up(y, shape_y))

    finest = _up(same, _ENLARGED)
    if context is not None:
        least = around(round(context * side))
        times = max(least, finest)
    else:
        area = _CROP_PER_REGION * width * height
        least = max(around(min(_LEAST, side)), isqrt(_up(area, shape_x * shape_y) - 1) + 1)
        times = around(max(_LEAST, round(_CONTEXT * side)))
        times = max(min(times, max(least, same)), finest)
    if times < same and 100 * times >= _NEARLY * same:
        times = same
    # What the photograph holds in this shape, unless that would cut what is needed.
    times = min(times, max(least, min(source.width // shape_x, source.height // shape_y)))
    wide, high = min(source.width, times * shape_x), min(source.height, times * shape_y)
    x, y = _start(left, right, wide, source.width), _start(top, bottom, high, source.height)
    return x, y, x + wide, y + high


def _start(first: int, last: int, length: int, source: int) -> int:
    """Return where a crop of this length begins: the region in its middle, as far as possible."""
    step = max(1, length // _STEPS)
    middle = (first + last - length) // 2
    start = round(middle / step) * step
    return min(max(start, last - length, 0), first, source - length)


def _up(number: int, step: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // step)
