"""What the `edit` of a result line says: warnings, notes, failed gates."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyimg_cli.media.masks import region_text
from hyimg_cli.spec.options import KeepOutside, box_text


def edit_warnings(edit: Mapping[str, Any] | None) -> Iterator[str]:
    """Return the warnings for an edit that is not what was asked for."""
    if edit is None:
        return
    if edit["kind"] == "none":
        found = "the edit lies outside the region" if edit["spill"] else "no edit was found"
        yield f"{found}: the result is the source; the redraw is saved next to it"
    elif edit["reasons"]:
        kept = "the source was not kept" if edit["kind"] == "global" else "only the region was used"
        yield f"the whole picture was edited ({', '.join(edit['reasons'])}): {kept}"
    yield from (f"not sure: {doubt}" for doubt in edit["doubts"])
    yield from (f"gate: {breach}" for breach in edit["gates"])


def edit_notes(edit: Mapping[str, Any] | None) -> Iterator[str]:
    """Return the notes on how an edit's inputs were read."""
    if edit is None:
        return
    if (draft := edit.get("draft")) is not None:
        yield draft
    if text := region_text(edit):
        yield f"region: {text}"
    if edit.get("region_mode") == "inpaint":
        yield f"the model drew in the region only (inpaint, strength {edit['strength']:g})"
    if crops := crops_in(edit):
        parts = " and ".join(box_text(crop["box"]) for crop in crops)
        which, size = "part" if len(crops) == 1 else "parts", crops[0]["drawn"]
        yield f"drawn: the {which} {parts}, at {size[0]}x{size[1]}"


def crops_in(edit: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the crops in which an edit was drawn; of a line, `crop` is one or a list."""
    crops = edit.get("crop") or ()
    return [crops] if isinstance(crops, Mapping) else crops


def list_breaches(edit: Mapping[str, Any], outside: KeepOutside) -> list[str]:
    """Return the gates that an `edit` fails, each with its value."""
    values = {
        "max_outside_change": ("the mean change (CIE76) outside", edit["change"]["mean_de"]),
        "max_edited_area": ("the edited fraction of the picture", edit["area"]),
        "max_spill": ("the fraction of the edit outside the region", edit["spill"]),
        "max_seam": ("the difference at the seam", seam_level(edit)),
    }
    return [
        f"{name} {limit:g}: {what} is {value:.4g}"
        for name, (what, value) in values.items()
        if (limit := getattr(outside, name)) is not None and value is not None and value > limit
    ]


def seam_level(edit: Mapping[str, Any]) -> float | None:
    """Return by how many levels an edit's surroundings are off: all, or twice as much in places.

    None if nothing around it was measured.
    """
    seam = edit.get("seam") or {}
    step, found = seam.get("step"), [seam.get("cast"), edit.get("halo")]
    levels = [level for level in (*found, step and step / 2) if level is not None]
    return max(levels, default=None)
