"""Pictures inside a page: as base64, scaled down where they are large, with what was done to them.

Pixels are uint8 arrays [H, W, 3], RGB.
"""

import base64
import io
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from hyimg_cli.quality.metrics import Pixels, level_differences
from hyimg_cli.report.colormap import colored, gradient

# Longest side in pixels of a picture that is looked at closely, and of one among many.
DISPLAY_SIDE = 768
THUMBNAIL_SIDE = 256
# Small pictures are shown enlarged, dot by dot.
_ENLARGED_SIDE = 256
_SCALES = (1, 2, 5, 10, 20, 50, 100, 255)
Coding = Literal["png", "jpeg"]


@dataclass(frozen=True)
class Picture:
    """A picture in a page. `uri` holds it whole; empty for one that is missing, `alt` says why.

    `width`, `height`: pixels in the file; `shown_width`: CSS pixels at most; `note`: what was done
    to it for the page; `link`: where the whole file is, relative to the page.
    """

    uri: str
    alt: str
    width: int = 0
    height: int = 0
    shown_width: int = THUMBNAIL_SIDE
    caption: str = ""
    note: str = ""
    link: str = ""

    @property
    def is_enlarged(self) -> bool:
        """Whether its dots are larger than those of the screen."""
        return 0 < self.width < self.shown_width


@dataclass(frozen=True)
class HeatMap:
    """Where two pictures differ. `top`: levels at the bright end of the scale, none is beyond it
    unless `beyond` says how many; `largest`: the largest difference found.
    """

    picture: Picture
    top: int
    largest: int
    beyond: int = 0

    @property
    def gradient(self) -> str:
        """The scale from 0 to `top`, as a CSS value."""
        return gradient()

    @property
    def legend(self) -> str:
        """What a colour means."""
        note = f"; {self.picture.note}" if self.picture.note else ""
        beyond = f"; {self.beyond} dots are beyond the scale" if self.beyond else ""
        return (
            f"|A - B|, the largest of the three channels, from 0 to {self.top} levels of 255; "
            f"largest found: {self.largest}{beyond}{note}"
        )


def missing(reason: str, *, caption: str = "", link: str = "") -> Picture:
    """A place for a picture that cannot be shown, with the reason in it."""
    return Picture("", reason, caption=caption, link=link)


def embedded(
    pixels: Pixels,
    alt: str,
    *,
    caption: str = "",
    link: str = "",
    max_side: int = DISPLAY_SIDE,
    coding: Coding = "png",
) -> Picture:
    """`pixels` in a page, scaled down (Lanczos) to `max_side` where they are larger.

    `coding` jpeg takes a tenth of the room; only a picture that was scaled down is coded so.
    """
    image = Image.fromarray(pixels)
    is_large = max(image.size) > max_side
    if is_large:
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    picture = _encoded(image, alt, "jpeg" if is_large and coding == "jpeg" else "png")
    size = f"{pixels.shape[1]}x{pixels.shape[0]}"
    note = f"scaled down from {size}" if is_large else ""
    return replace(picture, caption=caption, link=link, note=note)


def heat_map(a: Pixels, b: Pixels, *, top: int | None = None, alt: str = "") -> HeatMap:
    """Where `a` and `b` differ, in colours from 0 (dark) to `top` levels (bright).

    Without `top`: the first of 1, 2, 5, 10, … 255 that none exceeds; give one to compare several
    maps. A large map shows the largest difference in each square, so that no dot gets lost.
    Raises UsageError where the sizes differ.
    """
    levels = level_differences(a, b).max(axis=2)
    largest = int(levels.max())
    scale = top or next(scale for scale in _SCALES if scale >= largest)
    step = -(-max(levels.shape) // DISPLAY_SIDE)
    dots = _block_max(levels, step) if step > 1 else levels
    image = Image.fromarray(colored(dots / scale))
    words = alt or f"Difference map: largest {largest} levels"
    picture = _encoded(image, words, "png")
    note = f"each dot is the largest of {step}x{step} pixels" if step > 1 else ""
    return HeatMap(replace(picture, note=note), scale, largest, int((levels > scale).sum()))


def _block_max(levels: Pixels, step: int) -> Pixels:
    """The largest value of each `step` x `step` square, the last ones cut off by the edge."""
    height, width = levels.shape
    padded = np.pad(levels, ((0, -height % step), (0, -width % step)))
    squares = padded.reshape(padded.shape[0] // step, step, padded.shape[1] // step, step)
    found: Pixels = squares.max(axis=(1, 3))
    return found


def _encoded(image: Image.Image, alt: str, coding: Coding) -> Picture:
    data = io.BytesIO()
    if coding == "png":
        image.save(data, format="PNG", optimize=True)
    else:
        image.save(data, format="JPEG", quality=85)
    uri = f"data:image/{coding};base64,{base64.b64encode(data.getvalue()).decode()}"
    # A whole number of screen dots for each of the picture's.
    factor = max(1, _ENLARGED_SIDE // max(image.size))
    return Picture(uri, alt, image.width, image.height, shown_width=image.width * factor)
