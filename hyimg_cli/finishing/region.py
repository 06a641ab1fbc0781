"""Find where a redraw shows something other than its source.

A difference is compared with the noise of this redraw, `noise² = floor² + (shift · gradient)²`; the
larger part of the picture gives the floor. Values that the reference has within a pixel do not
count, which absorbs edges that moved by fractions of a pixel without estimating a flow.
"""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from hyimg_cli.finishing.planes import (
    NEVER_DARK,
    Mask,
    Plane,
    beyond_of,
    blurred,
    by_bands,
    closed,
    deeper,
    disc,
    distance_to,
    length,
    most_within,
    numbers,
    opponent,
    reduced,
    resized,
    scale_of,
    step_of,
    widened,
    within,
)

_SIGMAS = (1.0, 2.0, 4.0, 8.0)
_STRONG, _WEAK = (10.0, 7.0, 5.0, 4.5), (5.0, 3.5, 2.5, 2.3)
_STRONG_Z, _WEAK_Z = 5.0, 2.5
_QUANTILE = 0.4
# A difference is weak if the reference has no such colour this many pixels away. It is strong if it
# has none so many pixels farther away, even if its edges get sharper by this fraction.
_NEAR, _FAR, _SHARPER = 1, 1, 0.25
_LEAST_NOISE, _SHIFT = 0.7, 0.15
_OPENING, _CLOSING = 1.0, 5.0
# Below this, a pixel is as wide as a stroke.
_COARSE = 0.5
# An edit is extended by this much where the same pixel differs.
_GROWN = 3.0
# How far a blurred difference spreads beyond the pixels that differ.
_SPILL = (0.0, 1.0, 2.0, 4.0)
_STRONG_PIXELS, _STRONG_PART = 6, 0.04
_LEAST_AREA, _LEAST_SOLID_AREA, _SOLID = 6e-4, 1.5e-4, 12.0
_MOST_HOLE = 1e-3
# Things this thin have no inside.
_THIN = 6.0
# Light is a gain that is smooth over this sigma and makes at least this difference, less at its
# ends. Its residual is at most this many times the usual noise, squared; at the border, which is
# this wide to either side, at most this part of the difference. Without a strong difference, the
# light must be larger and more distinct.
_GAIN_SIGMA, _LIGHT, _LIGHT_END, _LIGHT_LEFT = 8.0, 2.5, 1.2, 4.0
_BORDER, _BORDER_LEFT, _LEAST_LIGHT_AREA = 6.0, 0.7, 1e-2
_LIGHT_ALONE, _LIGHT_ALONE_Z = 3.0, 4.0


@dataclass(frozen=True)
class BlurredView:
    """The reference at one scale: slope and levels, in opponent planes."""

    sigma: float
    slope: Plane
    smooth: Plane


@dataclass(frozen=True)
class EditMask:
    """The mask of the edit [Y, X], its connected regions, and the noise at the second scale.

    `light` [4, y, x], at reduced size: gains of the three channels by light or shade, and how far
    they explain the whole edit, 0 to 1.
    """

    mask: Mask
    regions: int
    noise: float
    light: Plane


def views(reference: Plane) -> list[BlurredView]:
    """Return the blurred views of the reference's levels [3, Y, X]."""
    scale, colours = scale_of(reference.shape[1:]), opponent(reference)
    found = []
    for sigma in _SIGMAS:
        smooth = blurred(colours, sigma * scale)
        found.append(BlurredView(sigma, by_bands(_slope, smooth, reach=1), smooth))
    return found


