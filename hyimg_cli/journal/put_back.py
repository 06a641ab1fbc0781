"""Put the drawings of an edit back on its source, and say what they did to it.

An edit has one drawing of the whole source, or one of each crop. Each crop is compared with its own
part of the source, in its own parts of the region, so no pixel is edited by two. What the line says
of several is the worst of them, or their sum; its `crop` has what is said of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyimg_cli.errors import OutputError
from hyimg_cli.finishing.composite import OwnNumbers
from hyimg_cli.finishing.crops import around, shared_out
from hyimg_cli.finishing.doubts import background_doubts
from hyimg_cli.finishing.halo import halo_doubts, halo_of
from hyimg_cli.finishing.outside import Edit, edit_of, put_back
from hyimg_cli.finishing.placement import Placement
from hyimg_cli.finishing.seam import seam_of
from hyimg_cli.finishing.verdict import Change
from hyimg_cli.journal.edit_facts import seam_level
from hyimg_cli.media.carried import Carried, region_parts
from hyimg_cli.media.images import Pixels
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.options import Box, box_text

if TYPE_CHECKING:
    from hyimg_cli.journal.job_pictures import Drawing

Record = dict[str, Any]
# What is said of each of several crops.
_OF_CROP = ("kind", "reasons", "scale", "seam", "halo", "doubts")
_SUMS, _WORST = ("area", "regions"), ("drift", "scale", "unseen", "spill", "halo")


@dataclass(frozen=True)
class Made:
    """A result in the source's channels, its matte [H, W], and its mean change outside."""

    pixels: Pixels
    matte: Pixels
    change: float


def put_back_all(
    job: ImageJob,
    source: Carried,
    drawings: "Sequence[Drawing]",
    given: Pixels | None,
    edit: Record,
    *,
    has_grey: bool,
) -> Made:
    """Return the result, and add to `edit` what the drawings did to the source.

    `given`: the user's region [H, W]. `has_grey`: the result's format can be grey. Raises
    OutputError if all was edited and `on_global` is `fail`. Copies of the whole source in other
    colours end here, before the file is encoded.
    """
    outside, size = job.outside, Size(*source.own.shape[:2])
    assert outside is not None, "the job keeps the source outside the edit"
    parts = region_parts(outside, size) if job.crops else ()
    regions = shared_out(parts, job.crops) if len(job.crops) > 1 else [[*parts]]
    allowed = [given if len(regions) == 1 else _only(given, own) for own in regions]
    found = [
        _compared(one, size, crop, region, outside.put_back)
        for one, crop, region in zip(drawings, job.crops or (None,), allowed, strict=True)
    ]
    facts = [_facts(one, drawing.pixels) for one, drawing in zip(found, drawings, strict=True)]
    crops = [
        _crop_facts(crop, drawing.pixels, around(own) if own else None, size)
        for crop, drawing, own in zip(job.crops, drawings, regions, strict=False)
    ]
    edit |= facts[0] if len(facts) == 1 else _of_all(facts, job.crops)
    if len(crops) == 1:
        edit["crop"] = crops[0]
    elif crops:
        said = [{name: one[name] for name in _OF_CROP if name in one} for one in facts]
        edit["crop"] = [crop | own for crop, own in zip(crops, said, strict=True)]
    if edit["kind"] == "global" and outside.on_global == "fail":
        hint = "the redraw is saved; use on_global keep to accept it, or a region to limit it"
        what = f"the whole picture was edited: {', '.join(edit['reasons'])}"
        raise OutputError(what, hint=hint, code="outside.global")
    return _composed(source, drawings, found, allowed, has_grey=has_grey)


def _compared(
    drawing: "Drawing", size: Size, crop: Box | None, allowed: Pixels | None, mode: str
) -> Edit:
    source, drawn = (size.height, size.width), drawing.pixels.shape[:2]
    if crop is None:
        placement = Placement.stretched(source, drawn)
    else:
        placement = Placement.cropped(source, crop, drawn)
    return edit_of(drawing.pixels, drawing.shown, placement, given=allowed, mode=mode)


def _only(given: Pixels | None, boxes: Sequence[Box]) -> Pixels:
    """Return a region [H, W] in these boxes, and nothing of it elsewhere."""
    assert given is not None, "crops are of a region"
    found = np.zeros_like(given)
    for left, top, right, bottom in boxes:
        inside = slice(top, bottom), slice(left, right)
        found[inside] = given[inside]
    return found


