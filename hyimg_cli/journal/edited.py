"""An edit that keeps its source outside, as files: the redraw first, then what is made of it.

    outputs/NAME.plain.png   what the model drew        outputs/NAME.png        the result
    outputs/NAME.shown.png   the source's round trip    outputs/NAME.mask.png   its matte

The redraw and what it is compared with stay: whatever goes wrong behind them loses no picture, and
another region or another gate needs no model.
"""

from collections.abc import Iterator, Mapping
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyimg_cli.errors import OutputError, SourceImageError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.media import carried, images
from hyimg_cli.media.carried import Bytes, Carried, read_carried, region_of
from hyimg_cli.media.metadata import PictureFacts, PictureText, picture_text, retold
from hyimg_cli.spec.events import OutputFile
from hyimg_cli.spec.job import Encoding, ImageJob, KeepOutside, Size
from hyimg_cli.spec.run import OutputConfig

if TYPE_CHECKING:
    from hyimg_cli.finishing.outside import Edit, Result

_PNG = Encoding()
Record = dict[str, Any]


def keep_redraw(
    folder: JobFolder,
    job: ImageJob,
    drawn: images.Pixels,
    reference: images.Pixels,
    facts: PictureFacts | None,
) -> Record:
    """Write what the model drew and what it is compared with; the line's `edit` as far as it is
    known then. Raises StorageError.
    """
    size = Size(*drawn.shape[:2])
    text = None
    if facts is not None:
        text = picture_text(job, job_to_json(job), facts, size, images.pixel_digest(drawn))
    edit: Record = {"kind": "unfinished", "sha256": {}}
    for name, pixels, said in (("plain", drawn, text), ("shown", reference, None)):
        path = folder.place_for(job, _named_size(job, size), f".{name}.png")
        edit[name] = path.relative_to(folder.folder).as_posix()
        edit["sha256"][name] = images.saved(path, carried.encoded(pixels, _PNG, said))
    return edit


def finish(
    folder: JobFolder,
    job: ImageJob,
    drawn: images.Pixels,
    reference: images.Pixels,
    edit: Record,
    config: OutputConfig,
    source_digest: str = "",
) -> OutputFile:
    """Put a redraw back on its source and write the result and its matte; fills `edit`.

    The file is read back: what is claimed of it is true of it. Raises SourceImageError where the
    source is gone or another one than was drawn from, OutputError where the whole picture was
    edited and that is to fail, or where a pixel differs outside.
    """
    # It brings scipy: 0.3 s of each start for jobs that keep nothing.
    from hyimg_cli.finishing.outside import edit_of, put_back
    from hyimg_cli.finishing.placement import Placement

    outside, path = job.outside, Path(job.kept_image)
    assert outside is not None, "the job keeps what is outside an edit"
    source = read_carried(path, keep_gps=config.keep_gps)
    if source_digest and source.digest != source_digest:
        what = "the source is another file than the one that was drawn from"
        raise SourceImageError(what, where=path, code="source.changed")
    if drawn.shape != reference.shape:
        what = "the picture was drawn in another size than its source was shown in"
        raise OutputError(what, code="outside.not-comparable")
    size = Size(*source.pixels.shape[:2])
    given = region_of(outside, size)
    placement = Placement.stretched((size.height, size.width), drawn.shape[:2])
    found = edit_of(drawn, reference, placement, given=given, mode=outside.region_mode)
    edit |= told(found, outside)
    if found.kind == "global" and outside.on_global == "fail":
        hint = "the plain picture is kept; on_global keep takes it, a region limits it"
        what = f"the whole picture was edited: {', '.join(found.reasons)}"
        raise OutputError(what, hint=hint, code="outside.global")
    result = put_back(source.pixels, drawn, reference, found, given)
    return _written(folder, job, source, found, result, edit, config)


def edit_warnings(edit: Mapping[str, Any] | None) -> Iterator[str]:
    """What the line of a finished job says of an edit that is not what was asked for."""
    if edit is None:
        return
    if edit["kind"] == "none":
        found = "the edit lies outside the region" if edit["spill"] else "no edit was found"
        yield f"{found}: the result is the source; what was drawn is beside it"
    if edit["kind"] == "global":
        yield f"the whole picture was edited ({', '.join(edit['reasons'])}): nothing was kept"
    yield from (f"gate: {breach}" for breach in edit["gates"])


