"""Read back the metadata of a picture, an MP4 or a sidecar. Files may come from anywhere, so
nothing in them is believed: types are checked here, values where they are used.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from hyimg_cli.errors import UsageError, require
from hyimg_cli.files import UnfitFile, json_of, opened, text_of
from hyimg_cli.media.frames import ALONE
from hyimg_cli.media.images import text_of as picture_text_of
from hyimg_cli.media.metadata import FORMAT, PictureText, Provenance
from hyimg_cli.media.xmp import source_type_in
from hyimg_cli.spec.job import Format

Part = TypeVar("Part")
Kind = Format | Literal["mp4", "sidecar"]
_MAGIC: tuple[tuple[re.Pattern[bytes], Kind], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
    (re.compile(rb"....ftyp", re.DOTALL), "mp4"),
    (re.compile(rb"\s*\{"), "sidecar"),
)
# Texts of a record that older ones lack.
_TEXTS = ("size", "pixel_sha256", "cot_text", "bot_task")
_WITH_XMP = {"export_xmp": "1"}
# A record of the longest text is a tenth of it.
MAX_SIDECAR_BYTES = 10_000_000
_OURS = "give a .png, .jpg, .webp or .mp4 that hyimg wrote, or the .json beside an .mp4"
_NO_RECORD = "it was written with --no-metadata, by another program, or saved again by one"


@dataclass(frozen=True)
class Record:
    """Metadata of hyimg in a file. `source_sha256` is empty where it is not recorded, `size`,
    `pixel_sha256`, `cot_text` and `bot_task` too; `raw` is all of it as JSON.
    """

    job: dict[str, Any]
    provenance: Provenance
    source_sha256: tuple[str, ...]
    size: str
    pixel_sha256: str
    cot_text: str
    bot_task: str
    raw: dict[str, Any]


@dataclass(frozen=True)
class Described:
    """A file and what it says. `record` is None for a picture of another program, which has at most
    a `parameters` text and a `source_type`: IPTC's address for how it came about.
    """

    path: Path
    kind: Kind
    record: Record | None
    parameters: str = ""
    source_type: str = ""


def read_described(path: Path) -> Described:
    """A file's metadata. Raises UsageError where there is none, where it is of another kind, says
    nothing, or holds a record that is damaged; SourceImageError for a damaged picture.
    """
    kind = _kind(path)
    if kind == "sidecar":
        return Described(path, kind, _record(_sidecar(path), path, _OURS))
    if kind == "mp4":
        text, source_type = _comment(path)
        place, sidecar = path, path.with_suffix(".json")
        if not text.lstrip().startswith("{"):  # another program dropped the comment
            if not sidecar.is_file():
                raise _fault("none", "the video says nothing about itself", path, _NO_RECORD)
            text, place = _sidecar(sidecar), sidecar
        return Described(path, kind, _record(text, place), source_type=source_type)
    said = picture_text_of(path)
    if said == PictureText():
        raise _fault("none", "the picture says nothing about itself", path, _NO_RECORD)
    found = _record(said.record, path) if said.record else None
    return Described(path, kind, found, said.parameters, said.source_type)


def _kind(path: Path) -> Kind:
    try:
        with opened(path) as file:
            start = file.read(64)
    except FileNotFoundError:
        raise _fault("missing", "there is no such file", path, _OURS) from None
    except IsADirectoryError:
        hint = "name a file in it, for example outputs/NAME.png"
        raise _fault("is-a-folder", "this is a folder", path, hint) from None
    except (OSError, ValueError) as error:
        raise _fault("unreadable", f"it cannot be read: {error}", path) from None
    for magic, kind in _MAGIC:
        if magic.match(start):
            return kind
    raise _fault("not-ours", "this is no PNG, JPEG, WebP, MP4 or sidecar", path, _OURS)


def _comment(path: Path) -> tuple[str, str]:
    """The comment of an MP4, and the source type in its XMP packet."""
    require("av")
    import av

    try:
        with opened(path) as file, av.open(file, "r", options=ALONE | _WITH_XMP) as container:
            if container.streams.video:
                said = container.metadata
                return said.get("comment", ""), source_type_in(said.get("xmp", "").encode())
        what = "the video is cut short: it has no pictures in it"
    # A file that lies about what it is ends in errors of many kinds.
    except (av.error.FFmpegError, OSError, ValueError) as error:
        what = f"the video cannot be read: {error}"
    raise _fault("damaged", what, path, "copy it again, or give the .json beside it")


def _sidecar(path: Path) -> str:
    try:
        return text_of(path, MAX_SIDECAR_BYTES)
    except UnfitFile as error:
        raise _fault("damaged", f"this is no sidecar: {error}", path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _fault("unreadable", f"it cannot be read: {error}", path) from None


def _record(text: str, path: Path, hint: str = _NO_RECORD) -> Record:
    """`hint`: what to do where the text is no record."""
    try:
        raw = json_of(text)
    except ValueError:
        raise _fault("damaged", "its record is not JSON", path, hint) from None
    version = raw.get("format") if isinstance(raw, dict) else None
    if type(version) is not int or not isinstance(raw.get("job"), dict):
        raise _fault("none", "this is no record of a job", path, hint)
    if not 1 <= version <= FORMAT:
        what = f"its record is of format {version}; this version reads up to {FORMAT}"
        raise _fault("newer", what, path, "use the hyimg that wrote it, or a newer one")
    return Record(
        job=raw["job"],
        provenance=Provenance(
            _part(raw, "version", str),
            _part(raw, "model_fingerprint", str),
            _texts(raw, "settings"),
            _texts(raw, "packages"),
        ),
        source_sha256=tuple(map(str, _part(raw, "source_sha256", list))),
        **{name: _part(raw, name, str) for name in _TEXTS},
        raw=raw,
    )


def _texts(raw: dict[str, Any], name: str) -> dict[str, str]:
    return {str(key): str(value) for key, value in _part(raw, name, dict).items()}


def _part(raw: dict[str, Any], name: str, kind: type[Part]) -> Part:
    """A part of a record; empty where it is missing or of another type."""
    value = raw.get(name)
    return value if isinstance(value, kind) else kind()


def _fault(slug: str, what: str, path: Path, hint: str = "") -> UsageError:
    return UsageError(what, where=path, hint=hint, code=f"metadata.{slug}")
