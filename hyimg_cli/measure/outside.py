"""Measure what an edit changed outside itself, for any source and result, of hyimg or not."""

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from hyimg_cli.errors import SourceImageError
from hyimg_cli.finishing.outside import edit_of
from hyimg_cli.finishing.placement import AxisMap, Placement, shown
from hyimg_cli.finishing.planes import Mask, distance_to, scale_of
from hyimg_cli.finishing.verdict import Change
from hyimg_cli.journal.edit_facts import list_breaches
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.measure.replay.run_folder import run_of
from hyimg_cli.media.carried import (
    check_region,
    own_picture,
    own_upright,
    region_facts,
    region_of,
)
from hyimg_cli.media.history import History, recorded_history
from hyimg_cli.media.images import Picture, Pixels, Upright, on_white, pixel_digest, text_of
from hyimg_cli.media.masks import region_text, resized
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import KeepOutside

# Edits are searched in at most this many pixels; all pixels are compared, this many at a time.
_AREA, _LEAST_SIDE, _STRIP = 1_200_000, 8, 4_000_000
# Pictures whose ratios differ by more were cropped, not stretched.
_SAME_RATIO = 0.02
# Within this distance of an edit, per megapixel, connected differences are its blend into the
# source, in which rounding leaves gaps.
_BLEND, _GAP = 64.0, 3
_OUTSIDE = {
    "matte": "where the run's matte is 0",
    "touched": "where no edit since the first source touched it",
    "region": "everything except the region",
    "found": "everything except the edit that was found and what is connected to it (an estimate)",
    "whole": "nothing: the whole picture was edited, so the change is over all of it",
}
Record = dict[str, Any]


def outside_of(source: Path, result: Path, outside: KeepOutside) -> Record:
    """Return the `edit` of a result line, as far as two files show it.

    `outside_by`: the `matte` that the run of this result recorded, the pixels that edits `touched`
    since the source of several edits, a `region` given in place of the edit, or the edit that was
    `found` decides what is outside. Pixels are compared as stored,
    with alpha, if the sizes are equal and both files have 8 bits a channel; in sRGB, which
    `compared_in` says, if their numbers mean different colours. Raises SourceImageError for a file
    that is not a picture, a region that does not fit the source, or a matte that was changed.
    """
    (before, is_exact), (after, is_other_exact) = own_upright(source), own_upright(result)
    own, other = before.in_srgb(), after.in_srgb()
    are_alike = before.colours.are(after.colours)
    compared = (before.own, after.own) if are_alike else (own, other)
    size, can_count = Size(own.height, own.width), is_exact and is_other_exact
    can_count &= own.size == other.size
    is_matte = Path(outside.mask).name == f"{result.stem}.mask.png"
    if is_matte and outside.region_keeps == "outside":
        # The result's own matte allows changes wherever it is not 0, as in its run.
        check_region(outside, size)
        matte = resized(np.asarray(own_picture(Path(outside.mask))[0].convert("L")), size)
        given: Pixels | None = np.where(matte > 0, np.uint8(255), np.uint8(0))
    else:
        given = region_of(outside, size)
    stands = given is not None and outside.put_back == "instead"
    recorded = _read_record(result, size) if can_count and not stands else None
    history, between = _history_since(source, result, before, size)
    # The run recorded more of a result's own source than its history has.
    if history and can_count and not stands and (recorded is None or between > 1):
        touched, kind = history.touched, "global" if history.touched.all() else "local"
        area = round(float(touched.mean()), 5)
        record = {"kind": kind, "reasons": [], "area": area, "links": history.links, "spill": None}
        recorded = record, touched
    if recorded is not None:
        record, edited = recorded
        rows_of, columns = np.arange(size.height), np.arange(size.width)
        if given is not None:
            spilled = int((edited & (given == 0)).sum())
            record["spill"] = round(spilled / max(1, int(edited.sum())), 4)
    else:
        drawn, place = _as_redraw(other, size)
        reference = on_white(shown(own, place))
        found = edit_of(drawn, reference, place, given=given, mode=outside.put_back)
        record = found.to_json() | {"unseen": round(max(0.0, place.unseen), 4)}
        edited, rows_of, columns = found.mask, _drawn_at(place.y), _drawn_at(place.x)
        if can_count and found.kind in ("local", "background"):
            edited = _with_blend(compared, edited, place)
    is_whole = record["kind"] == "global"
    change, differing = Change(), 0
    if not can_count:
        counts = ~edited | is_whole
        change.add(reference, drawn, counts, int(counts.sum()))
    for rows, differs in _strips(*compared) if can_count else ():
        a, b = (_rgba(one, rows) for one in (own, other))
        counts = ~edited[rows_of[rows, None], columns] | is_whole
        if given is not None:
            counts = given[rows] == 0 if stands else counts | (given[rows] == 0)
        differing += int(differs.sum())
        change.add(a, b, differs & counts, int(counts.sum()))
    by_record = "touched" if "links" in record else "matte"
    record["outside_by"] = "region" if stands else by_record if recorded is not None else "found"
    if given is not None:
        record |= region_facts(outside, given)
    record["change"] = {"mean_de": change.mean_de}
    record["gates"] = list_breaches(record, outside)
    if not can_count:
        return record | {"outside_equal": None, "outside_differing_pixels": None}
    if not are_alike:
        record["compared_in"] = "sRGB"
    return record | {
        "outside_equal": None if is_whole else change.differing == 0,
        "outside_differing_pixels": None if is_whole else change.differing,
        "outside_pixels": 0 if is_whole else change.pixels,
        "differing_pixels": differing,
    }


