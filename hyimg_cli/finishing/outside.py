"""Find what a redraw edited, and return the source with only that changed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import hypot
from typing import Any

import numpy as np
from scipy import ndimage

from hyimg_cli.finishing.background import stays_of
from hyimg_cli.finishing.colour import Drift, drift_between, drift_of, smoothed, unmoved
from hyimg_cli.finishing.composite import Bytes, OwnNumbers, composite, layers
from hyimg_cli.finishing.placement import Placement, mapped_back
from hyimg_cli.finishing.planes import (
    Mask,
    Pixels,
    Plane,
    length,
    numbers,
    opponent,
    planes,
    reduced,
    resized,
    scale_of,
    step_of,
)
from hyimg_cli.finishing.region import BlurredView, EditMask, region, views
from hyimg_cli.finishing.registration import Motion, lightness, registered
from hyimg_cli.finishing.verdict import (
    Kind,
    Measures,
    chroma_of,
    cie76,
    is_most,
    rim_of,
    structure_of,
)

_RIM = 3.0
# Source pixels per drawn pixel, from which an edit looks soft.
_SOFT = 2.0
# A different registration without the edit is trusted.
_MOVED_AGAIN = 0.1
# The minimum correlation of the rest of a picture that did not move.
_STILL_ALIKE = 0.9
# A larger edit leaves too little of the picture to measure a drift.
_MOST_AREA = 0.7
# Pixels around a user's region that may still be blended, if the region is a limit: none.
_LIMIT, _INSTEAD = "limit", "instead"
_KEPT: Kind = "local"
_REPLACED: Kind = "background"


@dataclass(frozen=True)
class Edit:
    """What a redraw did to its source.

    `mask` [Y, X]: the edited pixels at the drawn size, limited by the given region. `found`: the
    same without that limit. `allowed`: that region, None without one. `reasons`: why the whole
    picture counts as edited, which a region may limit to a `local` edit. `still`: the placement of
    the reference; `placement`: that of the redraw, with its motion. `seen`: the motion as found,
    even if it was too large to be undone and `motion` is none. `spill`: the part of `found` outside
    the region. `outside`: mean and 99th percentile of the redraw's distance from the source outside
    the mask.
    """

    kind: Kind
    reasons: tuple[str, ...]
    mask: Mask
    found: Mask
    allowed: Mask | None
    still: Placement
    placement: Placement
    drift: Drift
    motion: Motion
    seen: Motion
    measures: Measures
    outside: tuple[float, float]
    spill: float | None
    reference: Plane
    drawn: Plane
    light: Plane

    @property
    def area(self) -> float:
        """Return the edited part of the source; the redraw may show only a part of it."""
        shown = 1.0 if self.kind == "global" else 1 - self.still.unseen
        return float(self.mask.mean()) * shown

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return why the verdict may be wrong and the redraw should be checked."""
        found, is_global = [], self.kind == "global"
        if not is_global and not self.measures.is_sure:
            found.append(
                "the redraw differs from the source outside the edit, as after a change of style: "
                "check the redraw"
            )
        # An undetermined zoom looks like other structure, and like nothing else.
        is_plain = is_global and not all(why.startswith("structure") for why in self.reasons)
        if not self.seen.is_sure and not is_plain:
            found.append(
                "the picture has too little detail to tell whether it was shifted or zoomed"
            )
        scale = self.placement.pixels_per_drawn
        if self.allowed is not None and self.still.unseen and scale > _SOFT:
            found.append(
                f"the region is drawn at {scale:.1f} pixels of the source per drawn pixel, so it "
                "is softer than the source"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return the parts of a result line's `edit` that the redraw determines."""
        moved = zip(self.seen.zoom, self.seen.shift, self.mask.shape, strict=True)
        # How far the middle of the picture moved, in drawn pixels.
        shift_px = hypot(*((zoom - 1) * side / 2 + shift for zoom, shift, side in moved))
        zoom = max((round(zoom - 1, 5) for zoom in self.seen.zoom), key=lambda by: abs(by))
        # Of what the model was shown: the source, or a crop with all of the region.
        seen = (1 - self.placement.unseen) / (1 - self.still.unseen)
        unseen = max(0.0, 1 - seen) if self.measures.moved else 0.0
        return {
            "kind": self.kind,
            "reasons": list(self.reasons),
            "doubts": list(self.doubts),
            "area": round(self.area, 5),
            "regions": self.measures.regions,
            "redraw": {"mean_de": round(self.outside[0], 2), "p99_de": round(self.outside[1], 2)},
            "drift": round(self.measures.drift, 2),
            "moved": {"zoom": zoom, "shift_px": round(shift_px, 2), "sure": self.seen.is_sure},
            "scale": round(self.placement.pixels_per_drawn, 2),
            "unseen": round(unseen, 4),
            "spill": None if self.spill is None else round(self.spill, 4),
        }


@dataclass(frozen=True)
class Result:
    """A finished edit: `pixels` [H, W, 3] and `matte` [H, W], 0 where the source was copied.

    `numbers`: the pixels in the source's own numbers; the same array if those are sRGB's.
    """

    pixels: Pixels
    matte: Bytes
    numbers: Pixels


def edit_of(
    drawn: Pixels,
    reference: Pixels,
    placement: Placement,
    *,
    given: Bytes | None = None,
    mode: str = _LIMIT,
) -> Edit:
    """Compare a redraw with its reference, both at the drawn size.

    `given` [H, W] at the source's size is above 0 where the user allows an edit. By `mode`, it
    limits the edit that is found, or replaces it.
    """
    r, m = planes(reference), planes(drawn)
    own = None if given is None else _fitted(given, placement)
    is_limited = given is not None and (mode == _INSTEAD or int(given.min()) < 255)
    read, kind, spill = _by_all(r, m, seen := views(r)), _KEPT, None
    if read.reasons:
        kept = None if own is None or own.all() else ~own
        if (stays := _by_part(r, m, seen, kept)) is not None:
            read, kind = stays, _REPLACED
    reasons, drift, moved, light = read.reasons, read.drift, read.moved, read.light
    mask = edited = np.ones_like(read.mask) if reasons else read.mask
    if own is not None:
        spill = float((edited & ~own).sum() / edited.sum()) if edited.any() else 0.0
        mask = own if mode == _INSTEAD else edited & own
        kind = kind if is_most(mask) else _KEPT
    if is_limited and reasons:
        # The drift of a completely different picture is none.
        drift, moved, light = unmoved(drift), read.motion.applied(m), np.zeros_like(light)
        # With `instead` the user decides, so no reasons are given.
        reasons = reasons if mode == _LIMIT else ()
    kind = kind if mask.any() else "none"
    difference = _distance(r, m, mask)
    if reasons and not is_limited:
        kind, difference = "global", _distance(r, m, read.mask)
    return Edit(
        kind,
        reasons,
        mask,
        edited,
        own,
        placement,
        placement.moved(read.motion.zoom, read.motion.shift),
        drift,
        read.motion,
        read.seen,
        read.measures,
        difference,
        spill,
        r,
        moved,
        light,
    )


def put_back(
    source: Pixels,
    drawn: Pixels,
    reference: Pixels,
    edit: Edit,
    given: Bytes | None = None,
    own: OwnNumbers | None = None,
) -> Result:
    """Put the edit on its source. For `none`, return the source; for `global`, the whole redraw.

    All pixels are in sRGB; `own`: the source's numbers, if they are others.
    """
    height, width = source.shape[:2]
    if edit.kind == "none":
        pixels = source.copy()
        in_own = pixels if own is None else own.pixels.copy()
        return Result(pixels, np.zeros((height, width), np.uint8), in_own)
    if edit.kind == "global":
        rows = range(0, height, 512)
        pixels = np.empty_like(source)
        for top in rows:
            here = top, min(height, top + 512)
            pixels[slice(*here)] = mapped_back(drawn, edit.placement, here, (0, width))
        in_own = pixels if own is None else own.of_srgb(pixels)
        return Result(pixels, np.full((height, width), 255, np.uint8), in_own)
    what = layers(edit.reference, edit.drawn, edit.mask, edit.mask | edit.found, edit.light)
    place = edit.still, edit.placement, edit.drift
    return Result(*composite(source, drawn, reference, *place, what, given, own))


@dataclass(frozen=True)
class _Reading:
    """A redraw compared with its reference: `moved` is without the motion and the drift.

    `seen`: the motion as found, even if it was too large to be undone. `reasons`: why the whole
    picture counts as edited.
    """

    motion: Motion
    seen: Motion
    drift: Drift
    moved: Plane
    mask: Mask
    light: Plane
    measures: Measures
    reasons: tuple[str, ...]


def _by_all(r: Plane, m: Plane, seen: list[BlurredView]) -> _Reading:
    """Compare a redraw with its reference if most of the picture is the same."""
    moved_back = cache(lambda motion: _moved_back(m, motion))
    motion, too_far, rough = _motion_of(r, m, moved_back)
    moved, valid = moved_back(motion)
    drift = drift_of(r, moved, None if rough.mean() > _MOST_AREA else rough, scale_of(valid.shape))
    moved = drift.undone(moved, r)
    found = region(moved, r, seen, valid)
    measures = _measures(r, m, moved, drift, found, too_far is not None)
    motions = motion, too_far or motion
    return _Reading(*motions, drift, moved, found.mask, found.light, measures, measures.reasons)


def _by_part(r: Plane, m: Plane, seen: list[BlurredView], kept: Mask | None) -> _Reading | None:
    """Compare them by the part that stays: everything else is the edit. None if no part stays.

    `kept`: the part that the user keeps.
    """
    stays = stays_of(r, m, seen, kept)
    if stays is None or (kept is None and not is_most(~stays.part)):
        return None
    mask, small = ~stays.part, reduced(m, 2)
    taken = length(opponent(stays.drift.undone(small) - small))
    edited = _wider(mask)
    measures = Measures(
        drift=float(taken[reduced(numbers(stays.part), 2) > 0].mean()),
        noise=stays.found.noise,
        area=float(mask.mean()),
        rim=rim_of(mask),
        regions=int(ndimage.label(mask, np.ones((3, 3)))[1]),
        structure=structure_of(r, stays.moved, edited),
        chroma=chroma_of(r, m, edited),
        moved=False,
    )
    lost = 0.0 if kept is None else float(mask[kept].mean())
    if replace(measures, area=lost, rim=0.0, regions=0).reasons:
        return None
    motions, light = (stays.motion, stays.motion), stays.found.light
    drift = replace(stays.drift, keeps_clipped=True)
    return _Reading(*motions, drift, stays.moved, mask, light, measures, ())


def _motion_of(
    r: Plane, m: Plane, moved_back: Callable[[Motion], tuple[Plane, Mask]]
) -> tuple[Motion, Motion | None, Mask]:
    """Return the motion to undo, the found one if it is too large, and a rough mask.

    `moved_back`: the redraw without a motion, and its own pixels. Registration is repeated without
    the mask, because the edit itself may be what moved.
    """
    shape = m.shape[1], m.shape[2]
    small, both = reduced(r, step_of(shape)), (lightness(r), lightness(m))
    seen = views(small)
    motion, too_far = registered(*both), None
    if motion.is_too_far(shape):
        motion, too_far = Motion(), motion
    rough = _rough(small, *moved_back(motion), seen)
    if not rough.any():
        return motion, too_far, rough
    edited = _wider(rough)
    again = registered(*both, edited)
    if again.is_too_far(shape):
        return motion, too_far, rough
    if too_far is not None:
        # Chance similarities in a reframed picture also say so.
        structure = structure_of(r, m, edited)
        if structure is not None and structure < _STILL_ALIKE:
            return motion, too_far, rough
    if _apart(again, motion, shape) > _MOVED_AGAIN:
        return again, None, _rough(small, *moved_back(again), seen)
    return replace(motion, is_sure=again.is_sure), None, rough


def _rough(small_r: Plane, moved: Plane, valid: Mask, seen: list[BlurredView]) -> Mask:
    """Return the region [Y, X] that is edited, found at half size by drift and region in turn.

    `moved`: the redraw without motion; `valid`: its own pixels; `seen`: views of the reference at
    half size.
    """
    shape = valid.shape[0], valid.shape[1]
    step, scale = step_of(shape), scale_of(shape)
    small_m, small_valid = reduced(moved, step), reduced(numbers(valid), step) > 0.99
    both, mask = (smoothed(small_r, scale / step), smoothed(small_m, scale / step)), None
    for _ in range(2):
        drift = drift_between(*both, mask, scale / step)
        mask = region(drift.undone(small_m, small_r), small_r, seen, small_valid).mask
    assert mask is not None, "there were turns"
    return np.asarray(resized(numbers(mask), shape) > 0.25)


def _moved_back(m: Plane, motion: Motion) -> tuple[Plane, Mask]:
    """Return the redraw moved onto the reference, and a mask of its own pixels."""
    shape = m.shape[1], m.shape[2]
    rim = _RIM * scale_of(shape) if motion != Motion() else 0.0
    return motion.applied(m), motion.inside(shape, rim)


def _measures(
    r: Plane, m: Plane, moved: Plane, drift: Drift, found: EditMask, moved_away: bool
) -> Measures:
    small = reduced(m, 2)
    plain = drift.undone(small) - small
    # Without the edit's blurred rim, which has the edit's colours.
    edited = _wider(found.mask)
    taken = float(length(opponent(plain)).mean())
    return Measures(
        drift=taken,
        noise=found.noise,
        area=float(found.mask.mean()),
        rim=rim_of(found.mask),
        regions=found.regions,
        structure=structure_of(r, moved, edited),
        chroma=chroma_of(r, m, edited),
        moved=moved_away,
    )


def _wider(mask: Mask) -> Mask:
    """Return the mask grown over an edit's blurred halo, which is not structure of the source.

    With 4 pixels, 371 of 800 local edits on plain backgrounds counted as edits of the whole.
    """
    reach = max(1, round(12 * scale_of(mask.shape)))
    return np.asarray(ndimage.maximum_filter(mask, 2 * reach + 1))


def _apart(a: Motion, b: Motion, shape: tuple[int, ...]) -> float:
    """Return the largest distance between two motions, in pixels."""
    return max(
        abs((a.zoom[axis] - b.zoom[axis]) * at + a.shift[axis] - b.shift[axis])
        for axis in (0, 1)
        for at in (0, shape[axis])
    )


def _distance(r: Plane, m: Plane, mask: Mask) -> tuple[float, float]:
    """Return the CIE 1976 distance of the redraw as drawn from the reference, outside the mask."""
    outside = ~mask[::2, ::2]
    if not outside.any():
        return 0.0, 0.0
    difference = cie76(*(levels[:, ::2, ::2][:, outside].T for levels in (r, m)))
    return float(difference.mean()), float(np.quantile(difference, 0.99))


def _fitted(given: Bytes, placement: Placement) -> Mask:
    """Resize a region from the source's size to the drawn size."""
    y, x = (
        np.clip(
            ((np.arange(axis.drawn) + 0.5 + axis.offset) / axis.scale).astype(int),
            0,
            axis.length - 1,
        )
        for axis in (placement.y, placement.x)
    )
    return np.asarray(given[y[:, None], x[None]] > 0)
