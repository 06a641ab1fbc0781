"""Kinds of text that hold paths: which parts of a value are paths is said here alone."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import FOREIGN_PATTERN, joined, scheme_of, shown_place
from hyimg_cli.settings.kinds import ANY_TEXT, NO_STORE, TEXT, Kind, matching, read_text
from hyimg_cli.settings.values import BadValue, shown
from hyimg_cli.spec.job import POSES_SUFFIX
from hyimg_cli.spec.options import MAX_SOURCE_IMAGES, KeepOutside, Lora, Region

REGION_PATTERN = r"\s*" + r"\s*,\s*".join([r"([0-9]{1,6})"] * 4) + r"\s*"
_LORA = r"(?:(high|low)=)?(none|[^\0]*\.safetensors)(?:@(-?[0-9]+(?:\.[0-9]+)?))?"


@dataclass(frozen=True, eq=False)
class PathKind(Kind):
    """A kind whose values hold paths. Whoever resolves, moves, hides or finds the files of a job
    asks it which parts they are; a list of such fields stands nowhere else.

    Its `names` are paths, and what may stand in their place: `is_path` tells them apart. A value
    is one name, or several.
    """

    is_path: Callable[[str], bool] = lambda name: True

    def names(self, value: Any) -> Sequence[str]:
        """The names in a value, typed or as in JSON."""
        return [value] if isinstance(value, str) else value

    def with_names(self, value: Any, names: Sequence[str]) -> Any:
        """The value, typed, with other names."""
        return names[0] if isinstance(value, str) else tuple(names)

    def to_json(self, value: Any) -> Any:
        """A typed value as in JSON."""
        return value if isinstance(value, str) else list(value)

    def map_paths(self, value: Any, change: Callable[[str], str]) -> Any:
        """The value, typed, with each path changed."""
        names = [self.as_path(change(n)) if self.is_path(n) else n for n in self.names(value)]
        return self.with_names(value, names)

    def as_path(self, path: str) -> str:
        """A path, spelled so that it is one."""
        return path if self.is_path(path) else f"./{path}"

    def resolve_paths(self, value: Any, folder: Path) -> Any:
        """A value of a line in `folder`, its names led from the working folder."""
        return self.with_names(value, [self.resolve_name(n, folder) for n in self.names(value)])

    def resolve_name(self, name: str, folder: Path) -> str:
        """A name of a line in `folder`, led from the working folder where it is a path."""
        return self.as_path(shown_place(joined(folder, name))) if self.is_path(name) else name


class ModelName(PathKind):
    """An embedded model, a hub id, or the path of a folder, which begins with a dot or a slash."""

    def resolve_name(self, name: str, folder: Path) -> str:
        """One that leads nowhere from `folder` leads from the working folder."""
        there = str(folder / name)
        return self.as_path(there) if self.is_path(name) and os.path.isdir(there) else name


class Camera(PathKind):
    """Keys, the path of a file of poses, or that of a folder with one."""

    def resolve_name(self, name: str, folder: Path) -> str:
        there = shown_place(joined(folder, name))
        if os.path.isdir(there):
            return f"{there}/poses{POSES_SUFFIX}"
        return there if self.is_path(name) else name


class Loras(PathKind):
    """LoRA files, `;` between them: `[high=|low=]FILE[@WEIGHT]`; comes back as a tuple of Lora."""

    def names(self, value: str | tuple[Lora, ...]) -> list[str]:
        return [one.file for one in _typed(value) if one.file]

    def with_names(self, value: str | tuple[Lora, ...], names: Sequence[str]) -> tuple[Lora, ...]:
        left = iter(names)
        return tuple(replace(one, file=next(left)) if one.file else one for one in _typed(value))

    def to_json(self, value: Iterable[Lora]) -> str:
        return ";".join(map(str, value))

    def resolve_name(self, name: str, folder: Path) -> str:
        """A file in `folder`, else one in the working folder, else a name as it is."""
        file = os.path.expanduser(name)
        present = filter(os.path.isfile, (str(folder / file), file))
        return next(map(self.as_path, present), name)


def is_hub_file(name: str) -> bool:
    """Tell OWNER/REPOSITORY/FILE from a path."""
    first = name.split("/")[0]
    return name.count("/") >= 2 and first not in ("", ".", "..", "~") and not scheme_of(name)


def _typed(value: str | tuple[Lora, ...]) -> tuple[Lora, ...]:
    return _loras(value) if isinstance(value, str) else value


def _own_path(text: str) -> str:
    """The text. Raises BadValue for a path that only a shell or Windows understands."""
    if not re.match(FOREIGN_PATTERN, text):
        return text
    if text.startswith("~"):
        raise BadValue(f"{shown(text)}: ~ is not expanded here", "write the whole path")
    hint = "write the path that it has on this machine, with forward slashes"
    raise BadValue(f"{shown(text)} is a path of Windows", hint)


def _path(value: Any) -> str:
    hint = "give a path, relative to the manifest; of a web page, save the picture first"
    if type(value) is not str:
        raise BadValue(f"{shown(value)} is not a path", hint, "wrong-type")
    if not re.fullmatch(_PICTURE, _own_path(value)):
        raise BadValue(f"{shown(value)} is not a path", hint)
    return value


def _paths(value: Any) -> tuple[str, ...]:
    paths = value if type(value) is list else [value]
    if len(paths) > MAX_SOURCE_IMAGES:
        what, hint = f"{len(paths)} images", f"give 1 to {MAX_SOURCE_IMAGES} images"
        raise BadValue(what, hint, "too-many-images")
    return tuple(_path(path) for path in paths)


def _region(value: Any) -> str:
    hint = 'give a box "LEFT,TOP,RIGHT,BOTTOM" in pixels of the source, or the path of a mask'
    if type(value) is list and len(value) == 4 and all(type(side) is int for side in value):
        value = ",".join(map(str, value))
    if type(value) is not str:
        raise BadValue(f"{shown(value)} is not a region", hint, "wrong-type")
    if not re.fullmatch(r"[\d\s,.+-]*", value, re.ASCII):
        return _path(value)
    sides = re.fullmatch(REGION_PATTERN, value, re.ASCII)
    if sides is None:
        raise BadValue(f"{shown(value)} is not a region", hint)
    left, top, right, bottom = map(int, sides.groups())
    if left >= right or top >= bottom:
        raise BadValue(f"{shown(value)} is empty: right is beyond left, bottom below top", hint)
    return f"{left},{top},{right},{bottom}"


def _loras(value: Any) -> tuple[Lora, ...]:
    hint = "write FILE or FILE@WEIGHT; for a model of two transformers high=FILE;low=FILE"
    if type(value) is not str:
        raise BadValue(f"{shown(value)} is not a LoRA", hint, "wrong-type")
    found = []
    for part in filter(None, map(str.strip, value.split(";"))):
        match = re.fullmatch(_LORA, part)
        if match is None:
            what = f"{shown(part)} is not a LoRA: only safetensors files are read"
            raise BadValue(what, hint)
        on, file, weight = match[1] or "", match[2], float(match[3] or 1)
        if file == "none":
            file, weight = "", 0.0
        elif not file.startswith("~"):
            _own_path(file)
        found.append(Lora(file, weight, on))
    return tuple(found)


_PICTURE = rf"(?!(?:{NO_STORE}):/|[Dd][Aa][Tt][Aa]:|~/|[A-Za-z]:[\\/])[^\x00]+"
_IS_PATH = matching(_PICTURE)
_ARE_PATHS = {"type": "array", "items": _IS_PATH, "maxItems": MAX_SOURCE_IMAGES}
_PIXEL = {"type": "integer", "minimum": 0}
_BOX = {"type": "array", "items": _PIXEL, "minItems": 4, "maxItems": 4}
_ANY_REGION = matching(r"(?!https?://|data:)[^\x00]+")
MODEL_NAME = ModelName(
    partial(read_text, "model"), TEXT, is_path=lambda name: name.split("/")[0] in ("", ".", "..")
)
CAMERA = Camera(
    lambda value: _own_path(read_text("camera", value)),
    TEXT,
    is_path=lambda name: name.endswith(POSES_SUFFIX),
)
REGION = PathKind(
    _region,
    {"anyOf": [_ANY_REGION, _BOX]},
    "box|path",
    is_path=lambda name: bool(KeepOutside(region=Region(name)).mask),
)
SOURCES = PathKind(
    _paths,
    {"anyOf": [_IS_PATH, _ARE_PATHS]},
    split=lambda cell: [path.strip() for path in cell.split(";") if path.strip()],
)
LORAS = Loras(_loras, ANY_TEXT, "text", is_path=lambda name: not is_hub_file(name))
