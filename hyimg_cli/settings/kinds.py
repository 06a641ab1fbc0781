"""The types of values with their ranges: what a manifest field, a flag or a recipe may say.

A kind reads a JSON or TOML value (`read`) or the text of a flag or environment variable (`parse`),
and gives back the typed value or raises `BadValue` with the value found and the values allowed.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hyimg_cli.addresses import scheme_of
from hyimg_cli.files import is_deeper, json_of
from hyimg_cli.spec.job import MAX_SOURCE_IMAGES, Lora, SizeRequest
from hyimg_cli.spec.step_cache import MAX_INTERVAL, MAX_ORDER, StepCache

# Addresses of no object store; what is in memory ends with its process.
NO_STORES = ("file", "local", "memory", "http", "https", "data", "ftp")
MIN_SIDE, MAX_SIDE, MAX_RATIO = 16, 8192, 16
MAX_SEED = 2**63 - 1
# Of a value that is copied through.
MAX_DEPTH = 100
# A folder's name has no dot, so that no folder is another job's file: "a.frames", "a.png".
ID_PATTERN = r"(?!.{129})(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-][A-Za-z0-9._-]*"
SIZE_PATTERN = r"auto|([0-9]{1,5})([xX:])([0-9]{1,5})"
REGION_PATTERN = r"\s*" + r"\s*,\s*".join([r"([0-9]{1,6})"] * 4) + r"\s*"
DEVICE_PATTERN = r"auto|cpu|cuda(:(0|[1-9][0-9]?))?|balanced"
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)
_SIZE_HINT = f'give "auto", "WxH" with sides from {MIN_SIDE} to {MAX_SIDE}, or a ratio "W:H"'
_ID_HINT = (
    "use 1 to 128 letters, digits, dots, dashes or underscores, and no dot in front; "
    "a / makes a folder, whose name has no dot"
)


class BadValue(ValueError):
    """A value that its kind does not allow; `slug` ends the code of the fault it becomes."""

    def __init__(self, what: str, hint: str, slug: str = "bad-value") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.slug = slug


def shown(value: Any, width: int = 60) -> str:
    """`value` as JSON on one line, cut to `width` characters: safe to print in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= width else text[: width - 1] + "…"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `word`, or None where nothing comes close."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def is_custom_id(text: str) -> bool:
    """Tell if `text` may name a job, and so a file: `ID_PATTERN`, whole."""
    return re.fullmatch(ID_PATTERN, text, re.ASCII) is not None


