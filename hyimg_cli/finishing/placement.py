"""Exact placement of a model's picture on its source: one factor and one offset per axis.

Coordinates are those of pixel borders, `drawn = scale * source - offset`; a pixel's centre is at
one half. A registration adds one more factor and offset, so a single Lanczos resize maps the
picture back.
"""

from dataclasses import dataclass
from math import ceil, floor, sqrt

import numpy as np
from PIL import Image

from hyimg_cli.finishing.planes import Pixels

_LANCZOS_REACH = 3


@dataclass(frozen=True)
class AxisMap:
    """One axis: `length` source pixels, of which `drawn` were drawn."""

    length: int
    drawn: int
    scale: float
    offset: float = 0.0

    def moved(self, zoom: float, shift: float) -> "AxisMap":
        """Return the map of a drawn picture that is at `zoom * x + shift` of the reference."""
        return AxisMap(self.length, self.drawn, zoom * self.scale, zoom * self.offset - shift)

    @property
    def window(self) -> tuple[int, int]:
        """Return the range of source pixels that the model saw completely."""
        first = max(0, ceil(self.offset / self.scale - 1e-6))
        last = min(self.length, floor((self.drawn + self.offset) / self.scale + 1e-6))
        return first, last

    def at(self, source: float) -> float:
        return self.scale * source - self.offset


@dataclass(frozen=True)
class Placement:
    """Placement of a drawn picture on its source."""

    y: AxisMap
    x: AxisMap

    @classmethod
    def stretched(cls, source: tuple[int, int], drawn: tuple[int, int]) -> "Placement":
        """Return the placement of a source that was resized to another shape."""
        return cls(*(AxisMap(n, m, m / n) for n, m in zip(source, drawn, strict=True)))

    @classmethod
    def covered(cls, source: tuple[int, int], drawn: tuple[int, int]) -> "Placement":
        """Return the placement of a source resized to cover the drawn size and cut at its centre.

        Rounds as `media.images.fit_cover` does.
        """
        (n_y, n_x), (m_y, m_x) = source, drawn
        if n_y / n_x < m_y / m_x:
            fitted = (m_y, round(m_y / n_y * n_x))
        else:
            fitted = (round(m_x / n_x * n_y), m_x)
        return cls(
            *(
                AxisMap(n, m, full / n, round((full - m) / 2))
                for n, m, full in zip(source, drawn, fitted, strict=True)
            )
        )

    @classmethod
    def cropped(
        cls, source: tuple[int, int], crop: tuple[int, int, int, int], drawn: tuple[int, int]
    ) -> "Placement":
        """Return the placement of a crop (left, top, right, bottom) that was resized."""
        left, top, right, bottom = crop
        (n_y, n_x), (m_y, m_x) = source, drawn
        y, x = m_y / (bottom - top), m_x / (right - left)
        return cls(AxisMap(n_y, m_y, y, y * top), AxisMap(n_x, m_x, x, x * left))

    def moved(self, zoom: tuple[float, float], shift: tuple[float, float]) -> "Placement":
        """Return the placement after a registration, vertical first."""
        return Placement(self.y.moved(zoom[0], shift[0]), self.x.moved(zoom[1], shift[1]))

    @property
    def unseen(self) -> float:
        """Return the fraction of the source that the model did not see."""
        (top, bottom), (left, right) = self.y.window, self.x.window
        return 1 - (bottom - top) * (right - left) / (self.y.length * self.x.length)

    @property
    def pixels_per_drawn(self) -> float:
        """Return the source pixels per drawn pixel, along a side."""
        return 1 / sqrt(self.y.scale * self.x.scale)


def mapped_back(
    drawn: Pixels, placement: Placement, rows: tuple[int, int], columns: tuple[int, int]
) -> Pixels:
    """Resize the drawn picture over these rows and columns of the source, by Lanczos.

    Beyond its border, the picture repeats its border pixels.
    """
    tops = [placement.y.at(row) for row in rows]
    lefts = [placement.x.at(column) for column in columns]
    # Only what the strip needs is padded and resized.
    reach = [_LANCZOS_REACH * max(1.0, axis.scale) + 1 for axis in (placement.y, placement.x)]
    y, x = (
        (floor(low - more), ceil(high + more))
        for (low, high), more in zip((tops, lefts), reach, strict=True)
    )
    part = drawn[
        np.clip(np.arange(*y), 0, drawn.shape[0] - 1)[:, None],
        np.clip(np.arange(*x), 0, drawn.shape[1] - 1)[None],
    ]
    box = (lefts[0] - x[0], tops[0] - y[0], lefts[1] - x[0], tops[1] - y[0])
    size = columns[1] - columns[0], rows[1] - rows[0]
    return np.asarray(Image.fromarray(part).resize(size, Image.Resampling.LANCZOS, box))


def shown(source: Pixels | Image.Image, placement: Placement) -> Pixels:
    """Return the part of the source that the model saw, in the source's channels."""
    (top, bottom), (left, right) = (
        [
            min(float(axis.length), max(0.0, (at + axis.offset) / axis.scale))
            for at in (0, axis.drawn)
        ]
        for axis in (placement.y, placement.x)
    )
    box = (left, top, right, bottom)
    size = placement.x.drawn, placement.y.drawn
    image = source if isinstance(source, Image.Image) else Image.fromarray(source)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS, box))
