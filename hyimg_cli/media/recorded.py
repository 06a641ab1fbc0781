"""Read back the metadata of a PNG, an MP4 or a sidecar. Files may come from anywhere, so
nothing in them is believed: types are checked here, values where they are used.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyimg_cli.errors import UsageError, require
from hyimg_cli.files import UnfitFile, opened, text_of
from hyimg_cli.media.frames import ALONE
from hyimg_cli.media.images import png_texts
from hyimg_cli.media.metadata import FORMAT, KEYWORD, Making

Kind = Literal["png", "mp4", "sidecar"]
_PNG, _FTYP = b"\x89PNG\r\n\x1a\n", b"ftyp"
# A record of the longest text is a tenth of it.
MAX_SIDECAR_BYTES = 10_000_000
_OURS = "give a .png or .mp4 that hyimg wrote, or the .json beside an .mp4"
_NO_RECORD = "it was written with --no-metadata, by another program, or saved again by one"


@dataclass(frozen=True)
class Record:
    """Metadata of hyimg in a file. `source_sha256` is empty where it is not recorded, `size`,
    `cot_text` and `bot_task` too; `raw` is all of it as JSON.
    """

    job: dict[str, Any]
    making: Making
    source_sha256: tuple[str, ...]
    size: str
    cot_text: str
    bot_task: str
    raw: dict[str, Any]


@dataclass(frozen=True)
class Described:
    """A file and what it says. `record` is None for a picture of another program, whose
    `parameters` text is all there is.
    """

    path: Path
    kind: Kind
    record: Record | None
    parameters: str = ""


def read_described(path: Path) -> Described:
    """A file's metadata. Raises UsageError where there is none, where it is of another kind, says
    nothing, or holds a record that is damaged; SourceImageError for a damaged picture.
    """
    match _kind(path):
        case "png":
            return _of_png(path)
        case "mp4":
            return _of_film(path)
        case "sidecar":
            return Described(path, "sidecar", _record(_sidecar(path), path, _OURS))


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
    if start.startswith(_PNG):
        return "png"
    if start[4:8] == _FTYP:
        return "mp4"
    if start.lstrip().startswith(b"{"):
        return "sidecar"
    raise _fault("not-ours", "this is no PNG, MP4 or sidecar", path, _OURS)


def _of_png(path: Path) -> Described:
    texts = png_texts(path)
    parameters = texts.get("parameters", "")
    if KEYWORD not in texts and not parameters:
        raise _fault("none", "the picture says nothing about itself", path, _NO_RECORD)
    record = _record(texts[KEYWORD], path) if KEYWORD in texts else None
    return Described(path, "png", record, parameters)


def _of_film(path: Path) -> Described:
    """By its comment; by the sidecar where another program dropped that."""
    sidecar = path.with_suffix(".json")
    text = _comment(path)
    if text.lstrip().startswith("{"):
        return Described(path, "mp4", _record(text, path))
    if sidecar.is_file():
        return Described(path, "mp4", _record(_sidecar(sidecar), sidecar))
    raise _fault("none", "the video says nothing about itself", path, _NO_RECORD)


def _comment(path: Path) -> str:
    require("av")
    import av

    try:
        with opened(path) as file, av.open(file, "r", options=ALONE) as container:
            if container.streams.video:
                return str(container.metadata.get("comment", ""))
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
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise _fault("damaged", "its record is not JSON", path, hint) from None
    version = raw.get("format") if isinstance(raw, dict) else None
    if type(version) is not int or not isinstance(raw.get("job"), dict):
        raise _fault("none", "this is no record of a job", path, hint)
    if not 1 <= version <= FORMAT:
        what = f"its record is of format {version}; this version reads up to {FORMAT}"
        raise _fault("newer", what, path, "use the hyimg that wrote it, or a newer one")
    return Record(
        job=raw["job"],
        making=Making(
            _text(raw, "version"),
            _text(raw, "model_fingerprint"),
            _texts(raw, "settings"),
            _texts(raw, "packages"),
        ),
        source_sha256=tuple(map(str, _list(raw, "source_sha256"))),
        size=_text(raw, "size"),
        cot_text=_text(raw, "cot_text"),
        bot_task=_text(raw, "bot_task"),
        raw=raw,
    )


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    return value if isinstance(value, str) else ""


def _texts(raw: dict[str, Any], name: str) -> dict[str, str]:
    value = raw.get(name)
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _list(raw: dict[str, Any], name: str) -> list[Any]:
    value = raw.get(name)
    return value if isinstance(value, list) else []


def _fault(slug: str, what: str, path: Path, hint: str = "") -> UsageError:
    return UsageError(what, where=str(path), hint=hint, code=f"metadata.{slug}")
