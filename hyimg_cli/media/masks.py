"""Masks: which pixels of a picture may be edited, and by how much.

A mask is white where edits are allowed. Of one with transparency, its alpha channel cannot say what
is meant: a hole in a photo and strokes on a clear layer look alike. Nor can colours under clear
pixels, which programs leave there by chance. So its user says it.

A mask of more than two levels is soft: it blends. The levels that lossy compression adds to a mask
of two are not meant, so a lossy file is soft only if its edges are wide.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hyimg_cli.errors import SourceImageError
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import Box

Levels = NDArray[np.uint8]
# Compression moves black and white by at most this many levels, where there is no edge nearby.
_NOISE = 8
# A soft edge has more pixels between black and white than this, for each pixel of its length. A
# JPEG of quality 20 adds up to 2.5 to a mask of two levels; a blur of 2 pixels makes 6 to 8.
_MOST_OF_AN_EDGE = 5
# Parts of a mask are apart from this many pixels on: nearer ones see each other in any crop. Of a
# mask with more parts, the nearest ones count as one.
_APART, MOST_PARTS = 64, 8
# Two sizes have the same shape if their ratios differ by no more.
_SAME_SHAPE = 0.005


def levels_of(mask: Image.Image, edits_where: str, path: Path, white: str) -> Levels:
    """Return a mask's levels [H, W] as they are: its brightness, or its alpha channel.

    `mask`: upright, RGBA only if it has transparency. `edits_where`: `transparent` or `opaque`,
    if its alpha channel decides. `white`: what is white, in messages. Raises SourceImageError,
    `source.region`, if the mask has two readings.
    """
    has_alpha = mask.mode == "RGBA"
    levels = np.asarray(mask.getchannel("A") if has_alpha else mask.convert("L"))
    flat = f"a mask without transparency, white {white}"
    if has_alpha and not edits_where:
        share = share_of(255 - levels)
        what = "the mask has transparency, which has two readings: white is the transparent "
        what += f"{share:.0%} of the picture, or the opaque {1 - share:.0%}"
        raise fault(what, f"write region as transparent:PATH or opaque:PATH, or give {flat}", path)
    if edits_where and not has_alpha:
        raise fault(
            "the mask is not transparent anywhere", f"erase parts of it, or give {flat}", path
        )
    return 255 - levels if edits_where == "transparent" else levels


def to_blend(levels: Levels, *, is_lossy: bool) -> Levels:
    """Return the levels [H, W] by which a mask blends: of one that is not soft, only 0 and 255.

    `is_lossy`: the file's compression may have added levels.
    """
    counts, hard = counts_of(levels), levels > 127
    is_soft = int((counts > 0).sum()) > 2
    if is_soft and is_lossy:
        edge = sum(int(np.diff(hard, axis=axis).sum()) for axis in (0, 1))
        black, white = int(counts[:128].argmax()), 128 + int(counts[128:].argmax())
        between = counts[black + _NOISE + 1 : white - _NOISE].sum()
        is_soft = int(between) > _MOST_OF_AN_EDGE * edge
    if not is_soft:
        return np.where(hard, np.uint8(255), np.uint8(0))
    if is_lossy:
        levels = np.where(levels <= _NOISE, np.uint8(0), levels)
        levels = np.where(levels >= 255 - _NOISE, np.uint8(255), levels)
    return levels


def are_alike(mask: Size, source: Size) -> bool:
    """Return True if a mask of one size can be resized to the other without a change of shape."""
    ratio = mask.width * source.height / (mask.height * source.width)
    return abs(ratio - 1) <= _SAME_SHAPE


def resized(levels: Levels, size: Size) -> Levels:
    """Return levels [H, W] at another size, each pixel with the level at its centre."""
    if levels.shape == (size.height, size.width):
        return levels
    y, x = (
        (2 * np.arange(new) + 1) * old // (2 * new)
        for new, old in zip((size.height, size.width), levels.shape, strict=True)
    )
    return np.asarray(levels[y[:, None], x])


def levels_in(path: Path) -> Levels | None:
    """Return the levels [H, W] of a matte that an edit wrote; None if it cannot be read."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("L"))
    except OSError:
        return None


