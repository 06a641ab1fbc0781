"""Blend an edit into its source at the source's size; copy everything outside the matte."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from hyimg_cli.finishing.colour import Drift
from hyimg_cli.finishing.placement import Placement, mapped_back
from hyimg_cli.finishing.planes import (
    NEVER_DARK,
    Mask,
    Pixels,
    Plane,
    beyond_of,
    blurred,
    closed,
    distance_to,
    length,
    luma,
    numbers,
    opponent,
    planes,
    range_within,
    resized,
    scale_of,
    within,
)

Bytes = NDArray[np.uint8]
# A matte is 1 up to this distance from the mask, and falls to 0 over this many more pixels: at its
# edge, and where the redraw still differs. Its edge is at least as wide as for a picture of this
# scale.
_EDGE, _FEATHER, _LEAST_EDGE = (0.5, 2.0), (4.0, 12.0), 0.8
# A difference counts from this multiple of the redraw's noise nearby, and from this many opponent
# levels.
_SIGMA, _QUIET, _OVER, _WHOLE, _LEAST = 1.5, 16.0, 2.0, 2.5, 1.5
_LIKE, _SURE_LIKE, _MOST_DETAIL, _WINDOW = 0.6, 0.9, 1.25, 5.0
# Gaps in an edit up to twice this wide get none of the source's fine structure that the redraw left
# out: the user may have wanted it removed.
_GAP = 8.0
_STRIP = 256


@dataclass(frozen=True)
class Layers:
    """Layers to blend, in the drawn size, aligned with the reference.

    `matte` [Y, X]: 0 to 1. `detail` [Y, X]: how much of the source's fine lightness belongs on the
    edit. `around`: 1 where nothing near was edited, so all of it belongs there. `light`: the light
    that was found, which is applied to the source's own pixels.
    """

    matte: Plane
    detail: Plane
    around: Plane
    light: Plane


@dataclass(frozen=True)
class OwnNumbers:
    """A source's numbers [H, W, 3], where they are not sRGB's, and the conversion to them."""

    pixels: Pixels
    of_srgb: Callable[[Pixels], Pixels]


def layers(reference: Plane, drawn: Plane, mask: Mask, edited: Mask, light: Plane) -> Layers:
    """Make the layers from levels [3, Y, X] without motion and drift; `mask`: part of `edited`."""
    gap = max(1.0, _GAP * scale_of(mask.shape))
    detail, around = _detail(reference, drawn), numbers(~closed(edited, gap))
    matte = np.maximum(_matte(reference, drawn, mask, edited), resized(light[3], mask.shape))
    return Layers(matte, detail * (1 - around), around, light)


def composite(
    source: Pixels,
    drawn: Pixels,
    reference: Pixels,
    still: Placement,
    placement: Placement,
    drift: Drift,
    what: Layers,
    given: Bytes | None = None,
    own_numbers: OwnNumbers | None = None,
) -> tuple[Pixels, Bytes, Pixels]:
    """Return the result [H, W, 3], its matte [H, W] and the result in the source's own numbers.

    The matte is in levels of 255; all are at the source's size.
    `still`: the placement of the reference. `placement`: that of the redraw, with its motion.
    `given` [H, W]: the highest levels of the matte, 0 where the user allows no edit. Works in
    strips, so a large source takes little memory.
    """
    result, matte = source.copy(), np.zeros(source.shape[:2], np.uint8)
    in_own = result if own_numbers is None else own_numbers.pixels.copy()
    has_light, trust = bool(what.light[3].any()), np.zeros(1, np.float32)
    for rows, columns in _strips(what.matte, still, source.shape[:2]):
        shape = rows[1] - rows[0], columns[1] - columns[0]
        box = _box(still, rows, columns)
        place = slice(*rows), slice(*columns)
        alpha = resized(what.matte, shape, _in(what.matte, box))
        if given is not None:
            alpha = np.minimum(alpha, given[place].astype(np.float32) / 255)
        levels = np.asarray(np.round(alpha * 255), np.uint8)
        if not levels.any():
            continue
        own = planes(source[place])
        fitted = planes(mapped_back(reference, still, rows, columns))
        redraw = drift.undone_in(
            planes(mapped_back(drawn, placement, rows, columns)), box, reference=fitted
        )
        lost = own - fitted
        redraw += luma(lost) * resized(what.detail, shape, _in(what.detail, box))
        redraw += lost * resized(what.around, shape, _in(what.around, box))
        if has_light:
            trust = resized(what.light[3], shape, _in(what.light, box))
            gain = resized(what.light[:3], shape, _in(what.light, box))
            redraw += trust * (own + gain * (own + NEVER_DARK) - redraw)
        alpha = levels.astype(np.float32) / 255
        # Selected, not computed: everything outside is copied.
        is_edit = (levels > 0)[..., None]
        np.copyto(result[place], _bytes(own + alpha * (redraw - own)), where=is_edit)
        if own_numbers is not None:
            first = planes(own_numbers.pixels[place])
            other = planes(own_numbers.of_srgb(_bytes(redraw)))
            # The model saw no colours beyond sRGB: they belong only where nothing was edited.
            beyond = first - planes(own_numbers.of_srgb(source[place]))
            other += beyond * np.maximum(trust, resized(what.around, shape, _in(what.around, box)))
            blended = _bytes(first + alpha * (other - first))
            np.copyto(in_own[place], blended, where=is_edit)
        matte[place] = levels
    return result, matte, in_own


def _bytes(levels: Plane) -> Pixels:
    """Return levels [3, Y, X] as a picture [Y, X, 3]."""
    return np.clip(np.round(levels), 0, 255).astype(np.uint8).transpose(1, 2, 0)


def _matte(reference: Plane, drawn: Plane, mask: Mask, edited: Mask) -> Plane:
    """Return 1 at the mask, falling smoothly to 0.

    At once where the redraw equals the source, to leave out its noise; later where it differs.
    """
    scale, away = scale_of(mask.shape), distance_to(mask)
    own, other = (blurred(opponent(levels), _SIGMA * scale) for levels in (reference, drawn))
    size = length(beyond_of(other, *range_within(own, 1)))
    quiet = size[~within(edited, _QUIET * scale)]
    noise = float(quiet.mean()) if quiet.size else 0.0
    differs = np.clip((size / max(_LEAST, _OVER * noise) - 1) / (_WHOLE - 1), 0, 1)
    reach = 2 * round(scale) + 1
    differs = blurred(ndimage.maximum_filter(differs, reach), scale)
    further = _fallen(away, _FEATHER, scale) * differs
    edge = _fallen(away, _EDGE, max(_LEAST_EDGE, scale))
    return np.asarray(np.maximum(edge, further), np.float32)


def _fallen(away: Plane, ends: tuple[float, float], scale: float) -> Plane:
    ramp = np.clip(1 - (away - ends[0] * scale) / (ends[1] * scale), 0, 1)
    return np.asarray(ramp * ramp * (3 - 2 * ramp), np.float32)


def _detail(reference: Plane, drawn: Plane) -> Plane:
    """Return the weight of the source's fine structure: 1 where the redraw kept it."""
    window = max(1.0, _WINDOW * scale_of(reference.shape[1:]) / 2)
    fine = [plane - blurred(plane, 2 * window) for plane in (luma(reference), luma(drawn))]
    power = [blurred(np.square(one), window) for one in fine]
    alike = blurred(fine[0] * fine[1], window) / np.sqrt(power[0] * power[1] + 1.0)
    contrast = np.sqrt((power[1] + 0.5) / (power[0] + 0.5))
    weight = np.clip((alike - _LIKE) / (_SURE_LIKE - _LIKE), 0, 1)
    return np.asarray(weight * np.minimum(contrast, _MOST_DETAIL), np.float32)


def _strips(
    matte: Plane, still: Placement, size: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield rows and columns of the source that the matte reaches, some rows at a time."""
    if not matte.any():
        return
    spans = []
    for axis, place in ((0, still.y), (1, still.x)):
        (at,) = np.nonzero(matte.any(axis=1 - axis))
        first = (at[0] - 1 + place.offset) / place.scale
        last = (at[-1] + 2 + place.offset) / place.scale
        low, high = place.window
        spans.append((max(low, int(first)), min(high, int(last) + 1)))
    for top in range(spans[0][0], spans[0][1], _STRIP):
        yield (top, min(top + _STRIP, spans[0][1])), spans[1]


def _box(
    still: Placement, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a part of the source as fractions of what was shown."""
    return tuple(
        min(1.0, max(0.0, axis.at(at[end]) / axis.drawn))
        for end in (0, 1)
        for axis, at in ((still.x, columns), (still.y, rows))
    )  # type: ignore[return-value]


def _in(plane: Plane, box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    y, x = plane.shape[-2:]
    return box[0] * x, box[1] * y, box[2] * x, box[3] * y
