"""Kinds of values that hold paths; only this module knows which parts of a value are paths."""

import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import FOREIGN_PATTERN, joined, scheme_of, shown_place
from hyimg_cli.settings.kinds import (
    BOX_PATTERN,
    BOXES,
    CUSTOM_ID,
    NO_STORE,
    SIDES,
    TEXT,
    Kind,
    box_of,
    pattern_kind,
    text,
    text_of_boxes,
)
from hyimg_cli.settings.values import BadValue, shown
from hyimg_cli.spec.job import POSES_SUFFIX
from hyimg_cli.spec.model_name import names_file, parts_of, with_components
from hyimg_cli.spec.options import MAX_SOURCE_IMAGES, KeepOutside, Lora, Region, boxes_text

# Before the id of a result that is the source of another job.
LINK = "@"
# Each part has one reading only: with two, matching a long list with a fault at its end would take
# exponential time.
_ON = r"(?:(high|low)=\s*|(?!high=|low=))"
_LORA = _ON + r"([^\x00;\s][^\x00;]*\.(?i:safetensors)|none)(?:@(-?[0-9]+(?:\.[0-9]+)?))?"


@dataclass(frozen=True, eq=False)
class PathKind(Kind):
    """A kind whose values hold paths.

    Code that resolves, moves, hides or finds a job's files asks it for the paths; no other list of
    such fields exists. A value is one name, or several. Names are paths, or something else in their
    place; `is_path` tells them apart.
    """

    is_path: Callable[[str], bool] = lambda name: True

    def names(self, value: Any) -> Sequence[str]:
        """Return the names in a value, typed or as in JSON."""
        return [value] if isinstance(value, str) else value

    def with_names(self, value: Any, names: Sequence[str]) -> Any:
        """Return the typed value with other names."""
        return names[0] if isinstance(value, str) else tuple(names)

    def to_json(self, value: Any) -> Any:
        """Return a typed value as in JSON."""
        return value if isinstance(value, str) else list(value)

    def map_paths(self, value: Any, change: Callable[[str], str]) -> Any:
        """Return the typed value with each path changed."""
        names = [self.as_path(change(n)) if self.is_path(n) else n for n in self.names(value)]
        return self.with_names(value, names)

    def as_path(self, path: str) -> str:
        """Return a path in a form that `is_path` recognises."""
        return path if self.is_path(path) else f"./{path}"

    def resolve_paths(self, value: Any, folder: Path) -> Any:
        """Return a value of a line in `folder`, with names relative to the working folder."""
        return self.with_names(value, [self.resolve_name(n, folder) for n in self.names(value)])

    def resolve_name(self, name: str, folder: Path) -> str:
        """Return a name of a line in `folder`; a path becomes relative to the working folder."""
        if not self.is_path(name):
            return name
        return self.as_path(_on_disk(shown_place(joined(folder, name))))


class ModelName(PathKind):
    """An embedded model, a hub id, the path of a folder, or of a file of weights with its parts.

    The path of a folder begins with a dot or a slash. A file may be one of the hub.
    """

    def names(self, value: str) -> list[str]:
        return [name for name in parts_of(value) if name]

    def with_names(self, value: str, names: Sequence[str]) -> str:
        return with_components(*names) if len(names) > 1 else names[0]

    def resolve_name(self, name: str, folder: Path) -> str:
        """Return a path relative to the working folder if it does not exist in `folder`."""
        there, may_be = str(folder / name), self.is_path(name) or names_file(name)
        return self.as_path(there) if may_be and os.path.exists(there) else name


class RegionKind(PathKind):
    """A box, or the path of a mask, after `transparent:` or `opaque:` if its alpha decides."""

    def names(self, value: Any) -> Sequence[str]:
        is_text = isinstance(value, str)
        return [KeepOutside(region=Region(value)).mask or value] if is_text else value

    def with_names(self, value: Any, names: Sequence[str]) -> Any:
        (old,) = self.names(value)
        return value.removesuffix(old) + names[0]


class Camera(PathKind):
    """Camera keys, the path of a file of poses, or the path of a folder with one."""

    def resolve_name(self, name: str, folder: Path) -> str:
        there = _on_disk(shown_place(joined(folder, name)))
        if os.path.isdir(there):
            return f"{there}/poses{POSES_SUFFIX}"
        return there if self.is_path(name) else name


class Loras(PathKind):
    """LoRA files, separated by `;`: `[high=|low=]FILE[@WEIGHT]`.

    The typed value is a tuple of Lora.
    """

    def names(self, value: tuple[Lora, ...]) -> list[str]:
        return [one.file for one in value if one.file]

    def with_names(self, value: tuple[Lora, ...], names: Sequence[str]) -> tuple[Lora, ...]:
        left = iter(names)
        return tuple(replace(one, file=next(left)) if one.file else one for one in value)

    def to_json(self, value: tuple[Lora, ...]) -> str:
        return ";".join(map(str, value))

    def resolve_name(self, name: str, folder: Path) -> str:
        """Return a file in `folder`, else one in the working folder, else the name unchanged."""
        file = os.path.expanduser(name)
        present = filter(os.path.isfile, map(_on_disk, (str(folder / file), file)))
        return next(map(self.as_path, present), name)