def _written(
    folder: JobFolder,
    job: ImageJob,
    source: Carried,
    found: "Edit",
    result: "Result",
    edit: Record,
    config: OutputConfig,
) -> OutputFile:
    pixels = (
        result.pixels if found.kind == "global" else source.with_edit(result.pixels, result.matte)
    )
    if pixels.ndim == 2 and job.encoding.format == "webp":
        pixels = result.pixels  # it has no grey
    size, sha256 = Size(*pixels.shape[:2]), images.pixel_digest(pixels)
    text = _text(folder, job, edit, size, sha256) if config.metadata else None
    if text is not None and found.kind == "none":
        # Nothing in it was generated.
        text = PictureText("", "", "")
    data = carried.encoded(pixels, job.encoding, text, source)
    differing = source.differing(data, result.matte) if found.kind != "global" else None
    if differing:
        what = f"{differing} pixels outside the edit differ from the source"
        raise OutputError(what, hint="this is a bug: please report it", code="outside.differs")
    edit |= {
        "outside_equal": None if differing is None else True,
        "outside_differing_pixels": differing,
        "box": _box(result.matte),
    }
    path = folder.place_for(job, size, ".mask.png")
    edit["mask"] = path.relative_to(folder.folder).as_posix()
    edit["sha256"]["mask"] = images.saved(path, carried.encoded(result.matte, _PNG, None))
    path = folder.place_for(job, size, job.encoding.suffix)
    saved = images.saved(path, data)
    relative = path.relative_to(folder.folder).as_posix()
    return OutputFile(relative, saved, sha256, size.width, size.height, job.seed)


def _text(
    folder: JobFolder, job: ImageJob, edit: Record, size: Size, sha256: str
) -> PictureText | None:
    """What the plain picture says of itself, of the result."""
    text = images.text_of(folder.folder / edit["plain"])
    return retold(text, job_to_json(job), size, sha256) if text.record else PictureText("", "", "")


def told(found: "Edit", outside: KeepOutside) -> Record:
    """The line's `edit`: what was found, and which gates it does not pass."""
    measures, motion = found.measures, found.seen
    drawn = found.mask.shape
    told = {
        "kind": found.kind,
        "reasons": list(found.reasons),
        "area": round(float(found.mask.mean()), 5),
        "regions": measures.regions,
        "redraw": {"mean_de": round(found.outside[0], 2), "p99_de": round(found.outside[1], 2)},
        "drift": round(measures.drift, 2),
        "moved": {
            "zoom": max((round(zoom - 1, 5) for zoom in motion.zoom), key=lambda by: abs(by)),
            "shift_px": round(_shift(motion.zoom, motion.shift, drawn), 2),
            "sure": motion.is_sure,
        },
        "scale": round(found.placement.pixels_per_drawn, 2),
        "unseen": round(max(0.0, found.placement.unseen), 4) if measures.moved else 0.0,
        "spill": None if found.spill is None else round(found.spill, 4),
    }
    gates = {
        "max_outside_change": found.outside[0],
        "max_edited_area": float(found.mask.mean()),
        "max_spill": found.spill,
    }
    return told | {"gates": list(_breaches(gates, outside))}


def _breaches(values: Mapping[str, float | None], outside: KeepOutside) -> Iterator[str]:
    judged = {
        "max_outside_change": "the redraw's own change outside, mean CIE76",
        "max_edited_area": "the edited part of the picture",
        "max_spill": "the part of the edit outside the region",
    }
    for name, value in values.items():
        limit = getattr(outside, name)
        if limit is not None and value is not None and value > limit:
            yield f"{name} {limit:g}: {judged[name]} is {value:.4g}"


def _shift(zoom: tuple[float, float], shift: tuple[float, float], shape: tuple[int, ...]) -> float:
    """How far the middle of the picture moved, in pixels that were drawn."""
    return hypot(*((z - 1) * n / 2 + s for z, s, n in zip(zoom, shift, shape, strict=True)))


def _box(matte: Bytes) -> list[int] | None:
    rows, columns = (np.flatnonzero(matte.any(axis=axis)) for axis in (1, 0))
    if not rows.size:
        return None
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def _named_size(job: ImageJob, drawn: Size) -> Size:
    """The result's size, by which files may be named; where the source is gone by now, any."""
    try:
        return images.probe_image(Path(job.kept_image), decode=False)[0]
    except SourceImageError:
        return drawn
