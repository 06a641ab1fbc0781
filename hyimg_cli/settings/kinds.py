"""Kinds of values: what a manifest field, a flag or a recipe key accepts, with its errors."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import time
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from annotated_types import Interval, Len

if TYPE_CHECKING:
    from pydantic import TypeAdapter

from hyimg_cli.addresses import ADDRESS_PATTERN
from hyimg_cli.files import is_deeper, json_of
from hyimg_cli.settings.values import BadValue, nearest, shown
from hyimg_cli.spec.job import MOST_CROPS, SizeRequest
from hyimg_cli.spec.options import Box, boxes_text
from hyimg_cli.spec.step_cache import StepCache


def matching(pattern: str) -> dict[str, Any]:
    """Return the schema of a text that a pattern matches completely."""
    # NOTE: Python's `$` also matches before a final line end; JSON Schema's does not.
    return {"type": "string", "pattern": rf"^(?:{pattern})$(?!\n)"}


# Addresses that are not an object store; data in memory ends with its process.
NO_STORES = ("file", "local", "memory", "http", "https", "data", "ftp")
MIN_SIDE, MAX_SIDE, MAX_RATIO = 16, 8192, 16
Side = Annotated[int, Interval(ge=MIN_SIDE, le=MAX_SIDE)]
# Above it, a float is not exact.
_MOST_EXACT = 2**53
# The kind of a value that is copied through.
MAX_DEPTH = 100
# A folder's name has no dot, so no folder can be another job's file: "a.frames", "a.png".
ID_PATTERN = r"(?!.{129})(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-][A-Za-z0-9._-]*"
SIZE_PATTERN = r"auto|([0-9]{1,5})([xX:])([0-9]{1,5})"
NO_STORE = "|".join("".join(f"[{c.upper()}{c}]" for c in name) for name in NO_STORES)
BOX_PATTERN = r"\s*" + r"\s*,\s*".join([r"([0-9]{1,6})"] * 4) + r"\s*"
SIDES = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 4, "maxItems": 4}
BOXES = {"type": "array", "items": SIDES, "minItems": 1}
_CROP_HINT = "write LEFT,TOP,RIGHT,BOTTOM in pixels of the upright source; two at most, with ;"
# Text that is not empty.
WRITTEN = r"[^\x00]*[^\s\x00][^\x00]*"
TEXT, ANY_TEXT = matching(WRITTEN), matching(r"[^\x00]*")
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)
_SIZE_HINT = (
    f'give "auto", "W:H", or "WxH" with sides of {MIN_SIDE} to {MAX_SIDE}; ratio at most '
    f"{MAX_RATIO} to 1"
)
_ID_HINT = (
    "use 1 to 128 of A-Z a-z 0-9 . _ -, not beginning with a dot; / separates folders, which "
    "cannot contain a dot"
)


def is_custom_id(text: str) -> bool:
    """Return True if `text` may name a job, and so a file: all of it matches `ID_PATTERN`."""
    return re.fullmatch(ID_PATTERN, text, re.ASCII) is not None


@dataclass(frozen=True, eq=False)
class Kind:
    """The values that a field, a flag or a recipe key accepts.

    `read` returns the typed value of a JSON or TOML value, or raises BadValue. `schema`: a type as
    pydantic reads it, or a JSON Schema. `allowed`: the values in words; empty if they need no
    explanation. `choices`: for shell completion. `split` parses the text of a flag, a variable or a
    table cell, if that is neither taken as text nor parsed as JSON.
    """

    read: Callable[[Any], Any]
    schema: Any
    metavar: str = "str"
    allowed: str = ""
    choices: tuple[str, ...] = ()
    split: Callable[[str], Any] | None = None

    @property
    def annotation(self) -> Any:
        """Return the type from which pydantic makes a schema."""
        from pydantic import WithJsonSchema

        is_type = not isinstance(self.schema, dict)
        return self.schema if is_type else Annotated[Any, WithJsonSchema(self.schema)]

    def parse(self, text: str) -> Any:
        """Return the typed value of a text: a flag's, a variable's or a table cell's.

        Raises BadValue.
        """
        split = self.split or (str if self.schema in (TEXT, ANY_TEXT) else _json_in)
        return self.read(split(text))


def plain(annotation: Any, aliases: Mapping[Any, str] | None = None) -> Kind:
    """Return the kind of values that pydantic reads.

    Numbers in an `Interval`, booleans, or the choices of a `Literal`, which may have `aliases`.
    """
    named = aliases or {}
    base, *limits = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    choices: tuple[str, ...] = get_args(base) if get_origin(base) is Literal else ()
    adapter = cache(partial(_adapter, annotation))
    noun = {int: "a whole number", float: "a number", bool: "true or false"}.get(base, "text")
    allowed, hint = ", ".join(choices), f"give {noun}"
    if choices:
        meant = (f'; "{alias}" means {named[alias]}' for alias in named if type(alias) is str)
        hint = f"allowed: {allowed}{''.join(meant)}"
    for within in limits:
        lowest = f"above {within.gt}" if within.ge is None else f"from {within.ge}"
        highest = "2^63-1" if within.le == 2**63 - 1 else within.le
        hint += f" {lowest} to {highest}"
        allowed = f"{lowest} to {highest}".removeprefix("from ")

    def read(value: Any) -> Any:
        if type(value) in (str, bool):  # 1 is not true
            value = named.get(value, value)
        if base is int and type(value) is float and abs(value) <= _MOST_EXACT and value % 1 == 0:
            value = int(
                value
            )  # pandas writes whole numbers as 4.0 if a cell of the column is empty
        try:
            return adapter().validate_python(value)
        except ValueError:
            what = shown(value)
        if base is int and type(value) is float and value % 1 == 0:
            exact = "write it without a decimal point"
            raise BadValue(f"{what} is not exact above 2^53", exact, "out-of-range")
        if choices and type(value) is str:
            close = nearest(value, choices)
            guess = f'did you mean "{close}"? ' if close else ""
            raise BadValue(f"{what} is not known", guess + hint)
        if type(value) is base or (type(value), base) == (int, float):
            raise BadValue(f"{what} is out of range", hint, "out-of-range")
        raise BadValue(f"{what} is not {noun}", hint, "wrong-type")

    def split(text: str) -> Any:
        text = text.strip()
        for number in (int, float) if base is int else (float,) if base is float else ():
            with suppress(ValueError):
                return number(text)
        return _TRUTHS.get(text.lower(), text) if base is bool or "on" in choices else text

    metavar = base.__name__ if base in (int, float) else "str"
    schema = Literal[(*choices, *named)] if named else annotation
    return Kind(read, schema, metavar, allowed, choices, split)


def _adapter(annotation: Any) -> "TypeAdapter[Any]":
    # Imported when a value is read: a help page must not wait for it.
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


def _json_in(cell: str) -> Any:
    """Return the JSON value of a text; a text that begins with neither { nor [ is a string."""
    cell = cell.strip()
    try:
        return json_of(cell) if cell.startswith(("{", "[")) else cell
    except ValueError:
        hint = "cells that begin with { or [ are read as JSON"
        raise BadValue(f"{shown(cell)} is not valid JSON", hint, "bad-json") from None


def text(noun: str, *, may_be_empty: bool = False) -> Kind:
    """Return the kind of a non-empty text, with this name in messages."""

    def read(value: Any) -> str:
        if type(value) is not str:
            raise BadValue(f"{shown(value)} is not text", f"give the {noun} as text", "wrong-type")
        if "\0" in value or not (may_be_empty or value.strip()):
            what, hint = f"the {noun} is empty, or contains a NUL character", f"write the {noun}"
            raise BadValue(what, hint, "empty-text")
        return value

    return Kind(read, ANY_TEXT if may_be_empty else TEXT)


def _links(value: Any) -> tuple[str, ...]:
    names = value if type(value) is list else [value]
    return tuple(CUSTOM_ID.read(name) if name != "" else "" for name in names)


def _names(value: Any) -> tuple[str, ...]:
    if type(value) not in (list, tuple):
        raise BadValue(f"{shown(value)} is not a list", "give a list of names", "wrong-type")
    return tuple(map(text("name").read, value))


def pattern_kind(
    pattern: str,
    fault: str,
    hint: str,
    value_of: Callable[[re.Match[str]], Any] = re.Match.group,
    *,
    slug: str = "bad-value",
    **more: Any,
) -> Kind:
    """Return the kind of a text that a pattern matches completely; others raise `fault`."""
    whole = re.compile(pattern, re.ASCII)

    def read(value: Any) -> Any:
        match = whole.fullmatch(value) if type(value) is str else None
        if match is None:
            ends_with = slug if type(value) is str else "wrong-type"
            raise BadValue(f"{shown(value)} {fault}", hint, ends_with)
        return value_of(match)

    return Kind(read, matching(pattern), **{"split": str.strip} | more)


def _step_cache(text: re.Match[str]) -> StepCache | None:
    given = re.findall(r"(\w+)=(\d+)", text[0])
    return None if text[0] == "none" else StepCache(**{name: int(n) for name, n in given})


def _size(text: re.Match[str]) -> SizeRequest:
    if text[0] == "auto":
        return SizeRequest()
    return size_request(int(text[3]), int(text[1]), is_ratio=text[2] == ":")


def size_request(height: int, width: int, *, is_ratio: bool = False) -> SizeRequest:
    """Return a request for `height` x `width`.

    Raises BadValue outside the allowed sides and ratios.
    """
    low = 1 if is_ratio else MIN_SIDE
    short, long = sorted((height, width))
    if short < low or long > min(MAX_SIDE, MAX_RATIO * short):
        raise BadValue(f"{width}x{height} is out of range", _SIZE_HINT, "out-of-range")
    return SizeRequest(height, width, is_ratio)


def seconds_in(text: str) -> int:
    """Return the seconds of a text that `DURATION` reads: `1h30m`, or `01:30:00`."""
    if ":" in text:
        hours, minutes, seconds = map(int, text.split(":"))
        return hours * 3600 + minutes * 60 + seconds
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall("([0-9]+)([dhms])", text))


def box_of(text: re.Match[str], hint: str) -> Box:
    """Return the box in a match of `BOX_PATTERN`. Raises BadValue for an empty one."""
    left, top, right, bottom = map(int, text.groups())
    if left >= right or top >= bottom:
        raise BadValue(f"{shown(text[0])} is empty", hint)
    return left, top, right, bottom


def text_of_boxes(value: Any) -> Any:
    """Return a list of four sides, or of such lists, as text; other values as they are."""
    boxes = (
        [value] if type(value) is list and not any(type(one) is list for one in value) else value
    )
    if type(boxes) is list and all(
        type(box) is list and all(type(side) is int for side in box) for box in boxes
    ):
        return boxes_text(boxes)
    return value


def _crops(value: Any) -> tuple[Box, ...]:
    found = re.finditer(BOX_PATTERN, _CROPS.read(text_of_boxes(value)), re.ASCII)
    return tuple(box_of(sides, _CROP_HINT) for sides in found)


def as_json(value: Any) -> str:
    """Return any JSON value of at most `MAX_DEPTH` levels as JSON text. Raises BadValue.

    The text takes a fraction of the memory.
    """
    with suppress(ValueError):
        if not is_deeper(value, MAX_DEPTH):
            return json.dumps(value, allow_nan=False)
    what = f"it is nested too deeply ({MAX_DEPTH} levels), or a number in it is too large"
    raise BadValue(what, "write it as text", "out-of-range")


def numbers(
    one: Any, fewest: int, most: int, *, is_distinct: bool = False, is_span: bool = False
) -> Kind:
    """Return the kind of a list of `fewest` to `most` numbers, read as a tuple.

    `is_span`: the numbers are the two bounds of a range.
    """
    each = plain(one)
    adapter = cache(partial(_adapter, list[one]))
    allowed = f"{fewest} to {most} numbers from {each.allowed}"
    if is_span:
        allowed = f"two numbers from {each.allowed}, the smaller one first"
    hint = f"give a list of {allowed}"

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise BadValue(f"{shown(value)} is not a list", hint, "wrong-type")
        try:  # All at once takes a fifth of the time; one by one, the first bad one is named.
            found = tuple(adapter().validate_python(list(value)))
        except ValueError:
            found = tuple(map(each.read, value))
        is_empty = is_span and found != tuple(sorted(set(found)))
        if is_empty or not fewest <= len(found) <= most:
            raise BadValue(f"{shown(value)} is empty, too short or too long", hint, "out-of-range")
        if is_distinct and len(set(found)) < len(found):
            raise BadValue(f"{shown(value)} contains a number twice", "give each of them once")
        return found

    def split(text: str) -> list[Any]:
        return [(each.split or str)(part) for part in re.split(r"[\s,;]+", text.strip(" []"))]

    # In JSON Schema, a set is a list of distinct items.
    many: Any = Annotated[set[one] if is_distinct else list[one], Len(fewest, most)]
    return Kind(read, many, "low,high" if is_span else "str", allowed, split=split)


def _choices(value: Any) -> tuple[str, ...]:
    """Return the answers among which a model chooses. Raises BadValue."""
    hint = f"give a list of {MOST_CHOICES[0]} to {MOST_CHOICES[1]} different texts"
    if not isinstance(value, list | tuple):
        raise BadValue(f"{shown(value)} is not a list", hint, "wrong-type")
    found = tuple(text("choices").read(one) for one in value)
    if not MOST_CHOICES[0] <= len(found) <= MOST_CHOICES[1]:
        raise BadValue(f"there are {len(found)} choices", hint, "out-of-range")
    if len({one.strip() for one in found} - {""}) < len(found):
        raise BadValue("a choice is empty, or there twice", hint, "out-of-range")
    return found


# The fewest and the most answers among which a model chooses.
MOST_CHOICES = (2, 26)
CHOICES = Kind(
    _choices,
    Annotated[list[str], Len(*MOST_CHOICES)],
    split=lambda cell: [one.strip() for one in cell.split(";")],
)
_ASKS = re.compile(r"(?:[^,:=]+=)?ask2?:.*\S|[^,\s][^,]*[^,\s]|[^,\s]", re.DOTALL)
_DEVICES = "auto, cpu, cuda, cuda:N, balanced"
_STEP_CACHES = f"none, {StepCache()}"
_UP_TO_1000 = "([1-9][0-9]{0,2}|1000)"
_STEPS = f"(interval=([2-9]|[1-9][0-9]|100)|order=[0-2]|(first|tail)={_UP_TO_1000})"
_folder_kind = partial(
    pattern_kind,
    fault="is not a path on this machine",
    hint="give a path, such as . for this folder; put ./ before one that looks like an address",
    slug="not-served",
    split=str,  # a name may begin or end with a space
    metavar="path",
)
FOLDER = _folder_kind(f"(?!{ADDRESS_PATTERN}){WRITTEN}")
FINISHED_RUN = _folder_kind(
    f"(?!{ADDRESS_PATTERN}){WRITTEN}",
    hint="copy a run from a store to this machine: hyimg merge ADDRESS -o FOLDER; put ./ before a "
    "path that looks like an address",
)
RUN_FOLDER = _folder_kind(f"(?!(?:{NO_STORE}):/){WRITTEN}")
# Its unit is written: seconds are meant by one tool, and minutes by another.
_DURATION = pattern_kind(
    r"none|(?=.)(?:([0-9]{1,4})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,8})s)?"
    r"|([0-9]{1,5}):([0-5][0-9]):([0-5][0-9])",
    "is not a time",
    "write hours, minutes or seconds: 8h, 90m, 1h30m, 45s",
    lambda text: None if text[0] == "none" else text[0],
    metavar="time",
    allowed="such as 8h or 90m",
    choices=("30m", "2h", "8h"),
)
# In TOML, 01:30:00 without quotes is a time of day.
DURATION = replace(
    _DURATION,
    read=lambda value: _DURATION.read(value.isoformat() if isinstance(value, time) else value),
)
_SHARE = pattern_kind(
    r"none|([1-9][0-9]?|100)%|[1-9][0-9]{0,6}",
    "is neither a share nor a number of jobs",
    "write a share of the jobs, such as 10%, or a number, such as 30",
    lambda text: None if text[0] == "none" else text[0],
    metavar="share",
    allowed="such as 10% or 30",
    choices=("10%", "30"),
)
# In TOML, a number of jobs needs no quotes.
SHARE = replace(
    _SHARE,
    read=lambda value: _SHARE.read(str(value) if type(value) is int else value),
    schema={"anyOf": [_SHARE.schema, {"type": "integer", "minimum": 1, "maximum": 9_999_999}]},
)
NAMES = Kind(
    _names,
    {"type": "array", "items": TEXT},
    "name,name",
    split=lambda cell: [name.strip() for name in cell.split(",") if name.strip()],
)
# A question takes the rest of the text, commas included.
SCORER_NAMES = replace(NAMES, split=lambda cell: _ASKS.findall(cell))
LINKS = Kind(_links, {"type": "array", "items": ANY_TEXT}, split=lambda cell: cell.split(";"))
GATES = replace(NAMES, metavar="scorer=number")
# A comma separates options only before the next NAME.KEY=, so a value may have commas.
SCORER_OPTIONS = replace(
    NAMES,
    metavar="name.key=value",
    split=lambda cell: re.split(r"\s*,\s*(?=[A-Za-z0-9_-]+\.[A-Za-z0-9_]+=)", cell.strip()),
)
CUSTOM_ID = pattern_kind(ID_PATTERN, "cannot name a job", _ID_HINT, slug="bad-id")
DEVICE = pattern_kind(
    r"auto|cpu|cuda(:(0|[1-9][0-9]?))?|balanced",
    "is not a device",
    f"allowed: {_DEVICES}; a GPU is cuda, and CUDA_VISIBLE_DEVICES=0,1 chooses several",
    allowed=_DEVICES,
    choices=("auto", "cpu", "cuda", "balanced"),
)
STEP_CACHE = pattern_kind(
    rf"none|taylor(:{_STEPS}(,{_STEPS})*)?",
    "is not a step cache",
    f"write {_STEP_CACHES}: interval 2 to 100, order 0 to 2, first and tail 1 to 1000",
    _step_cache,
    metavar="text",
    allowed=_STEP_CACHES,
)
SIZE = pattern_kind(
    SIZE_PATTERN, "is not a size", _SIZE_HINT, _size, allowed="auto, WIDTHxHEIGHT, WIDTH:HEIGHT"
)
_CROPS = pattern_kind(
    f"{BOX_PATTERN}(?:;{BOX_PATTERN}){{0,{MOST_CROPS - 1}}}", "is not a crop", _CROP_HINT
)
CROP = Kind(_crops, {"anyOf": [_CROPS.schema, SIDES, BOXES]}, "box", split=str.strip)
ANYTHING = Kind(as_json, {})
MATRIX = Kind(lambda value: value, {"type": "object"})
SPAN = numbers(Annotated[float, Interval(ge=0, le=1)], 2, 2, is_span=True)