def parts_of(levels: Levels) -> tuple[Box, ...]:
    """Return boxes, which do not overlap, of the parts of levels [H, W] that are apart.

    Levels are above 0 in parts. Each cut is along the widest empty stripe through a part. Boxes are
    in the order of their top, then left side.
    """
    bounds = Image.fromarray(levels).getbbox()
    parts = [] if bounds is None else [bounds]
    gaps = {box: _widest_gap(levels, box) for box in parts}
    while len(parts) < MOST_PARTS and parts:
        box = max(parts, key=lambda one: gaps[one].stop - gaps[one].start)
        if (gap := gaps[box]).stop - gap.start < _APART:
            break
        parts.remove(box)
        left, top, right, bottom = box
        halves = (left, top, right, gap.start), (left, gap.stop, right, bottom)
        if gap.axis:
            halves = (left, top, gap.start, bottom), (gap.stop, top, right, bottom)
        for half in map(partial(_shrunk, levels), halves):
            parts.append(half)
            gaps[half] = _widest_gap(levels, half)
    return tuple(sorted(parts, key=lambda one: (one[1], one[0])))


def do_overlap(boxes: Sequence[Box]) -> bool:
    """Return True if two of the boxes share a pixel."""
    return any(
        max(a[0], b[0]) < min(a[2], b[2]) and max(a[1], b[1]) < min(a[3], b[3])
        for a, b in combinations(boxes, 2)
    )


class _Gap(NamedTuple):
    """A stripe without edits: rows, or columns if `axis` is 1, from `start` up to `stop`."""

    start: int
    stop: int
    axis: int


def _widest_gap(levels: Levels, box: Box) -> _Gap:
    left, top, right, bottom = box
    part, widest = levels[top:bottom, left:right], _Gap(0, 0, 0)
    for axis, first in enumerate((top, left)):
        used = np.flatnonzero(part.any(1 - axis))
        at = int(np.diff(used).argmax()) if len(used) > 1 else 0
        start, stop = used[at] + 1, used[min(at + 1, len(used) - 1)]
        if stop - start > widest.stop - widest.start:
            widest = _Gap(first + int(start), first + int(stop), axis)
    return widest


def _shrunk(levels: Levels, box: Box) -> Box:
    """Return the bounds of the part in a box, which is not empty."""
    left, top, right, bottom = box
    inner = Image.fromarray(levels[top:bottom, left:right]).getbbox()
    assert inner is not None, "a gap is between parts"
    return left + inner[0], top + inner[1], left + inner[2], top + inner[3]


def counts_of(levels: Levels) -> NDArray[np.int64]:
    """Return the number of pixels of each level [256]."""
    return np.array(Image.fromarray(levels).histogram())


def share_of(levels: Levels) -> float:
    """Return the fraction of a picture in which levels [H, W] allow edits."""
    return round(float((levels > 127).mean()), 5)


def share_text(share: float) -> str:
    """Return the fraction of a picture that a region is, in words."""
    return f"{share:.{0 if share >= 0.1 else 1}%} of the picture"


def region_text(record: Mapping[str, Any]) -> str:
    """Return how an edit's region was read, in words; empty for an edit without a region."""
    if (share := record.get("region_area")) is None:
        return ""
    text = share_text(share)
    if blends := record.get("region_blends"):
        text += f"; the soft mask blends {share_text(blends)}"
    if size := record.get("region_mask"):
        text += f"; the mask of {size[0]}x{size[1]} was resized to the source"
    return text


def fault(what: str, hint: str, where: Path) -> SourceImageError:
    """Return the error of a region that is not one of its source."""
    return SourceImageError(what, where=where, hint=hint, code="source.region")
