"""Linear filters along the sides of planes, as products with band matrices.

Blurs and motions are such filters: each pixel of the result sees a few of its row, then of its
column. Products of some rows or columns at a time take a fraction of the time of the loops of scipy
and Pillow, whose results they are but for float32's rounding.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Rows or columns of a product.
_TOGETHER = 64


@dataclass(frozen=True, eq=False)
class BandMatrix:
    """A filter along a side: parts of the result, what they see, and the weights [part, seen]."""

    side: int
    parts: tuple[tuple[slice, slice, np.ndarray], ...]

    @classmethod
    def of(cls, at: np.ndarray, weights: np.ndarray, side: int) -> "BandMatrix":
        """Return the filter whose pixels see pixels `at` [N, K] of a side by `weights` [N, K].

        Beyond a border are the border's pixels.
        """
        at, parts = np.clip(at, 0, side - 1), []
        for start in range(0, len(at), _TOGETHER):
            seen = at[start : start + _TOGETHER]
            first, stop = int(seen.min()), int(seen.max()) + 1
            part = np.zeros((len(seen), stop - first))
            rows = np.arange(len(seen))[:, None]
            np.add.at(part, (rows, seen - first), weights[start : start + _TOGETHER])
            here = slice(start, start + len(seen))
            parts.append((here, slice(first, stop), part.astype(np.float32)))
        return cls(len(at), tuple(parts))


def filtered(planes: np.ndarray, down: BandMatrix, across: BandMatrix) -> np.ndarray:
    """Return planes [..., Y, X] filtered along their columns, then along their rows."""
    *few, _, width = planes.shape
    between = np.empty((*few, down.side, width), planes.dtype)
    for part, seen, weights in down.parts:
        np.matmul(weights, planes[..., seen, :], out=between[..., part, :])
    found = np.empty((*few, down.side, across.side), planes.dtype)
    for part, seen, weights in across.parts:
        np.matmul(between[..., seen], weights.T, out=found[..., part])
    return found


@lru_cache(maxsize=64)
def gaussian(side: int, sigma: float) -> BandMatrix:
    """Return a Gaussian over 3 sigma on each side."""
    reach = int(3 * sigma + 0.5)
    away = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * np.square(away / sigma))
    at = np.arange(side)[:, None] + away
    return BandMatrix.of(at, np.broadcast_to(weights / weights.sum(), at.shape), side)


def cubic(side: int, zoom: float, shift: float) -> BandMatrix:
    """Return the values at `zoom * place + shift`, by cubic curves through four pixels.

    The curves are those of Pillow's BICUBIC transformations.
    """
    at = zoom * (np.arange(side) + 0.5) + shift - 0.5
    first = np.floor(at).astype(int)
    d = at - first
    weights = (d * (2 * d - 1 - d * d), 1 + d * d * (d - 2), d * (1 + d - d * d), d * d * (d - 1))
    return BandMatrix.of(first[:, None] + np.arange(-1, 3), np.stack(weights, axis=1), side)
