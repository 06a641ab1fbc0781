"""Pictures as planes: float32 arrays, of colours [3, Y, X], and how they are blurred and resized.

Differences are taken in opponent planes, linear in the levels and scaled so that a distance is
about one of CIE 1976 in the middle tones. On dark pictures CIE's own hardly sees anything.
"""

from functools import reduce
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

Pixels = NDArray[np.uint8]
# Float32, and truths.
Plane = np.ndarray
Mask = np.ndarray
# Lengths below are for a picture of about a megapixel.
_AREA = 1024**2
# Light is a gain of the levels and these: else black had none, and noise the most.
NEVER_DARK = 16.0
# Y'CbCr of BT.709, by rows, scaled as said above.
_OPPONENT = np.array(
    [[0.0833, 0.2804, 0.0283], [0.4267, -0.3876, -0.0391], [-0.1146, -0.3854, 0.5]], np.float32
)


def scale_of(shape: tuple[int, ...]) -> float:
    """What lengths for a megapixel are to be multiplied by, for a picture of this height, width."""
    return min(2.0, max(0.3, sqrt(shape[0] * shape[1] / _AREA)))


def step_of(shape: tuple[int, ...]) -> int:
    """By how much a picture of this height, width is reduced where half the size will do."""
    return 2 if min(shape) >= 256 else 1


def planes(pixels: Pixels) -> Plane:
    """Levels of a picture [Y, X, 3]."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)


def opponent(levels: Plane) -> Plane:
    """Lightness, red against green, blue against yellow."""
    return np.tensordot(_OPPONENT, levels, axes=1)


def length(colours: Plane) -> Plane:
    """How far each pixel of differences [3, Y, X] is from none, [Y, X]."""
    return np.asarray(np.sqrt(np.square(colours).sum(0)))


def range_within(plane: Plane, reach: int, spare: float = 0.0) -> tuple[Plane, Plane]:
    """The lowest and the highest value of each channel within `reach` pixels, and by the part
    `spare` of their distance further apart.
    """
    low, high = (_most(plane, reach, how) for how in (np.minimum, np.maximum))
    more = spare * (high - low)
    return low - more, high + more


def _most(plane: Plane, reach: int, how: np.ufunc) -> Plane:
    """By `how` of two the most of each square around, [..., Y, X]. For the few pixels of a square's
    side that is done five times sooner by numpy than by a filter of scipy's.
    """
    for axis in (-2, -1):
        margins = [(reach, reach) if at == axis else (0, 0) for at in range(-plane.ndim, 0)]
        wide, count = np.pad(plane, margins, mode="edge"), plane.shape[axis]
        shifted = [np.moveaxis(wide, axis, 0)[k : k + count] for k in range(2 * reach + 1)]
        plane = np.moveaxis(reduce(how, shifted), 0, axis)
    return plane


def beyond_of(plane: Plane, low: Plane, high: Plane) -> Plane:
    """How far values are from those between `low` and `high`, with their sign."""
    return np.asarray(np.maximum(plane - high, 0) - np.maximum(low - plane, 0))


def luma(levels: Plane) -> Plane:
    """Lightness in levels."""
    return np.tensordot(np.array([0.2126, 0.7152, 0.0722], np.float32), levels, axes=1)


def blurred(array: Plane, sigma: float) -> Plane:
    """Gaussian over the last two axes."""
    sigmas = (0.0,) * (array.ndim - 2) + (sigma, sigma)
    return np.asarray(ndimage.gaussian_filter(array, sigmas, mode="nearest", truncate=3.0))


def spread(values: Plane, weights: Plane, sigma: float) -> tuple[Plane, Plane]:
    """Normalised convolution: `values` [3, Y, X] where `weights` [Y, X] trust them, carried to
    where they do not; and the trust that arrives.
    """
    trust = blurred(weights, sigma)
    return blurred(values * weights, sigma) / np.maximum(trust, 1e-6), trust


def reduced(array: Plane, by: int) -> Plane:
    """Means of squares of `by` pixels, [..., Y, X]; those at the end may be narrower."""
    if by == 1:
        return array
    flat = array.reshape(-1, *array.shape[-2:])
    small = [np.asarray(Image.fromarray(plane).reduce(by)) for plane in flat]
    return np.stack(small).reshape(*array.shape[:-2], *small[0].shape)


def resized(
    array: Plane,
    shape: tuple[int, int],
    box: tuple[float, float, float, float] | None = None,
    how: Image.Resampling = Image.Resampling.BILINEAR,
) -> Plane:
    """The part `box` (left, top, right, bottom) of planes as `shape`, height and width."""
    flat = array.reshape(-1, *array.shape[-2:])
    size = shape[1], shape[0]
    grown = [np.asarray(Image.fromarray(plane).resize(size, how, box)) for plane in flat]
    return np.stack(grown).reshape(*array.shape[:-2], *shape)


def numbers(mask: Mask) -> Plane:
    """1 where it is true."""
    return mask.astype(np.float32)


def disc(radius: float) -> Mask:
    """A round neighbourhood."""
    reach = int(radius)
    y, x = np.ogrid[-reach : reach + 1, -reach : reach + 1]
    return np.asarray(x * x + y * y <= radius * radius + 0.5)


def distance_to(mask: Mask) -> Plane:
    """Pixels from each pixel to the nearest of the mask; far where that is empty."""
    if not mask.any():
        return np.full(mask.shape, np.inf, np.float32)
    return np.asarray(ndimage.distance_transform_edt(~mask), np.float32)


def within(mask: Mask, radius: float) -> Mask:
    """Pixels at most so far from the mask."""
    place, near = _around(mask, radius), np.zeros_like(mask)
    near[place] = distance_to(mask[place]) <= radius
    return near


def deeper(mask: Mask, depth: float) -> Mask:
    """Pixels of the mask farther than so from all that is not of it."""
    place, deep = _around(mask, depth), np.zeros_like(mask)
    deep[place] = distance_to(~mask[place]) > depth
    return deep


def closed(mask: Mask, by: float) -> Mask:
    """The mask with what is narrower than twice `by` between its parts."""
    reach = int(by) + 1
    wide = np.pad(mask, reach, mode="edge")
    return np.asarray((deeper(within(wide, by), by) | wide)[reach:-reach, reach:-reach])


def _around(mask: Mask, margin: float) -> tuple[slice, slice]:
    """Where the mask is, and so much more: what is nearer than that is not farther off."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    if not rows.size:
        return slice(0), slice(0)
    more = ceil(margin) + 1
    return (
        slice(max(0, rows[0] - more), rows[-1] + 1 + more),
        slice(max(0, columns[0] - more), columns[-1] + 1 + more),
    )
