"""On what a source is drawn that keeps its own size: whole rows around it; no torch.

A picture of any size is centred on the smallest canvas of whole rows, which its reflection fills,
and what is drawn on the canvas is cut back to it. Larger pictures are scaled down first. Source of
the numbers: `Flux3ImageProcessor` of diffusers.
"""

import math
from dataclasses import dataclass

from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import Box

_STEP = 16
_LEAST_SIDE, _MOST_SIDE = 64, 4096
_MOST_PIXELS = 4 * 1024**2
# By what a scale shrinks until the canvas is small enough.
_SHRINK = 0.995


@dataclass(frozen=True)
class Canvas:
    """A canvas's size, and the box that the picture has on it."""

    size: Size
    box: Box


def canvas_of(source: Size) -> Canvas:
    """Return the canvas of a picture of this size."""
    scale = min(
        1.0,
        math.sqrt(_MOST_PIXELS / (source.width * source.height)),
        _MOST_SIDE / max(source.height, source.width),
    )
    while True:
        kept = Size(*(max(1, round(side * scale)) for side in (source.height, source.width)))
        size = Size(_whole(kept.height), _whole(kept.width))
        if size.height * size.width <= _MOST_PIXELS:
            break
        scale *= _SHRINK
    left, top = (size.width - kept.width) // 2, (size.height - kept.height) // 2
    return Canvas(size, (left, top, left + kept.width, top + kept.height))


def _whole(side: int) -> int:
    return min(_MOST_SIDE, max(_LEAST_SIDE, -(-side // _STEP) * _STEP))