def region(
    drawn: Plane,
    reference: Plane,
    seen: list[BlurredView],
    valid: Mask,
    stays: Mask | None = None,
) -> EditMask:
    """Find the edit in drawn levels without drift and motion.

    `seen`: the reference's views; `valid`: pixels that were drawn, a rectangle; `stays`: a part
    that is known to be the source's. If it is given, the noise is that of this part, and light is
    not looked for.
    """
    shape = valid.shape
    scale = scale_of(shape)
    colours = opponent(drawn)
    strong, weak, fine, direct = (np.zeros(shape, bool) for _ in range(4))
    sizes, floors = [], []
    usual, quiet = np.zeros(shape), valid if stays is None else valid & stays
    for number, view in enumerate(seen):
        smooth = blurred(colours, view.sigma * scale)
        size, far = by_bands(_beyond, smooth, view.smooth, valid, reach=_NEAR + _FAR)
        floor = max(_LEAST_NOISE, _usual(size[quiet]))
        level = np.sqrt(floor**2 + np.square(_SHIFT * view.slope))
        over = (size > _WEAK_Z * level) & (size > _WEAK[number])
        if spill := _SPILL[number] * scale:
            over = ndimage.binary_erosion(over, disc(spill), border_value=1)
        if number == 0:
            apart = length(smooth - view.smooth) * valid
            direct = (apart > _WEAK_Z * level) & (apart > _WEAK[0])
        if number < 2:
            fine, usual = fine | over, level
        weak |= over
        # Lines that the redraw moved by more than a pixel are weak, but not strong.
        strong |= (far > _STRONG_Z * level) & (far > _STRONG[number])
        sizes.append(size)
        floors.append(floor)
    kept = _components(weak, strong, sizes[2], scale)
    mask = kept & fine
    # A removed object is as large as its trace, which is within a pixel's range of the source.
    mask |= within(mask, max(1.5, _GROWN * scale)) & direct
    lit, light = np.zeros_like(kept), np.zeros((4, 1, 1), np.float32)
    if stays is None:
        lit, light = _lights(kept, drawn, reference, usual, valid, scale)
    # A light may contain many regions in the same style, which should count as one.
    regions = max(int(ndimage.label(one, np.ones((3, 3)))[1]) for one in (kept, kept | lit))
    mask |= lit
    mask = _to_the_border(mask | _filled(_solid(mask, scale)), valid)
    return EditMask(mask, regions, floors[1], light)


def _slope(smooth: Plane) -> Plane:
    """Return the slope [Y, X] of colours [3, Y, X]."""
    slopes = np.gradient(smooth, axis=(1, 2))
    return np.asarray(np.sqrt(sum(np.square(one).sum(0) for one in slopes)), np.float32)


def _beyond(colours: Plane, own: Plane, valid: Mask) -> Plane:
    """Return how far colours [3, Y, X] are beyond those that `own` has near, and farther, away.

    As distances [2, Y, X], which are 0 where nothing was drawn.
    """
    near = tuple(most_within(own, _NEAR, how) for how in (np.minimum, np.maximum))
    low, high = (
        most_within(one, _FAR, how) for one, how in zip(near, (np.minimum, np.maximum), strict=True)
    )
    ranges = near, widened(low, high, _SHARPER)
    return np.stack([length(beyond_of(colours, *ends)) * valid for ends in ranges])


