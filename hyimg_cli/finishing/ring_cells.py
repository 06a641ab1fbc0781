"""Square cells of a ring around an edit, over which colours are averaged."""

import numpy as np

from hyimg_cli.finishing.planes import Mask, Plane

# Side of a cell, per megapixel, and in pixels at least; the part of it that the ring must cover.
_CELL, _LEAST_SIDE, _LEAST_PART = 24.0, 6, 0.08


class RingCells:
    """The cells that a ring [Y, X] covers enough of; `scale`: of the picture, by `scale_of`."""

    def __init__(self, ring: Mask, scale: float) -> None:
        side = max(_LEAST_SIDE, round(_CELL * scale))
        y, x = np.nonzero(ring)
        _, self._cell, self._counts = np.unique(
            y // side * ring.shape[1] + x // side, return_inverse=True, return_counts=True
        )
        self._ring, self._is_full = ring, self._counts >= _LEAST_PART * side * side

    @property
    def is_empty(self) -> bool:
        """Return True if the ring covers no cell enough."""
        return not self._is_full.any()

    def means(self, colours: Plane) -> Plane:
        """Return the mean colours [C, N] of the ring's pixels in each cell, from [C, Y, X]."""
        count = len(self._counts)
        sums = [np.bincount(self._cell, one[self._ring], count) for one in colours]
        return np.stack([one / self._counts for one in sums])[:, self._is_full]