class Kind:
    """A type with its range. `metavar` and `allowed` are what a help page says of it; of `choices`
    a shell completes one.
    """

    metavar = "str"

    @property
    def choices(self) -> tuple[str, ...]:
        return ()

    @property
    def allowed(self) -> str:
        return ""

    def read(self, value: Any) -> Any:
        """The typed value of a JSON or TOML value. Raises BadValue."""
        raise NotImplementedError

    def parse(self, text: str) -> Any:
        """The typed value of a flag's or an environment variable's text. Raises BadValue."""
        return self.read(text)


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number from `low` to `high`. true and 1.0 are none."""

    low: int
    high: int
    metavar = "int"

    @property
    def allowed(self) -> str:
        return f"{self.low} to {self.high}"

    def read(self, value: Any) -> int:
        hint = f"give a whole number from {self.allowed}"
        if type(value) is not int:
            raise BadValue(f"{shown(value)} is not a whole number", hint, "wrong-type")
        if not self.low <= value <= self.high:
            raise BadValue(f"{shown(value)} is out of range", hint, "out-of-range")
        return value

    def parse(self, text: str) -> int:
        return self.read(_integer(text))


def _integer(text: str) -> int | str:
    return int(text) if _INTEGER.fullmatch(text) else text


@dataclass(frozen=True)
class Number(Kind):
    """A finite number from `low` to `high`; `above_low` leaves out `low` itself."""

    low: float
    high: float
    above_low: bool = False
    metavar = "float"

    @property
    def allowed(self) -> str:
        return f"{'above ' * self.above_low}{self.low:g} to {self.high:g}"

    def read(self, value: Any) -> float:
        hint = f"give a number {'' if self.above_low else 'from '}{self.allowed}"
        if type(value) not in (int, float):
            raise BadValue(f"{shown(value)} is not a number", hint, "wrong-type")
        if not self._holds(value):
            raise BadValue(f"{shown(value)} is out of range", hint, "out-of-range")
        return float(value)

    def parse(self, text: str) -> float:
        try:
            number: float | str = float(text)
        except ValueError:
            number = text
        return self.read(number)

    def _holds(self, value: float) -> bool:
        # NOTE: the range goes first; isfinite overflows on integers beyond a double.
        in_range = self.low <= value <= self.high and math.isfinite(value)
        return in_range and not (self.above_low and value == self.low)


@dataclass(frozen=True)
class NumberPair(Kind):
    """Two numbers from `low` to `high`, the smaller one first; as text with a comma between."""

    low: float
    high: float
    metavar = "low,high"

    @property
    def allowed(self) -> str:
        return f"two numbers from {self.low:g} to {self.high:g}, the smaller one first"

    def read(self, value: Any) -> tuple[float, float]:
        numbers = Number(self.low, self.high)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise BadValue(f"{shown(value)} is no span", f"give {self.allowed}", "wrong-type")
        first, last = (numbers.read(one) for one in value)
        if first >= last:
            raise BadValue(f"{shown(value)} is empty", f"give {self.allowed}", "out-of-range")
        return first, last

    def parse(self, text: str) -> tuple[float, float]:
        numbers = Number(self.low, self.high)
        return self.read([numbers.parse(part.strip()) for part in text.strip(" []").split(",")])


@dataclass(frozen=True)
class Truth(Kind):
    """true or false."""

    def read(self, value: Any) -> bool:
        if type(value) is not bool:
            what = f"{shown(value)} is not true or false"
            raise BadValue(what, "give true or false", "wrong-type")
        return value

    def parse(self, text: str) -> bool:
        return self.read(_TRUTHS.get(text.lower(), text))


@dataclass(frozen=True)
class OneOf(Kind):
    """One of `values`; `aliases` maps other spellings to them."""

    values: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        return self.values

    @property
    def allowed(self) -> str:
        return ", ".join(self.values)

    def read(self, value: Any) -> str:
        also = "".join(f'; "{alias}" means {value}' for alias, value in self.aliases)
        hint = f"allowed: {self.allowed}{also}"
        if type(value) is not str:
            raise BadValue(f"{shown(value)} is not text", hint, "wrong-type")
        value = dict(self.aliases).get(value, value)
        if value not in self.values:
            close = nearest(value, self.values)
            guess = f'did you mean "{close}"? ' if close else ""
            raise BadValue(f"{shown(value)} is not known", guess + hint)
        return str(value)


@dataclass(frozen=True)
class Switch(OneOf):
    """One of `values`, of which true and false mean "on" and "off"."""

    def read(self, value: Any) -> str:
        return super().read(("off", "on")[value] if type(value) is bool else value)

    def parse(self, text: str) -> str:
        return self.read(_TRUTHS.get(text.lower(), text))


@dataclass(frozen=True)
class Text(Kind):
    """Text with something in it, unless `may_be_empty`; `noun` names it in messages."""

    noun: str = "text"
    may_be_empty: bool = False

    def read(self, value: Any) -> str:
        if type(value) is not str:
            what, hint = f"{shown(value)} is not text", f"give the {self.noun} as text"
            raise BadValue(what, hint, "wrong-type")
        if not value.strip() and not (self.may_be_empty and value == ""):
            raise BadValue(f"the {self.noun} is empty", f"write the {self.noun}", "empty-text")
        if "\0" in value:
            raise BadValue(f"the {self.noun} holds a NUL character", "take it out")
        return value


@dataclass(frozen=True)
class Folder(Text):
    """The path of a folder; an address is none."""

    noun: str = "folder"
    metavar = "path"

    def read(self, value: Any) -> str:
        text = super().read(value)
        if scheme := scheme_of(text):
            what = f"{shown(text)} is not a place on this machine, and {scheme}: is not served"
            raise BadValue(what, "give a path; ./ in front of it makes it one", "not-served")
        return text

    def parse(self, text: str) -> str:
        if not text:
            raise BadValue("an empty name", "for this folder give .", "empty-text")
        return self.read(text)


@dataclass(frozen=True)
class Region(Kind):
    """A part of a picture: a box of left, top, right and bottom, or the path of a mask."""

    metavar = "box|path"

    def read(self, value: Any) -> str:
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


@dataclass(frozen=True)
class Names(Kind):
    """A list of names, in a text with commas between; comes back as a tuple."""

    metavar = "name,name"

    def parse(self, text: str) -> tuple[str, ...]:
        return self.read([name.strip() for name in text.split(",") if name.strip()])

    def read(self, value: Any) -> tuple[str, ...]:
        if type(value) not in (list, tuple):
            hint = "give a list of names"
            raise BadValue(f"{shown(value)} is not a list", hint, "wrong-type")
        return tuple(Text("name").read(name) for name in value)


@dataclass(frozen=True)
class CustomId(Kind):
    """A job's name, which also names its file."""

    def read(self, value: Any) -> str:
        if type(value) is not str:
            raise BadValue(f"{shown(value)} is not text", _ID_HINT, "wrong-type")
        if not is_custom_id(value):
            raise BadValue(f"{shown(value)} cannot name a job", _ID_HINT, "bad-id")
        return value


