"""Pictures as planes, float32 arrays with colours [3, Y, X]; blur and resize them.

Differences are taken in opponent planes, linear in the levels and scaled so that a distance is
about one of CIE 1976 in the middle tones. On dark pictures CIE 1976 hardly shows a difference.
"""

from collections.abc import Callable
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from hyimg_cli.finishing.band_matrices import filtered, gaussian

Pixels = NDArray[np.uint8]
# Float32 arrays, and boolean ones.
Plane = np.ndarray
Mask = np.ndarray
# Lengths below are for a picture of about a megapixel.
_AREA = 1024**2
# Light is a gain of the levels plus this offset: otherwise black would have no gain, and noise the
# most.
NEVER_DARK = 16.0
# Y'CbCr of BT.709, by rows, scaled as described above.
_OPPONENT = np.array(
    [[0.0833, 0.2804, 0.0283], [0.4267, -0.3876, -0.0391], [-0.1146, -0.3854, 0.5]], np.float32
)
# Pixels of a band of rows whose planes stay in a processor's cache.
_BAND = 1 << 15
# Of more values than this, a median is looked for near that of a sample.
_MANY, _SAMPLE = 1 << 14, 1 << 12


def scale_of(shape: tuple[int, ...]) -> float:
    """Return the factor for lengths given per megapixel, for a picture of this height and width."""
    return min(2.0, max(0.3, sqrt(shape[0] * shape[1] / _AREA)))


def step_of(shape: tuple[int, ...]) -> int:
    """Return the reduction for a picture of this height and width if half the size is enough."""
    return 2 if min(shape) >= 256 else 1


def planes(pixels: Pixels) -> Plane:
    """Return the planes of a picture [Y, X, 3]."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)


def opponent(levels: Plane) -> Plane:
    """Return lightness, red against green, and blue against yellow."""
    return np.tensordot(_OPPONENT, levels, axes=1)


def length(colours: Plane) -> Plane:
    """Return the length [Y, X] of each pixel's difference in [3, Y, X]."""
    return np.asarray(np.sqrt(np.square(colours).sum(0)))


def range_within(plane: Plane, reach: int, spare: float = 0.0) -> tuple[Plane, Plane]:
    """Return each channel's minimum and maximum within `reach` pixels, widened by `spare`.

    `spare`: a fraction of their distance.
    """
    low, high = (most_within(plane, reach, how) for how in (np.minimum, np.maximum))
    return widened(low, high, spare) if spare else (low, high)


def widened(low: Plane, high: Plane, spare: float) -> tuple[Plane, Plane]:
    """Return a range that is wider at both ends by this fraction of it."""
    more = spare * (high - low)
    return low - more, high + more


def most_within(plane: Plane, reach: int, how: np.ufunc) -> Plane:
    """Return the extreme (`how`) of the square around each pixel, [..., Y, X].

    For such small squares, numpy is ten times faster than scipy's filters.
    """
    wide = plane.copy()
    for by in range(1, reach + 1):
        how(wide[..., :-by], plane[..., by:], out=wide[..., :-by])
        how(wide[..., by:], plane[..., :-by], out=wide[..., by:])
    found = wide.copy()
    for by in range(1, reach + 1):
        how(found[..., :-by, :], wide[..., by:, :], out=found[..., :-by, :])
        how(found[..., by:, :], wide[..., :-by, :], out=found[..., by:, :])
    return found


