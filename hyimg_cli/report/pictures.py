"""Pictures inside a page: as base64, scaled down where they are large, with what was done to them.

Pixels are uint8 arrays [H, W, 3], RGB.
"""

import base64
import io
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from PIL import Image

from hyimg_cli.quality.metrics import Pixels, level_differences
from hyimg_cli.report.colormap import color_values

# Longest side in pixels of a picture that is looked at closely.
DISPLAY_SIDE = 768
# Small pictures are shown enlarged, dot by dot.
_ENLARGED_SIDE = 256
_SCALES = (1, 2, 5, 10, 20, 50, 100, 255)


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture in a page. `uri` holds it whole.

    `width`, `height`: pixels in the file; `shown_width`: CSS pixels at most; `note`: what was done
    to it for the page.
    """

    uri: str
    alt: str
    width: int
    height: int
    shown_width: int
    note: str = ""

    @property
    def is_enlarged(self) -> bool:
        """True where its dots are larger than those of the screen."""
        return self.width < self.shown_width


class HeatMap(NamedTuple):
    """A map of where two pictures differ. `top`: levels at the bright end of the scale; `largest`:
    the largest difference found; `legend`: the meaning of its colours.
    """

    picture: EmbeddedPicture
    top: int
    largest: int
    legend: str


def embed_picture(pixels: Pixels, alt: str) -> EmbeddedPicture:
    """`pixels` in a page, scaled down (Lanczos) where they are larger than it shows."""
    image = Image.fromarray(pixels)
    if max(image.size) <= DISPLAY_SIDE:
        return _encoded(image, alt)
    image.thumbnail((DISPLAY_SIDE, DISPLAY_SIDE), Image.Resampling.LANCZOS)
    note = f"scaled down from {pixels.shape[1]}x{pixels.shape[0]}"
    return replace(_encoded(image, alt), note=note)


def heat_map(a: Pixels, b: Pixels) -> HeatMap:
    """Map where `a` and `b` differ, in colours from 0 (dark) to `top` levels (bright).

    `top` is the first of 1, 2, 5, 10, … 255 that no difference exceeds. A large map shows the
    largest difference in each square, so that no dot gets lost. Raises UsageError where the sizes
    differ.
    """
    from skimage.measure import block_reduce

    levels = level_differences(a, b).max(axis=2)
    largest = int(levels.max())
    top = next(scale for scale in _SCALES if scale >= largest)
    step = -(-max(levels.shape) // DISPLAY_SIDE)
    dots = block_reduce(levels, step, np.max) if step > 1 else levels
    image = Image.fromarray(color_values(dots / top))
    picture = _encoded(image, f"Difference map: largest {largest} levels")
    note = f"; each dot is the largest of {step}x{step} pixels" if step > 1 else ""
    legend = f"|A - B|, the largest of the three channels, from 0 to {top} levels of 255; "
    return HeatMap(picture, top, largest, f"{legend}largest found: {largest}{note}")


def _encoded(image: Image.Image, alt: str) -> EmbeddedPicture:
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    uri = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    # A whole number of screen dots for each of the picture's.
    factor = max(1, _ENLARGED_SIDE // max(image.size))
    return EmbeddedPicture(uri, alt, image.width, image.height, shown_width=image.width * factor)
