"""What an edit changed outside itself, of any two pictures, whoever made them: a source and the
result of editing it.
"""

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from hyimg_cli.finishing.outside import edit_of
from hyimg_cli.finishing.placement import Placement, shown
from hyimg_cli.finishing.planes import distance_to, numbers, resized, scale_of
from hyimg_cli.journal.edited import given_region, told
from hyimg_cli.media.images import read_image, stretch
from hyimg_cli.spec.job import KeepOutside, Size

# Pictures are compared in at most so many pixels; equality is counted in all of them.
_AREA = 1_200_000
# Ratios that are further apart were cut, not stretched.
_SAME_RATIO = 0.02
# So far from an edit, for a megapixel, what hangs together with it is its blend into the source.
_BLEND = 64.0


def outside_of(source: Path, result: Path, outside: KeepOutside) -> dict[str, Any]:
    """The `edit` of a result line, as far as two files tell it; a result of the source's own size
    is also compared pixel by pixel outside the edit, or outside the region that stands for it.

    Raises SourceImageError for a file that is no picture, or a region that is not the source's.
    """
    own, other = (read_image(path) for path in (source, result))
    height, width = own.pixels.shape[:2]
    size = Size(height, width)
    drawn = other.pixels
    part = sqrt(min(1.0, _AREA / (drawn.shape[0] * drawn.shape[1])))
    if part < 1:
        drawn = stretch(drawn, Size(*(max(1, round(side * part)) for side in drawn.shape[:2])))
    ratio = (height / width) / (drawn.shape[0] / drawn.shape[1])
    fit = Placement.stretched if abs(ratio - 1) < _SAME_RATIO else Placement.covered
    place = fit((height, width), drawn.shape[:2])
    given = given_region(outside, size)
    found = edit_of(drawn, shown(own.pixels, place), place, given=given, mode=outside.region_mode)
    record = told(found, outside) | {"unseen": round(max(0.0, place.unseen), 4)}
    if own.pixels.shape != other.pixels.shape:
        return record | {"outside_equal": None, "outside_differing_pixels": None}
    differs = (own.pixels != other.pixels).any(axis=2)
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


def lines(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The record as rows of a table."""
    rows = [("kind", str(record["kind"])), ("edited area", f"{record['area']:.2%}")]
    rows += [("reason", reason) for reason in record["reasons"]]
    rows.append(("regions", str(record["regions"])))
    if record["outside_equal"] is not None:
        of = f"{record['outside_differing_pixels']:,} of {record['outside_pixels']:,}"
        rows.append(("pixels that differ outside", of))
        rows.append(("pixels that differ", f"{record['differing_pixels']:,}"))
    redraw, moved = record["redraw"], record["moved"]
    rows.append(("change outside (CIE76)", f"mean {redraw['mean_de']}, 99 % {redraw['p99_de']}"))
    rows.append(("drift of colour (CIE76)", str(record["drift"])))
    rows.append(("moved", f"{moved['shift_px']} pixels, zoom {moved['zoom']:+}"))
    if record["spill"] is not None:
        rows.append(("edit outside the region", f"{record['spill']:.2%}"))
    return rows
