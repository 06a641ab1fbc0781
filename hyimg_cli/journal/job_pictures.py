"""Write a job's picture as a file with its metadata.

For an edit that keeps the source outside its region, write the redraw first, then the result:

    outputs/NAME.redraw.png      what the model drew        outputs/NAME.png        the result
    outputs/NAME.reference.png   the source's round trip    outputs/NAME.mask.png   its matte
    outputs/NAME.touched.png     what this edit and those before it touched (`media.history`)
    outputs/NAME.redraw-2.png    what it drew of a second part, with its NAME.reference-2.png

    outputs/NAME.layer-1.png     the lowest of a picture's layers; NAME.png is what they add up to

Redraw and reference are kept. So a fault after drawing loses no picture, and a change of region
or gate needs no model.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from hyimg_cli.errors import OutputError, SourceImageError
from hyimg_cli.journal.edit_facts import list_breaches
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import mask_print
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media import formats
from hyimg_cli.media.carried import read_carried, region_facts, region_of
from hyimg_cli.media.history import Origin, history_of_source
from hyimg_cli.media.images import Pixels, pixel_digest, text_of
from hyimg_cli.media.metadata import PictureFacts, PictureText, picture_text, rewrite_metadata
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec.events import LayerFile, OutputFile
from hyimg_cli.spec.job import DRAWN_FILES, EDIT_SUFFIXES, LAYER_MARK, ImageJob, Size

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


@dataclass(frozen=True, eq=False)
class Drawing:
    """What a model drew, and its source after the model's own round trip, if that is kept."""

    pixels: Pixels
    reference: Pixels | None = None

    @classmethod
    def of(cls, pixels: Pixels | None, reference: Pixels | None) -> "Drawing":
        """Return the drawing of a work that is decoded."""
        assert pixels is not None, "it is decoded"
        return cls(pixels, reference)

    @property
    def shown(self) -> Pixels:
        """Return the reference of an edit."""
        assert self.reference is not None, "it is made where the source is read"
        return self.reference


def keep_redraws(
    folder: JobFolder, job: ImageJob, drawings: Sequence[Drawing], facts: PictureFacts | None
) -> Record:
    """Write redraws and their references; return the line's `edit` so far. Raises StorageError."""
    edit: Record = {"kind": "unfinished", "sha256": {}}
    for (plain, shown), one in zip(DRAWN_FILES, drawings, strict=False):
        data = formats.encode(one.pixels, text=_text(job, one.pixels, facts), fast=True)
        _save_beside(folder, job, edit, plain, data)
        _save_beside(folder, job, edit, shown, formats.encode(one.shown, fast=True))
    return edit


def finish(
    folder: JobFolder,
    job: ImageJob,
    drawings: Sequence[Drawing],
    edit: Record,
    config: OutputConfig,
    source_digest: str = "",
) -> OutputFile:
    """Put redraws back on their source, write the result and its matte, and fill `edit`.

    There is one drawing of the whole source, or one of each crop. The file is read back to check
    what `edit` says of it. Raises SourceImageError if the source is missing or has changed since
    the drawing, OutputError if the whole picture was edited and `on_global` is `fail`, or if a
    pixel differs outside.
    """
    # Imported here: it imports scipy, which would add 0.3 s to the start of every run.
    from hyimg_cli.journal.put_back import put_back_all

    outside, path = job.outside, Path(job.kept_image)
    assert outside is not None, "the job keeps the source outside the edit"
    source = read_carried(path, keep_gps=config.keep_gps)
    if source_digest and source.digest != source_digest:
        what = "the source is not the file that the result was drawn from"
        raise SourceImageError(what, where=path, code="source.changed")
    if any(one.pixels.shape != one.shown.shape for one in drawings):
        what = "the picture was drawn at another size than its source was shown to the model"
        raise OutputError(what, code="outside.not-comparable")
    if job.draft:
        edit["draft"] = job.draft
    if job.inpaints:
        edit |= {"region_mode": outside.region_mode, "strength": outside.strength}
    size = Size(*source.own.shape[:2])
    given = region_of(outside, size)
    if given is not None:
        edit |= region_facts(outside, given)
    has_grey = job.encoding.format != "webp"
    made = put_back_all(job, source, drawings, given, edit, has_grey=has_grey)
    del given
    pixels, matte, is_whole = made.pixels, made.matte, edit["kind"] == "global"
    edit["change"] = {"mean_de": made.change}
    edit["gates"] = list_breaches(edit, outside)
    text, origin = None, Origin(source.digest, pixel_digest(source.own))
    history = history_of_source(path, source.text, origin, size)
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
            text = rewrite_metadata(text, line, region, size, history.pixel_sha256, chain)
    data = source.encode(pixels, job.encoding, text)
    differing = None if is_whole else source.count_differing(data, matte)
    if differing:
        what = f"{differing} pixels outside the edit differ from the source"
        raise OutputError(what, hint="this is a bug: please report it", code="outside.differs")
    edit["outside_equal"] = None if is_whole else True
    box = Image.fromarray(matte).getbbox()
    edit |= {"outside_differing_pixels": differing, "box": None if box is None else list(box)}
    edit["outside_pixels"] = int((matte == 0).sum())
    _save_beside(folder, job, edit, "mask", formats.encode(matte, fast=True))
    has_record = text is not None and bool(text.record)
    if history.links > 1 or (history.links and not has_record):
        _save_beside(folder, job, edit, "touched", history.to_png())
    return _save_result(folder, job, pixels, data)


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