def _facts(found: Edit, drawn: Pixels) -> Record:
    """Return what a drawing did to what the model saw."""
    facts = found.to_json()
    if (seam := seam_of(found)) is not None:
        facts["seam"] = seam.to_json()
        facts["doubts"] += seam.doubts
    if (halo := halo_of(found)) is not None:
        facts["halo"] = round(halo, 2)
        facts["doubts"] += halo_doubts(halo)
    facts["doubts"] += background_doubts(found, drawn)
    return facts


def _of_all(facts: Sequence[Mapping[str, Any]], crops: Sequence[Box]) -> Record:
    """Return what several drawings did to the source: the worst, or the sum."""
    kinds = {one["kind"] for one in facts} - {"none"}
    found: Record = {"kind": kinds.pop() if len(kinds) == 1 else "local" if kinds else "none"}
    found["reasons"] = [*dict.fromkeys(text for one in facts for text in one["reasons"])]
    found["doubts"] = [*_of_each([one["doubts"] for one in facts], crops)]
    if found["kind"] != "none":
        none = [["no edit was found"] if one["kind"] == "none" else [] for one in facts]
        found["doubts"] += _of_each(none, crops)
    known = {name: [one[name] for one in facts if one.get(name) is not None] for name in _WORST}
    found |= {name: sum(one[name] for one in facts) for name in _SUMS}
    found["area"] = round(found["area"], 5)
    found["redraw"] = {
        name: max(one["redraw"][name] for one in facts) for name in facts[0]["redraw"]
    }
    found["moved"] = max((one["moved"] for one in facts), key=lambda one: one["shift_px"])
    found["moved"] |= {"sure": all(one["moved"]["sure"] for one in facts)}
    found |= {name: max(values) for name, values in known.items() if values}
    if seams := [one for one in facts if one.get("seam")]:
        found["seam"] = max(seams, key=lambda one: seam_level({"seam": one["seam"]}) or 0.0)["seam"]
    return found


def _of_each(texts: Sequence[Sequence[str]], crops: Sequence[Box]) -> Iterator[str]:
    """Yield what is said of the crops, with the crop that it is said of unless it is of all."""
    for own, crop in zip(texts, crops, strict=True):
        for text in own:
            if not all(text in others for others in texts):
                yield f"{text}, in the part {box_text(crop)}"
            elif own is texts[0]:
                yield text


def _crop_facts(crop: Box, drawn: Pixels, region: Box | None, size: Size) -> Record:
    """Return the `crop` of an `edit`, with what it shows around the region by its long side.

    A side on which the photograph ends with the crop does not count.
    """
    left, top, right, bottom = region or crop
    ends = ((crop[0], 0), (crop[1], 0), (crop[2], size.width), (crop[3], size.height))
    shown = (left - crop[0], top - crop[1], crop[2] - right, crop[3] - bottom)
    least = min(n for n, (end, last) in zip(shown, ends, strict=True) if end != last)
    context = round(max(0, least) / max(right - left, bottom - top), 2)
    return {"box": list(crop), "drawn": [drawn.shape[1], drawn.shape[0]], "context": context}


def _composed(
    source: Carried,
    drawings: "Sequence[Drawing]",
    found: Sequence[Edit],
    allowed: Sequence[Pixels | None],
    *,
    has_grey: bool,
) -> Made:
    """Put each edit on the result of those before it: they do not overlap."""
    space, change = source.tags.space, Change()
    shown = pixels = source.pixels
    numbers = source.numbers
    matte = np.zeros(shown.shape[:2], np.uint8)
    for drawing, edit, region in zip(drawings, found, allowed, strict=True):
        own = None if space is None else OwnNumbers(numbers, space.from_srgb)
        result = put_back(pixels, drawing.pixels, drawing.shown, edit, region, own)
        pixels, numbers, matte = result.pixels, result.numbers, np.maximum(matte, result.matte)
    if any(edit.kind == "global" for edit in found):
        # Nothing was kept, so every pixel counts; in any other edit, the pixels outside are equal.
        change.add(shown, pixels, matte > 0, matte.size)
        return Made(numbers, matte, change.mean_de)
    made = source.with_edit(pixels, numbers, matte)
    if made.ndim == 2 and not has_grey:
        made = numbers
    return Made(made, matte, change.mean_de)
