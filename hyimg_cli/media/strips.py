"""Work on large pictures some rows at a time: copies of a whole one may not fit into memory."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
# Pixels of a strip.
_STRIP = 4_000_000


def strips(height: int, width: int) -> Iterator[slice]:
    """Yield all rows of a picture, a strip at a time."""
    step = max(1, _STRIP // width)
    yield from (slice(top, min(height, top + step)) for top in range(0, height, step))


def in_strips(height: int, width: int, part_of: Callable[[slice], Pixels]) -> Pixels:
    """Return the picture [H, W] or [H, W, C] whose rows `part_of` returns."""
    pixels = np.empty(0, np.uint8)
    for rows in strips(height, width):
        part = part_of(rows)
        if not pixels.size:
            pixels = np.empty((height, *part.shape[1:]), part.dtype)
        pixels[rows] = part
    return pixels


def rows_of(picture: Image.Image, rows: slice) -> Image.Image:
    """Return rows of a picture, as Pillow holds it."""
    return picture.crop((0, rows.start, picture.width, rows.stop))


def pixels_of(picture: Image.Image) -> Pixels:
    """Return a picture in its own channels, 8 bits each. At once would take twice the memory."""
    return in_strips(picture.height, picture.width, lambda at: np.asarray(rows_of(picture, at)))
