"""Write a job's picture as a file with its metadata.

For an edit that keeps the source outside its region, write the redraw first, then the result:

    outputs/NAME.redraw.png      what the model drew        outputs/NAME.png        the result
    outputs/NAME.reference.png   the source's round trip    outputs/NAME.mask.png   its matte
    outputs/NAME.touched.png     what this edit and those before it touched (`media.history`)

    outputs/NAME.layer-1.png     the lowest of a picture's layers; NAME.png is what they add up to

Redraw and reference are kept. So a fault after drawing loses no picture, and a change of region
or gate needs no model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from hyimg_cli.errors import OutputError, SourceImageError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import mask_print
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media import formats
from hyimg_cli.media.carried import (
    Carried,
    read_carried,
    region_bounds,
    region_facts,
    region_of,
)
from hyimg_cli.media.history import Origin, history_of_source
from hyimg_cli.media.images import Pixels, pixel_digest, text_of
from hyimg_cli.media.masks import region_text
from hyimg_cli.media.metadata import PictureFacts, PictureText, picture_text, rewrite_metadata
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec.events import LayerFile, OutputFile
from hyimg_cli.spec.job import EDIT_SUFFIXES, LAYER_MARK, ImageJob, Size
from hyimg_cli.spec.options import Box, KeepOutside, box_text

if TYPE_CHECKING:
    from hyimg_cli.finishing.outside import Edit

Record = dict[str, Any]
# A note in a failed job's line; it is true until the job is finished.
LATENTS_ARE_KEPT = "its denoised latents are saved, so the next attempt only decodes them"


def write_picture(
    folder: JobFolder, job: ImageJob, pixels: Pixels, facts: PictureFacts | None
) -> OutputFile:
    """Write the job's picture in its format under its name, without metadata if no `facts`.

    The file is on disk when this returns. Raises StorageError.
    """
    data = formats.encode(pixels, job.encoding, _text(job, pixels, facts))
    return _save_result(folder, job, pixels, data)


def write_layer(
    folder: JobFolder, job: ImageJob, number: int, pixels: Pixels, facts: PictureFacts | None
) -> LayerFile:
    """Write a layer of the job's picture as `write_picture` does; `number`: from 1, the lowest."""
    if facts is not None:
        facts = replace(facts, layer=number)
    data = formats.encode(pixels, job.encoding, _text(job, pixels, facts))
    suffix = LAYER_MARK.format(number) + job.encoding.suffix
    file = _save(folder, job, suffix, pixels, data)
    return LayerFile(**asdict(file), layer=number)


def keep_redraw(
    folder: JobFolder, job: ImageJob, drawn: Pixels, reference: Pixels, facts: PictureFacts | None
) -> Record:
    """Write the redraw and its reference; return the line's `edit` so far. Raises StorageError."""
    edit: Record = {"kind": "unfinished", "sha256": {}}
    data = formats.encode(drawn, text=_text(job, drawn, facts), compress_level=3)
    _save_beside(folder, job, edit, "plain", data)
    _save_beside(folder, job, edit, "shown", formats.encode(reference, compress_level=3))
    return edit


def finish(
    folder: JobFolder,
    job: ImageJob,
    drawn: Pixels,
    reference: Pixels,
    edit: Record,
    config: OutputConfig,
    source_digest: str = "",
) -> OutputFile:
    """Put a redraw back on its source, write the result and its matte, and fill `edit`.

    The file is read back to check what `edit` says of it. Raises SourceImageError if the source is
    missing or has changed since the drawing, OutputError if the whole picture was edited and
    `on_global` is `fail`, or if a pixel differs outside.
    """
    # Imported here: it imports scipy, which would add 0.3 s to the start of every run.
    from hyimg_cli.finishing.doubts import background_doubts
    from hyimg_cli.finishing.halo import halo_doubts, halo_of
    from hyimg_cli.finishing.outside import edit_of
    from hyimg_cli.finishing.placement import Placement
    from hyimg_cli.finishing.seam import seam_of

    outside, path = job.outside, Path(job.kept_image)
    assert outside is not None, "the job keeps the source outside the edit"
    source = read_carried(path, keep_gps=config.keep_gps)
    if source_digest and source.digest != source_digest:
        what = "the source is not the file that the result was drawn from"
        raise SourceImageError(what, where=path, code="source.changed")
    if drawn.shape != reference.shape:
        what = "the picture was drawn at another size than its source was shown to the model"
        raise OutputError(what, code="outside.not-comparable")
    if job.draft:
        edit["draft"] = job.draft
    size = source.own.shape[0], source.own.shape[1]
    given = region_of(outside, Size(*size))
    if given is not None:
        edit |= region_facts(outside, given)
    if job.crop is None:
        placement = Placement.stretched(size, drawn.shape[:2])
    else:
        placement = Placement.cropped(size, job.crop, drawn.shape[:2])
        edit["crop"] = _crop_facts(job.crop, drawn, region_bounds(outside, Size(*size)), size)
    found = edit_of(drawn, reference, placement, given=given, mode=outside.region_mode)
    edit |= found.to_json()
    if (seam := seam_of(found)) is not None:
        edit["seam"] = seam.to_json()
        edit["doubts"] += seam.doubts
    if (halo := halo_of(found)) is not None:
        edit["halo"] = round(halo, 2)
        edit["doubts"] += halo_doubts(halo)
    edit["doubts"] += background_doubts(found, drawn)
    if found.kind == "global" and outside.on_global == "fail":
        hint = "the redraw is saved; use on_global keep to accept it, or a region to limit it"
        what = f"the whole picture was edited: {', '.join(found.reasons)}"
        raise OutputError(what, hint=hint, code="outside.global")
    has_grey = job.encoding.format != "webp"
    pixels, matte, change = _put_back(source, drawn, reference, found, given, has_grey=has_grey)
    del given
    edit["change"] = {"mean_de": change}
    edit["gates"] = list_breaches(edit, outside)
    is_whole = found.kind == "global"
    text, origin = None, Origin(source.digest, pixel_digest(source.own))
    history = history_of_source(path, source.text, origin, Size(*size))
    if edit["kind"] != "none":
        history = history.then(matte > 0, pixel_digest(pixels))
    edit |= {"origin": asdict(history.origin), "links": history.links}
    if config.metadata and edit["kind"] == "none":
        # Nothing was drawn: the result is its source, which may be an edit.
        text = source.text if history.links else PictureText()
    elif config.metadata:
        # The metadata of the redraw, rewritten.
        text = text_of(folder.folder / edit["plain"])
        if text.record:
            line, region, chain = public_line(job), mask_print(job), history.to_record()
            pixels_sha256 = history.pixel_sha256
            text = rewrite_metadata(text, line, region, Size(*size), pixels_sha256, chain)
    data = source.encode(pixels, job.encoding, text)
    differing = None if is_whole else source.count_differing(data, matte)
    if differing:
        what = f"{differing} pixels outside the edit differ from the source"
        raise OutputError(what, hint="this is a bug: please report it", code="outside.differs")
    edit["outside_equal"] = None if is_whole else True
    box = Image.fromarray(matte).getbbox()
    edit |= {"outside_differing_pixels": differing, "box": None if box is None else list(box)}
    edit["outside_pixels"] = int((matte == 0).sum())
    _save_beside(folder, job, edit, "mask", formats.encode(matte, compress_level=3))
    has_record = text is not None and bool(text.record)
    if history.links > 1 or (history.links and not has_record):
        _save_beside(folder, job, edit, "touched", history.to_png())
    return _save_result(folder, job, pixels, data)