@dataclass(frozen=True)
class DeviceName(Kind):
    """Where a model lives: auto, cpu, cuda, cuda:N, or balanced."""

    @property
    def choices(self) -> tuple[str, ...]:
        return ("auto", "cpu", "cuda", "balanced")

    @property
    def allowed(self) -> str:
        return "auto, cpu, cuda, cuda:N, balanced"

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(DEVICE_PATTERN, value):
            raise BadValue(f"{shown(value)} is not a device", f"allowed: {self.allowed}")
        return value


@dataclass(frozen=True)
class Paths(Kind):
    """One path or a list of them; comes back as a tuple."""

    def parse(self, text: str) -> tuple[str, ...]:
        return self.read([path.strip() for path in text.split(";") if path.strip()])

    def read(self, value: Any) -> tuple[str, ...]:
        paths = value if type(value) is list else [value]
        if len(paths) > MAX_SOURCE_IMAGES:
            what, hint = f"{len(paths)} images", f"give 1 to {MAX_SOURCE_IMAGES} images"
            raise BadValue(what, hint, "too-many-images")
        return tuple(_path(path) for path in paths)


@dataclass(frozen=True)
class RunPlace(Folder):
    """A folder, or the address of one in an object store."""

    def read(self, value: Any) -> str:
        is_store = type(value) is str and scheme_of(value) not in ("", *NO_STORES)
        return Text.read(self, value) if is_store else super().read(value)


def _path(value: Any) -> str:
    hint = "give the path of a picture, relative to the manifest"
    if type(value) is not str:
        raise BadValue(f"{shown(value)} is not a path", hint, "wrong-type")
    if not value or "\0" in value:
        raise BadValue(f"{shown(value)} is not a path", hint)
    if scheme_of(value) == "file":
        raise BadValue(f"{shown(value)} is not a path", "leave file:// out, and %20 and its like")
    if scheme_of(value) in NO_STORES or value[:5].lower() == "data:":
        raise BadValue(f"{shown(value)} is not a file on this machine", "save the picture first")
    return value


@dataclass(frozen=True)
class Integers(Kind):
    """A list of 1 to `most` whole numbers from 0 to `high`; comes back as a tuple."""

    most: int
    high: int
    is_distinct: bool = False

    def parse(self, text: str) -> tuple[int, ...]:
        return self.read([_integer(part) for part in re.split(r"[\s,;]+", text.strip(" []"))])

    def read(self, value: Any) -> tuple[int, ...]:
        hint = f"give a list of 1 to {self.most} whole numbers from 0 to {self.high}"
        if type(value) is not list:
            raise BadValue(f"{shown(value)} is not a list", hint, "wrong-type")
        if not 1 <= len(value) <= self.most:
            raise BadValue(f"a list of {len(value)}", hint, "out-of-range")
        each = Integer(0, self.high)
        numbers = tuple(each.read(number) for number in value)
        if self.is_distinct and len(set(numbers)) < len(numbers):
            raise BadValue(f"{shown(value)} names a number twice", "give each of them once")
        return numbers


@dataclass(frozen=True)
class LoraText(Kind):
    """LoRA files, `;` between them: `[high=|low=]FILE[@WEIGHT]`; comes back as a tuple of Lora."""

    metavar = "text"

    def read(self, value: Any) -> tuple[Lora, ...]:
        hint = "write FILE or FILE@WEIGHT; for a model of two transformers high=FILE;low=FILE"
        if type(value) is not str:
            raise BadValue(f"{shown(value)} is not a LoRA", hint, "wrong-type")
        return tuple(_lora(part.strip(), hint) for part in value.split(";") if part.strip())


def _lora(text: str, hint: str) -> Lora:
    on = next((name for name in ("high", "low") if text.startswith(f"{name}=")), "")
    file = text.removeprefix(f"{on}=" if on else "")
    weighed = re.fullmatch(r"(.+)@(-?[0-9]+(?:\.[0-9]+)?)", file)
    weight = 1.0 if weighed is None else float(weighed[2])
    file = file if weighed is None else weighed[1]
    if file == "none":
        return Lora("", 0.0, on)
    if not file.endswith(".safetensors") or "\0" in file:
        what = f"{shown(text)} is not a LoRA: only safetensors files are read"
        raise BadValue(what, hint)
    return Lora(file, weight, on)