def _usual(size: np.ndarray) -> float:
    """Return a typical difference by its lower part, because half of a picture may be edited."""
    some = size[:: max(1, size.size // 200_000)]
    return float(np.quantile(some, _QUANTILE)) if some.size else 0.0


def _components(weak: Mask, strong: Mask, coarse: Plane, scale: float) -> Mask:
    """Return connected parts of the weak differences that are strong enough somewhere."""
    opened = ndimage.binary_opening(weak, disc(_OPENING * scale)) if scale > _COARSE else weak
    labels, count = ndimage.label(
        closed(opened | strong, max(1.0, _CLOSING * scale)), np.ones((3, 3))
    )
    if not count:
        return np.zeros(weak.shape, bool)
    area = np.bincount(labels.ravel(), minlength=count + 1)
    strength = np.bincount(labels[strong], minlength=count + 1)
    solid, inside = np.zeros(count + 1, coarse.dtype), labels > 0
    # With numpy: scipy's own function sorts the whole picture.
    np.maximum.at(solid, labels[inside], coarse[inside])
    least = np.where(solid > _SOLID, _LEAST_SOLID_AREA, _LEAST_AREA) * weak.size
    stays = (strength >= _STRONG_PIXELS) & (strength > _STRONG_PART * area) & (area >= least)
    stays[0] = False
    return np.asarray(stays[labels])


def _lights(
    kept: Mask, drawn: Plane, reference: Plane, noise: Plane, valid: Mask, scale: float
) -> tuple[Mask, Plane]:
    """Return regions of light or shade, faint ones of these, and the light with its soft ends."""
    step = step_of(kept.shape)
    near, whole = max(0.25, scale / step), numbers(reduced(numbers(valid), step) > 0.99)
    own, other = (blurred(reduced(levels, step), 2 * near) for levels in (reference, drawn))
    base, sigma = own + NEVER_DARK, _GAIN_SIGMA * near
    square = np.maximum(blurred(np.square(base) * whole, sigma), 1.0)
    gain = blurred((other - own) * base * whole, sigma) / square
    light, differs = opponent(gain * base), opponent(other - own)
    size = length(light) * whole
    left, power = (np.square(one).sum(0) * whole for one in (differs - light, differs))
    core = _filled(reduced(numbers(kept), step) > 0)
    usual = blurred(np.square(reduced(noise, step)), sigma)
    quiet = (whole > 0) & ~within(core, 2 * sigma)
    around = float(np.median((blurred(power, sigma) / usual)[quiet])) if quiet.any() else 0.0
    part = blurred(left, sigma) / (usual * _LIGHT_LEFT * max(around, 0.5))
    over, end = (size > _LIGHT) & (part < 1), (size > _LIGHT_END) & (part < 2)
    core = _soft(core, over, size, left, power, near) & (part < 2)
    found, reach = (
        ndimage.binary_propagation(core, np.ones((3, 3)), mask=core | one) for one in (over, end)
    )
    trust = blurred(reach * np.clip(2 - part, 0, 1), 2 * near)
    mask = (resized(numbers(found), kept.shape) > 0.5) & valid
    return np.asarray(mask), np.concatenate([gain, trust[None]]).astype(np.float32)


def _soft(core: Mask, over: Mask, size: Plane, left: Plane, power: Plane, near: float) -> Mask:
    """Return the regions without a sharp border, which no smooth gain explains."""
    labels, count = ndimage.label(over, np.ones((3, 3)))
    area = np.bincount(labels.ravel(), minlength=count + 1)
    top, inside = np.zeros(count + 1), labels > 0
    if count:  # of the labelled pixels alone: scipy sorts all that it is given
        top[1:] = ndimage.median(size[inside], labels[inside], np.arange(1, count + 1))
    least = max(_LIGHT_ALONE, _LIGHT_ALONE_Z * float(np.quantile(size, 0.7)))
    alone = (area >= _LEAST_LIGHT_AREA * over.size) & (top > least)
    alone[labels[core]] = alone[0] = False
    core = core | alone[labels]
    if not core.any():
        return core
    labels, count = ndimage.label(core, np.ones((3, 3)))
    away, (y, x) = ndimage.distance_transform_edt(~core, return_indices=True)
    border = (np.maximum(away, distance_to(~core)) <= _BORDER * near) * labels[y, x]
    rest, whole = (np.bincount(border.ravel(), one.ravel(), count + 1) for one in (left, power))
    return np.asarray(core & (rest < _BORDER_LEFT * whole)[labels])


def _solid(mask: Mask, scale: float) -> Mask:
    """Remove thin parts of a mask."""
    return within(deeper(mask, _THIN * scale), _THIN * scale)


def _filled(mask: Mask) -> Mask:
    """Fill small holes."""
    labels, count = ndimage.label(~mask)
    if not count:
        return mask
    area = np.bincount(labels.ravel(), minlength=count + 1)
    area[0] = mask.size
    return np.asarray(mask | (area < _MOST_HOLE * mask.size)[labels])


def _to_the_border(mask: Mask, valid: Mask) -> Mask:
    """Extend the edit over pixels that were not drawn next to edited ones."""
    if valid.all() or not valid.any():
        return mask
    # The nearest drawn pixel of each, because the drawn ones are a rectangle.
    y, x = (
        np.clip(np.arange(side), *np.flatnonzero(valid.any(axis=other))[[0, -1]])
        for side, other in zip(valid.shape, (1, 0), strict=True)
    )
    return np.asarray(mask[y[:, None], x])