def by_bands(function: Callable[..., Plane], *planes: Plane, reach: int = 0) -> Plane:
    """Return `function` of planes [..., Y, X], taken some rows at a time.

    Its temporary planes then stay in the processor's cache, which is faster, and takes no memory.
    `reach`: how many rows away the function looks; its result has as many rows as it is given.
    """
    height, width = planes[0].shape[-2:]
    step, found = max(1, _BAND // width), np.empty(0)
    for top in range(0, height, step):
        first = max(0, top - reach)
        part = function(*(plane[..., first : top + step + reach, :] for plane in planes))
        if not found.size:
            found = np.empty((*part.shape[:-2], height, width), part.dtype)
        found[..., top : top + step, :] = part[..., top - first : top - first + step, :]
    return found


def beyond_of(plane: Plane, low: Plane, high: Plane) -> Plane:
    """Return the signed distance of values from the range `low` to `high`."""
    nearest = np.maximum(plane, low)
    np.minimum(nearest, high, out=nearest)
    return np.asarray(np.subtract(plane, nearest, out=nearest))


def median(values: np.ndarray) -> float:
    """Return the median of some floats, to the bit that of numpy, in a third of the time.

    A sample tells roughly where it is, so only values near that are put in order (Floyd and Rivest,
    Expected time bounds for selection, 1975).
    """
    half, is_odd = divmod(values.size, 2)
    if values.size > _MANY:
        some = np.sort(values[:: values.size // _SAMPLE])
        low, high = some[int(0.47 * some.size)], some[int(0.53 * some.size)]
        below = int(np.count_nonzero(values < low))
        near = values[(values >= low) & (values <= high)]
        if below < half < below + near.size:
            values, half = near, half - below
    parted = np.partition(values, half)
    upper = parted[half]
    return float(upper if is_odd else (parted[:half].max() + upper) / values.dtype.type(2))


def luma(levels: Plane) -> Plane:
    """Return lightness in levels."""
    return np.tensordot(np.array([0.2126, 0.7152, 0.0722], np.float32), levels, axes=1)


def blurred(array: Plane, sigma: float) -> Plane:
    """Apply a Gaussian over the last two axes; beyond a border are the border's pixels."""
    height, width = array.shape[-2:]
    return filtered(array, gaussian(height, sigma), gaussian(width, sigma))


def spread(values: Plane, weights: Plane, sigma: float) -> tuple[Plane, Plane]:
    """Apply a normalised convolution to `values` [3, Y, X] with trust `weights` [Y, X].

    Returns the values, carried to pixels without trust, and the trust that arrives.
    """
    trust = blurred(weights, sigma)
    return blurred(values * weights, sigma) / np.maximum(trust, 1e-6), trust


def reduced(array: Plane, by: int) -> Plane:
    """Return means of squares of `by` pixels, [..., Y, X]; the last ones may be narrower."""
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
    """Resize the part `box` (left, top, right, bottom) of planes to `shape`, height and width."""
    flat = array.reshape(-1, *array.shape[-2:])
    size = shape[1], shape[0]
    grown = [np.asarray(Image.fromarray(plane).resize(size, how, box)) for plane in flat]
    return np.stack(grown).reshape(*array.shape[:-2], *shape)


def numbers(mask: Mask) -> Plane:
    """Return 1 where the mask is true, else 0."""
    return mask.astype(np.float32)


def disc(radius: float) -> Mask:
    """Return a round neighbourhood."""
    reach = int(radius)
    y, x = np.ogrid[-reach : reach + 1, -reach : reach + 1]
    return np.asarray(x * x + y * y <= radius * radius + 0.5)


def distance_to(mask: Mask) -> Plane:
    """Return each pixel's distance to the nearest pixel of the mask; large if the mask is empty."""
    if not mask.any():
        return np.full(mask.shape, np.inf, np.float32)
    return np.asarray(ndimage.distance_transform_edt(~mask), np.float32)


def within(mask: Mask, radius: float) -> Mask:
    """Return the pixels at most this far from the mask."""
    place, near = around(mask, radius), np.zeros_like(mask)
    near[place] = _dilated(mask[place], radius)
    return near


def deeper(mask: Mask, depth: float) -> Mask:
    """Return the pixels of the mask that are farther than this from everything outside it."""
    place, deep = around(mask, depth), np.zeros_like(mask)
    deep[place] = ~_dilated(~mask[place], depth)
    return deep


def _dilated(mask: Mask, radius: float) -> Mask:
    """Return the pixels at most this far from the mask, by the rows of a disc.

    For radii as here it takes a fraction of the time of all distances, which are float32, too.
    """
    found, wide, width, reach = mask.copy(), mask.copy(), 0, int(radius)
    y, x = np.ogrid[: reach + 1, : reach + 1]
    widths = (np.sqrt(x * x + y * y).astype(np.float32) <= radius).sum(axis=1) - 1
    # A row of the disc is the wider, the nearer it is to the middle.
    for by in range(reach, -1, -1):
        while width < widths[by]:
            width += 1
            wide[:, width:] |= mask[:, :-width]
            wide[:, :-width] |= mask[:, width:]
        if by:
            found[by:] |= wide[:-by]
            found[:-by] |= wide[by:]
    return np.asarray(found | wide)


def closed(mask: Mask, by: float) -> Mask:
    """Close gaps narrower than twice `by` between parts of the mask."""
    reach = int(by) + 1
    wide = np.pad(mask, reach, mode="edge")
    return np.asarray((deeper(within(wide, by), by) | wide)[reach:-reach, reach:-reach])


def around(mask: Mask, margin: float) -> tuple[slice, slice]:
    """Return the rows and columns that a mask covers, widened by a margin."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    if not rows.size:
        return slice(0), slice(0)
    more = ceil(margin) + 1
    return (
        slice(max(0, rows[0] - more), rows[-1] + 1 + more),
        slice(max(0, columns[0] - more), columns[-1] + 1 + more),
    )
