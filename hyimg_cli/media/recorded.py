"""Read back the metadata of a picture, an MP4 or a sidecar.

Files are untrusted: types are checked here, values where they are used.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from hyimg_cli.errors import SourceImageError, UsageError
from hyimg_cli.files import bytes_of, json_of, opened
from hyimg_cli.media.frames import open_video
from hyimg_cli.media.images import text_of as picture_text_of
from hyimg_cli.media.metadata import FORMAT, PictureText
from hyimg_cli.media.source_files import file_faults
from hyimg_cli.media.xmp import source_type_in
from hyimg_cli.spec.job import Format

Kind = Format | Literal["mp4", "sidecar", "answer"]
_MAGIC: tuple[tuple[re.Pattern[bytes], Kind], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
    (re.compile(rb"....ftyp", re.DOTALL), "mp4"),
    (re.compile(rb"\s*\{"), "sidecar"),
)
# A record of the longest text is a tenth of this size.
MAX_SIDECAR_BYTES = 10_000_000
_OURS = "give a .png, .jpg, .webp or .mp4 that hyimg wrote, or the .json next to an .mp4"
_NO_RECORD = "use a file as hyimg wrote it, without --no-metadata; others may drop the record"


class Record(BaseModel, extra="allow", frozen=True):
    """hyimg's metadata of a file; missing parts are empty. See `Provenance`, and `Outcome`."""

    format: int = Field(strict=True)
    job: dict[str, Any]
    version: str = ""
    model_fingerprint: str = ""
    settings: dict[str, str] = {}
    packages: dict[str, str] = {}
    source_sha256: tuple[str, ...] = ()
    size: str = ""
    pixel_sha256: str = ""
    cot_text: str | None = None
    bot_task: str | None = None
    layer: int = 0
    answer: str | None = None
    answer_token_ids: tuple[int, ...] = ()
    finish: str | None = None
    choices: dict[str, float] = {}
    mass: float | None = None
    thought: str | None = None
    confidence: dict[str, float | None] = {}

    @field_validator("*", mode="wrap")
    @classmethod
    def _read_leniently(cls, value: Any, read: Any, info: ValidationInfo) -> Any:
        """Treat a value of the wrong type as not recorded."""
        field = cls.model_fields[str(info.field_name)]
        try:
            return read(value)
        except ValidationError:
            if field.is_required():
                raise
            return field.default


@dataclass(frozen=True)
class Described:
    """A file and its metadata.

    `record` is None for a picture of another program, which has at most a `parameters` text and a
    `source_type`, IPTC's address for its origin.
    """

    path: Path
    kind: Kind
    record: Record | None
    parameters: str = ""
    source_type: str = ""


def read_described(path: Path) -> Described:
    """Return a file's metadata.

    Raises UsageError if the file is missing, of another kind, without metadata, or has a damaged
    record; SourceImageError for a damaged picture.
    """
    kind = _kind(start_of(path))
    if kind is None:
        what = "the file is not a PNG, JPEG, WebP, MP4 or sidecar"
        raise record_fault("not-ours", what, path, _OURS)
    if kind == "sidecar":
        return Described(path, kind, _read_sidecar(path))
    if kind == "mp4":
        text, source_type = _video_texts(path)
        if text.lstrip().startswith("{"):
            return Described(path, kind, _record(text, path), source_type=source_type)
        sidecar = path.with_suffix(".json")  # another program dropped the comment
        if not sidecar.is_file():
            raise record_fault(
                "none", "the video has no record of how it was made", path, _NO_RECORD
            )
        return Described(path, kind, _read_sidecar(sidecar), source_type=source_type)
    said = picture_text_of(path)
    if said == PictureText():
        raise record_fault("none", "the picture has no record of how it was made", path, _NO_RECORD)
    found = _record(said.record, path) if said.record else None
    return Described(path, kind, found, said.parameters, said.source_type)


def start_of(path: Path) -> bytes:
    """Return the first bytes of a file. Raises UsageError if it cannot be read."""
    try:
        with file_faults(path), opened(path) as file:
            return bytes(file.read(64))
    except SourceImageError as error:
        slug = error.code.removeprefix("source.")
        known = slug if slug in ("missing", "is-a-folder") else "unreadable"
        raise record_fault(known, error.what, path, _OURS) from None


def _kind(start: bytes) -> Kind | None:
    """Return the kind of a file by its first bytes; None if hyimg does not write it."""
    return next((kind for magic, kind in _MAGIC if magic.match(start)), None)


def _video_texts(path: Path) -> tuple[str, str]:
    """Return the comment of an MP4, and the source type in its XMP packet."""
    try:
        with open_video(path, export_xmp="1") as container:
            said = container.metadata
    except SourceImageError as error:
        hint = "copy it again, or give the .json next to it"
        raise record_fault("damaged", error.what, path, hint) from error
    return said.get("comment", ""), source_type_in(said.get("xmp", "").encode())


def _read_sidecar(path: Path) -> Record:
    try:
        return _record(bytes_of(path, MAX_SIDECAR_BYTES), path, _OURS)
    except OSError as error:
        raise record_fault("damaged", f"the sidecar cannot be read: {error}", path) from None


def _record(text: str | bytes, path: Path, hint: str = _NO_RECORD) -> Record:
    """Parse a record; `hint`: what to do if the text is not one."""
    try:
        return record_in(json_of(text), path, hint)
    except ValueError:
        raise record_fault("damaged", "the record is not JSON", path, hint) from None


def record_in(raw: Any, path: Path, hint: str) -> Record:
    """Return the record of a file. Raises UsageError, with `hint`, if it is not one."""
    try:
        version = raw.get("format") if isinstance(raw, dict) else None
        if type(version) is int and not 1 <= version <= FORMAT:
            what = f"the record has format {version}; this version reads formats up to {FORMAT}"
            raise record_fault(
                "newer", what, path, "use the version of hyimg that wrote it, or a newer one"
            )
        return Record.model_validate(raw)
    except ValidationError:
        raise record_fault("none", "the file is not the record of a job", path, hint) from None


def record_fault(slug: str, what: str, path: Path, hint: str = "") -> UsageError:
    """Return the error of a file whose record cannot be read."""
    return UsageError(what, where=path, hint=hint, code=f"metadata.{slug}")