def lines(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the record as rows of a table."""
    is_whole = record["kind"] == "global"
    rows = [("kind", str(record["kind"])), ("edited area", f"{record['area']:.2%}")]
    rows += [("reason", reason) for reason in record["reasons"]]
    if "links" in record:
        rows.append(("edits since the first source", str(record["links"])))
    rows.append(("counted as outside", _OUTSIDE["whole" if is_whole else record["outside_by"]]))
    if "differing_pixels" not in record:
        why = "not compared: the sizes differ, or a file is not 8-bit RGB"
        rows.append(("pixels that differ outside", why))
    else:
        if not is_whole:
            of = f"{record['outside_differing_pixels']:,} of {record['outside_pixels']:,}"
            rows.append(("pixels that differ outside", of))
        rows.append(("pixels that differ", f"{record['differing_pixels']:,}"))
        if space := record.get("compared_in"):
            rows.append(("compared in", f"{space}: the two files name different colours"))
    rows.append(("change outside (CIE76)", f"mean {record['change']['mean_de']:g}"))
    if moved := record.get("moved"):
        unsure = "" if moved["sure"] else "; not sure, the picture has too little detail"
        rows.append(("regions", str(record["regions"])))
        rows.append(("colour drift (CIE76)", str(record["drift"])))
        rows.append(("moved", f"{moved['shift_px']} pixels, zoom {moved['zoom']:+}{unsure}"))
    if text := region_text(record):
        rows.append(("region", text))
    if record["spill"] is not None:
        rows.append(("edit outside the region", f"{record['spill']:.2%}"))
    return rows


def _read_record(result: Path, size: Size) -> tuple[Record, Mask] | None:
    """Return what the run of a result recorded: its verdict and where it edited [H, W].

    None if no line names this file, or its size has changed.
    """
    place = Path(os.path.abspath(result))
    run = run_of(place)
    states = [(path, os.stat(path)) for path in RunFolder(run).journals()]
    as_it_is = tuple((path, one.st_size, one.st_mtime_ns) for path, one in states)
    edit = _edits_in(run, as_it_is).get(place.relative_to(run).as_posix())
    if edit is None:
        return None
    path = run / str(edit["mask"])
    try:
        is_own = digest.of_file(path) == edit["sha256"]["mask"]
        area, reasons = float(edit["area"]), [*map(str, edit["reasons"])]
        record = {"kind": str(edit["kind"]), "reasons": reasons, "area": area}
    except (OSError, KeyError, TypeError, ValueError):
        is_own = False
    if not is_own:
        what = "the matte is not the one that its run wrote"
        hint = "run the same command again, which writes the matte again"
        raise SourceImageError(what, where=path, hint=hint, code="source.matte")
    matte = np.asarray(own_picture(path)[0])
    is_of_this = matte.shape == (size.height, size.width)
    return (record | {"spill": None}, matte > 0) if is_of_this else None


def _history_since(
    source: Path, result: Path, before: Upright, size: Size
) -> tuple[History | None, int]:
    """Return the history of a result, and the number of edits since `source`.

    None if `source` is neither its first source nor an earlier edit of that.
    """
    found = recorded_history(result, text_of(result), size)
    if found is None or found.origin.pixel_sha256 == pixel_digest(before.own):
        return found, found.links if found else 0
    own = recorded_history(source, text_of(source), size)
    if own is None or own.origin != found.origin or own.links > found.links:
        return None, 0
    return found, found.links - own.links


@lru_cache(maxsize=4)
def _edits_in(run: Path, _as_it_is: tuple[Any, ...]) -> dict[str, Mapping[str, Any]]:
    """Return the recorded edits of a run that have a matte, by file; read once per run."""
    return {
        file["path"]: edit
        for entry in RunFolder(run).results().values()
        if "mask" in (edit := entry.get("edit") or {})
        for file in entry["outputs"]
    }


def _as_redraw(image: Picture, size: Size) -> tuple[Pixels, Placement]:
    """Return a result as a redraw of a source of this size, small enough to find an edit in it."""
    part = sqrt(min(1.0, _AREA / (image.width * image.height)))
    y, x = (max(_LEAST_SIDE, round(side * part)) for side in (image.height, image.width))
    pixels = shown(image, Placement.stretched((image.height, image.width), (y, x)))
    is_stretched = abs((size.height / size.width) / (y / x) - 1) < _SAME_RATIO
    fit = Placement.stretched if is_stretched else Placement.covered
    return on_white(pixels), fit((size.height, size.width), (y, x))


def _with_blend(pictures: tuple[Picture, Picture], mask: Mask, place: Placement) -> Mask:
    """Return the edit [Y, X] with the differing pixels near it that are connected to it."""
    differs, y, x = mask.copy(), _drawn_at(place.y), _drawn_at(place.x)
    for rows, differs_here in _strips(*pictures):
        at = np.nonzero(differs_here)
        differs[y[rows][at[0]], x[at[1]]] = True
    gap = max(1, round(_GAP * place.y.scale))
    labels, _ = ndimage.label(ndimage.maximum_filter(differs, 2 * gap + 1), np.ones((3, 3)))
    near = distance_to(mask) <= _BLEND * scale_of((place.y.length, place.x.length)) * place.y.scale
    return np.asarray(np.isin(labels, np.unique(labels[mask])) & near)


def _drawn_at(axis: AxisMap) -> np.ndarray:
    """Return the drawn pixel that contains each pixel of the source."""
    at = axis.scale * (np.arange(axis.length) + 0.5) - axis.offset
    return np.asarray(np.clip(at.astype(int), 0, axis.drawn - 1))


def _strips(a: Picture, b: Picture) -> Iterator[tuple[slice, Mask]]:
    """Yield rows of two pictures of one size, and where they differ [Y, X]."""
    step = max(1, _STRIP // a.width)
    for top in range(0, a.height, step):
        rows = slice(top, min(top + step, a.height))
        # Four bytes at once: a reduction over such a short axis is slow.
        left, right = (_rgba(one, rows).view(np.uint32) for one in (a, b))
        yield rows, (left != right)[..., 0]


def _rgba(picture: Picture, rows: slice) -> Pixels:
    """Return rows of a picture as RGBA [Y, X, 4]."""
    box = (0, rows.start, picture.width, rows.stop)
    return np.asarray(picture.crop(box).convert("RGBA"))