class StepCacheText(Kind):
    """`none`, or `taylor` with numbers off their defaults behind a colon; comes back as a
    StepCache, or None.
    """

    metavar = "text"
    ranges = (
        ("interval", 2, MAX_INTERVAL),
        ("order", 0, MAX_ORDER),
        ("first", 1, 1000),
        ("tail", 1, 1000),
    )

    @property
    def allowed(self) -> str:
        return f"none, {StepCache()}"

    def read(self, value: Any) -> StepCache | None:
        if type(value) is not str:
            raise BadValue(f"{shown(value)} is not a step cache", f"write {self.allowed}")
        if value == "none":
            return None
        kind, colon, rest = value.partition(":")
        given = dict(part.partition("=")[::2] for part in rest.split(",") if colon)
        known = {name: Integer(low, high) for name, low, high in self.ranges}
        if kind != StepCache().kind or not given.keys() <= known.keys():
            raise BadValue(f"{shown(value)} is not a step cache", f"write {self.allowed}")
        try:
            numbers = {name: known[name].parse(text) for name, text in given.items()}
        except BadValue as bad:
            what = f"{shown(value)}: {bad.what}"
            raise BadValue(what, f"{bad.hint}; for example {StepCache()}", bad.slug) from None
        return StepCache(**numbers)


class SizeText(Kind):
    """`auto`, `WxH` in pixels, or a ratio `W:H`; comes back as a SizeRequest."""

    @property
    def allowed(self) -> str:
        return "auto, WIDTHxHEIGHT, WIDTH:HEIGHT"

    def read(self, value: Any) -> SizeRequest:
        if type(value) is not str:
            raise BadValue(f"{shown(value)} is not a size", _SIZE_HINT, "wrong-type")
        parts = re.fullmatch(SIZE_PATTERN, value, re.ASCII)
        if parts is None:
            raise BadValue(f"{shown(value)} is not a size", _SIZE_HINT)
        if value == "auto":
            return SizeRequest()
        low = 1 if parts[2] == ":" else MIN_SIDE
        request = size_request(height=int(parts[3]), width=int(parts[1]), low=low)
        return replace(request, is_ratio=parts[2] == ":")


def size_request(*, height: int, width: int, low: int = MIN_SIDE) -> SizeRequest:
    """A request for `height` x `width`. Raises BadValue outside the sides and ratios allowed."""
    if not (low <= height <= MAX_SIDE and low <= width <= MAX_SIDE):
        raise BadValue(f"{width}x{height} is out of range", _SIZE_HINT, "out-of-range")
    if max(height, width) > MAX_RATIO * min(height, width):
        what = f"{width}x{height} is too narrow"
        hint = f"one side may be at most {MAX_RATIO} times the other"
        raise BadValue(what, hint, "out-of-range")
    return SizeRequest(height=height, width=width)


@dataclass(frozen=True)
class Anything(Kind):
    """Any JSON value of at most `MAX_DEPTH` levels; opaque, and so kept as its JSON text: it takes
    a fraction of the memory.
    """

    def parse(self, text: str) -> Any:
        """Lists and objects are JSON; what else is written there is text."""
        return self.read(_json(text) if text.lstrip().startswith(("{", "[")) else text)

    def read(self, value: Any) -> str:
        if is_deeper(value, MAX_DEPTH):
            hint = f"{MAX_DEPTH} levels are kept; write it as text"
            raise BadValue("it is nested too deeply", hint, "out-of-range")
        try:
            return json.dumps(value, allow_nan=False)
        except ValueError:
            what = "a number in it is too large"
            raise BadValue(what, "write it as text", "out-of-range") from None


def _json(text: str) -> Any:
    try:
        return json_of(text)
    except ValueError:
        hint = "a cell that begins with { or [ is read as JSON"
        raise BadValue(f"{shown(text)} is not valid JSON", hint, "bad-json") from None


@dataclass(frozen=True)
class Matrix(Kind):
    """Values to be combined, by field: an object of lists. The values are their fields' own."""

    def parse(self, text: str) -> dict[str, list[Any]]:
        return self.read(_json(text))

    def read(self, value: Any) -> dict[str, list[Any]]:
        hint = 'for example {"guidance_scale": [2.5, 5], "seed": [1, 2, 3]}'
        if type(value) is not dict:
            raise BadValue(f"{shown(value)} is not an object of lists", hint, "wrong-type")
        if not value:
            raise BadValue("the matrix is empty", hint, "out-of-range")
        return value
