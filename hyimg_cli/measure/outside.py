"""What an edit changed outside itself, of any two pictures, whoever made them: a source and the
result of editing it.
"""

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from hyimg_cli.errors import SourceImageError
from hyimg_cli.finishing.outside import edit_of
from hyimg_cli.finishing.placement import Placement, shown
from hyimg_cli.finishing.planes import distance_to, numbers, resized, scale_of
from hyimg_cli.journal.edited import told
from hyimg_cli.media.carried import Bytes, read_carried, region_of
from hyimg_cli.media.images import read_image, stretch
from hyimg_cli.spec.job import KeepOutside, Size

# Pictures are compared in at most so many pixels; equality is counted in all of them.
_AREA, _LEAST_SIDE = 1_200_000, 8
# Ratios that are further apart were cut, not stretched.
_SAME_RATIO = 0.02
# So far from an edit, for a megapixel, what hangs together with it is its blend into the source.
_BLEND = 64.0


def outside_of(source: Path, result: Path, outside: KeepOutside) -> dict[str, Any]:
    """The `edit` of a result line, as far as two files tell it; a result of the source's own size
    is also compared pixel by pixel outside the edit, or outside the region that stands for it, in
    its alpha too; not where 8 bits a channel of RGB cannot tell.

    Raises SourceImageError for a file that is no picture, or a region that is not the source's.
    """
    own, other = (read_image(path) for path in (source, result))
    height, width = own.pixels.shape[:2]
    size = Size(height, width)
    drawn = other.pixels
    part = sqrt(min(1.0, _AREA / (drawn.shape[0] * drawn.shape[1])))
    sides = Size(*(max(_LEAST_SIDE, round(side * part)) for side in drawn.shape[:2]))
    if drawn.shape[:2] != (sides.height, sides.width):
        drawn = stretch(drawn, sides)
    ratio = (height / width) / (drawn.shape[0] / drawn.shape[1])
    fit = Placement.stretched if abs(ratio - 1) < _SAME_RATIO else Placement.covered
    place = fit((height, width), drawn.shape[:2])
    given = region_of(outside, size)
    found = edit_of(drawn, shown(own.pixels, place), place, given=given, mode=outside.region_mode)
    record = told(found, outside) | {"unseen": round(max(0.0, place.unseen), 4)}
    before, after = (_numbers(path) for path in (source, result))
    if before is None or after is None or before.shape != after.shape:
        return record | {"outside_equal": None, "outside_differing_pixels": None}
    differs = (before != after).any(axis=2)
    mask = resized(numbers(found.mask), (height, width)) > 0.5
    # A blend has gaps where rounding gives the source again.
    near = ndimage.maximum_filter(differs | mask, 7)
    labels, _ = ndimage.label(near, np.ones((3, 3)))
    own_labels = np.unique(labels[mask])
    blend = np.isin(labels, own_labels[own_labels > 0])
    free = ~(blend & (distance_to(mask) <= _BLEND * scale_of((height, width))))
    if given is not None and outside.region_mode == "instead":
        free = given <= 127
    count = int((differs & free).sum())
    return record | {
        "outside_equal": count == 0,
        "outside_differing_pixels": count,
        "outside_pixels": int(free.sum()),
        "differing_pixels": int(differs.sum()),
    }


def _numbers(path: Path) -> Bytes | None:
    """RGBA [H, W, 4] as the file has it; None where it has more than 8 bits tell."""
    try:
        own = read_carried(path).own
    except SourceImageError:
        return None
    colours = own if own.ndim == 3 else np.repeat(own[..., None], 3, axis=2)
    opaque = np.full((*own.shape[:2], 4 - colours.shape[2]), 255, np.uint8)
    return np.concatenate([colours, opaque], axis=2)


def lines(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The record as rows of a table."""
    rows = [("kind", str(record["kind"])), ("edited area", f"{record['area']:.2%}")]
    rows += [("reason", reason) for reason in record["reasons"]]
    rows.append(("regions", str(record["regions"])))
    if record["outside_equal"] is not None:
        of = f"{record['outside_differing_pixels']:,} of {record['outside_pixels']:,}"
        rows.append(("pixels that differ outside", of))
        rows.append(("pixels that differ", f"{record['differing_pixels']:,}"))
    else:
        why = "not compared: other sizes, or more than 8 bits a channel of RGB"
        rows.append(("pixels that differ outside", why))
    redraw, moved = record["redraw"], record["moved"]
    rows.append(("change outside (CIE76)", f"mean {redraw['mean_de']}, 99 % {redraw['p99_de']}"))
    rows.append(("drift of colour (CIE76)", str(record["drift"])))
    unsure = "" if moved["sure"] else "; the picture says too little to be sure"
    rows.append(("moved", f"{moved['shift_px']} pixels, zoom {moved['zoom']:+}{unsure}"))
    if record["spill"] is not None:
        rows.append(("edit outside the region", f"{record['spill']:.2%}"))
    return rows