def _put_back(
    source: Carried,
    drawn: Pixels,
    reference: Pixels,
    found: "Edit",
    given: Pixels | None,
    *,
    has_grey: bool,
) -> tuple[Pixels, Pixels, float]:
    """Return the result in the source's channels, its matte, and its mean change outside.

    `has_grey`: the result's format can be grey. Copies of the whole source in other colours end
    here, before the file is encoded.
    """
    from hyimg_cli.finishing.composite import OwnNumbers
    from hyimg_cli.finishing.outside import put_back
    from hyimg_cli.finishing.verdict import Change

    space, shown = source.tags.space, source.pixels
    own = None if space is None else OwnNumbers(source.numbers, space.from_srgb)
    result, change = put_back(shown, drawn, reference, found, given, own), Change()
    if found.kind == "global":
        # Nothing was kept, so every pixel counts; in any other edit, the pixels outside are equal.
        change.add(shown, result.pixels, result.matte > 0, result.matte.size)
        return result.numbers, result.matte, change.mean_de
    pixels = source.with_edit(result.pixels, result.numbers, result.matte)
    if pixels.ndim == 2 and not has_grey:
        pixels = result.numbers
    return pixels, result.matte, change.mean_de


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
    if (crop := edit.get("crop")) is not None:
        yield f"drawn: the part {box_text(crop['box'])}, at {'x'.join(map(str, crop['drawn']))}"


def _crop_facts(crop: Box, drawn: Pixels, region: Box | None, size: tuple[int, int]) -> Record:
    """Return the `crop` of an `edit`, with what it shows around the region by its long side.

    A side on which the photograph, of `size` (height, width), ends with the crop does not count.
    """
    left, top, right, bottom = region or crop
    height, width = size
    ends = ((crop[0], 0), (crop[1], 0), (crop[2], width), (crop[3], height))
    shown = (left - crop[0], top - crop[1], crop[2] - right, crop[3] - bottom)
    around = min(n for n, (end, last) in zip(shown, ends, strict=True) if end != last)
    context = round(max(0, around) / max(right - left, bottom - top), 2)
    return {"box": list(crop), "drawn": [drawn.shape[1], drawn.shape[0]], "context": context}


def _save_result(folder: JobFolder, job: ImageJob, pixels: Pixels, data: bytes) -> OutputFile:
    return _save(folder, job, job.encoding.suffix, pixels, data)


def _save(folder: JobFolder, job: ImageJob, suffix: str, pixels: Pixels, data: bytes) -> OutputFile:
    path, sha256 = folder.save(job, suffix, data)
    height, width = pixels.shape[:2]
    return OutputFile(path, sha256, pixel_digest(pixels), width, height, job.seed)


def _save_beside(folder: JobFolder, job: ImageJob, edit: Record, kind: str, data: bytes) -> None:
    """Write a PNG next to the result of an edit, and record its name in `edit`."""
    edit[kind], edit["sha256"][kind] = folder.save(job, EDIT_SUFFIXES[kind], data)


def _text(job: ImageJob, pixels: Pixels, facts: PictureFacts | None) -> PictureText | None:
    """Return the metadata of a drawn picture; None without `facts`."""
    if facts is None:
        return None
    size, sha256 = Size(*pixels.shape[:2]), pixel_digest(pixels)
    return picture_text(job, public_line(job), facts, size, sha256)


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