def _on_disk(path: str) -> str:
    """Return the path of a file that exists if only the encoding of accents differs from it."""
    if path.isascii() or scheme_of(path) or os.path.lexists(path):
        return path
    found = ""
    for part in Path(path).parts:
        forms = (part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD")))
        found = next(filter(os.path.lexists, (os.path.join(found, one) for one in forms)), "")
        if not found:
            return path
    return found


def is_hub_file(name: str) -> bool:
    """Return True for OWNER/REPOSITORY/FILE, False for a path."""
    first = name.split("/")[0]
    return name.count("/") >= 2 and first not in ("", ".", "..", "~") and not scheme_of(name)


def linked(name: str) -> str:
    """Return the id of the result that an image's name stands for; empty for a path."""
    return name.removeprefix(LINK) if name.startswith(LINK) else ""


def _paths(value: Any) -> tuple[str, ...]:
    paths = value if type(value) is list else [value]
    if len(paths) > MAX_SOURCE_IMAGES:
        hint = f"give 1 to {MAX_SOURCE_IMAGES}: no model takes more"
        raise BadValue(f"{len(paths)} images", hint, "too-many-images")
    return tuple(map(_picture, paths))


def _picture(value: Any) -> str:
    path: str = _PICTURE.read(value)
    if path.startswith(LINK):
        CUSTOM_ID.read(linked(path))
    # A Path would turn it into the name of another file.
    if scheme_of(path) and "//" in path.partition("://")[2]:
        raise BadValue(f"{shown(path)} has two slashes in its name", "copy it to another name")
    return path


def _names_in_cell(cell: str) -> list[str]:
    """Return the paths in a table's cell. Raises BadValue for a list of JSON or of Python."""
    if re.match(r"""\s*\[\s*["']""", cell):
        hint = "write the paths alone, with ; between them: a.png;b.png"
        raise BadValue(f"{shown(cell)} is a list", hint, "wrong-type")
    return [path.strip() for path in cell.split(";") if path.strip()]


def _region(value: Any) -> str:
    region: str = _BOX_OR_MASK.read(text_of_boxes(value))
    if not re.fullmatch(_BOXES, region, re.ASCII):
        return region
    found = re.finditer(BOX_PATTERN, region, re.ASCII)
    return boxes_text(box_of(sides, _REGION_HINT) for sides in found)


def _loras(written: re.Match[str]) -> tuple[Lora, ...]:
    return tuple(
        Lora("", 0.0, on) if file == "none" else Lora(file, float(weight or 1), on)
        for on, file, weight in re.findall(_LORA, written[0])
    )


_REGION_HINT = (
    "write the box LEFT,TOP,RIGHT,BOTTOM, or a mask's path with forward slashes; ~ is not expanded"
)
_BOXES = f"{BOX_PATTERN}(?:;{BOX_PATTERN})*"
_PATH = rf"(?!(?:{NO_STORE}):/|[Dd][Aa][Tt][Aa]:|{FOREIGN_PATTERN})[^\x00]+"
_PICTURE = pattern_kind(
    _PATH,
    "is not a path on this machine",
    "write the path with forward slashes; ~ is not expanded; save pictures from the web first",
)
_PICTURES = {"type": "array", "items": _PICTURE.schema, "maxItems": MAX_SOURCE_IMAGES}
_BOX_OR_MASK = pattern_kind(
    rf"{_BOXES}|(?:transparent:|opaque:|)(?![0-9\s,;.+-]*$){_PATH}",
    "is not a region",
    _REGION_HINT,
)
MODEL_NAME = ModelName(
    text("model").read,
    TEXT,
    # As for LoRAs, OWNER/REPOSITORY/FILE is a file of the hub.
    is_path=lambda name: (
        name.split("/")[0] in ("", ".", "..") or (names_file(name) and not is_hub_file(name))
    ),
)
CAMERA = Camera(text("camera").read, TEXT, is_path=lambda name: name.endswith(POSES_SUFFIX))
REGION = RegionKind(
    _region,
    {"anyOf": [_BOX_OR_MASK.schema, SIDES, BOXES]},
    "box|path",
    is_path=lambda name: bool(name) and KeepOutside(region=Region(name)).mask == name,
)
SOURCES = PathKind(
    _paths,
    {"anyOf": [_PICTURE.schema, _PICTURES]},
    split=_names_in_cell,
    is_path=lambda name: not name.startswith(LINK),
)
_LORAS = pattern_kind(
    rf"[\s;]*(?:{_LORA}\s*(?:;[\s;]*|$))*",
    "is not FILE.safetensors or FILE.safetensors@WEIGHT",
    "write the weight as @0.5, without spaces; only safetensors files are read; for a model of two "
    "transformers write high=FILE;low=FILE",
    _loras,
)
LORAS = Loras(
    _LORAS.read, _LORAS.schema, "text", split=str.strip, is_path=lambda name: not is_hub_file(name)
)
