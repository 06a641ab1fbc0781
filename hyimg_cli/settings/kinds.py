"""Types of values: what a manifest field, a flag or a recipe may say.

A type is an annotation that pydantic reads: `Annotated[int, Interval(ge=1, le=1000)]`, a `Literal`,
or one of the forms of text below. `Kind` reads values by it, and says what is wrong with a value in
the words of its user.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

from annotated_types import Interval, Len

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core.core_schema import CoreSchema

from hyimg_cli.addresses import ADDRESS_PATTERN, scheme_of
from hyimg_cli.files import is_deeper, json_of
from hyimg_cli.settings.values import BadValue, nearest, shown
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.step_cache import MAX_INTERVAL, MAX_ORDER, StepCache

# Addresses of no object store; what is in memory ends with its process.
NO_STORES = ("file", "local", "memory", "http", "https", "data", "ftp")
MIN_SIDE, MAX_SIDE, MAX_RATIO = 16, 8192, 16
# Of a value that is copied through.
MAX_DEPTH = 100
# A folder's name has no dot, so that no folder is another job's file: "a.frames", "a.png".
ID_PATTERN = r"(?!.{129})(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-][A-Za-z0-9._-]*"
SIZE_PATTERN = r"auto|([0-9]{1,5})([xX:])([0-9]{1,5})"
DEVICE_PATTERN = r"auto|cpu|cuda(:(0|[1-9][0-9]?))?|balanced"
NO_STORE = "|".join("".join(f"[{c.upper()}{c}]" for c in name) for name in NO_STORES)
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)
_SIZE_HINT = f'give "auto", "WxH" with sides from {MIN_SIDE} to {MAX_SIDE}, or a ratio "W:H"'
_ID_HINT = (
    "use 1 to 128 letters, digits, dots, dashes or underscores, and no dot in front; "
    "a / makes a folder, whose name has no dot"
)


def is_custom_id(text: str) -> bool:
    """Tell if `text` may name a job, and so a file: `ID_PATTERN`, whole."""
    return re.fullmatch(ID_PATTERN, text, re.ASCII) is not None


@dataclass(frozen=True, eq=False)
class Aliases:
    """Other spellings of a literal's values, in the annotation of its type."""

    of: Mapping[Any, str]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._canonical, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: "CoreSchema", handler: "GetJsonSchemaHandler"
    ) -> dict[str, Any]:
        found = handler(schema)
        return {"enum": [*found["enum"], *self.of]}

    def _canonical(self, value: Any) -> Any:
        # By type too: 1 is no true.
        same = (name for alias, name in self.of.items() if alias == value)
        return next(same, value) if type(value) in (str, bool) else value


@dataclass(frozen=True, eq=False)
class Form:
    """A form of its own that values have, in the annotation of their type.

    `read` gives the typed value or raises BadValue; `parse` reads the text of a flag or a variable,
    where it is another. `schema`: of JSON, as a pattern or whole.
    """

    read: Callable[[Any], Any]
    schema: str | dict[str, Any]
    metavar: str = "str"
    allowed: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: "CoreSchema", handler: "GetJsonSchemaHandler"
    ) -> dict[str, Any]:
        if isinstance(self.schema, str):
            # NOTE: Python's `$` also matches before a line's end at the end; that of JSON Schema
            # does not.
            return {"type": "string", "pattern": rf"^(?:{self.schema})$(?!\n)"}
        return self.schema


class Kind:
    """Reader of the values of an annotated type, and what a help page says of it."""

    def __init__(self, base: Any, *marks: Any) -> None:
        self.base = base
        self._marks = marks

    @property
    def annotation(self) -> Any:
        """The type as pydantic reads it."""
        return Annotated[self.base, *self._marks] if self._marks else self.base

    @cached_property
    def _adapter(self) -> "TypeAdapter[Any]":
        # Imported where a value is read: a page of help must not wait for it.
        from pydantic import ConfigDict, TypeAdapter

        return TypeAdapter(self.annotation, config=ConfigDict(strict=True, allow_inf_nan=False))

    @cached_property
    def form(self) -> Form | None:
        """The form of its own that the values have, if any."""
        form: Form | None = self._mark(Form)
        return form

    @cached_property
    def _each(self) -> "Kind | None":
        """The kind of a list's entries; None of what is no list."""
        return Kind(*get_args(get_args(self.base)[0])) if get_origin(self.base) is list else None

    @property
    def is_truth(self) -> bool:
        return self.base is bool

    @property
    def is_text(self) -> bool:
        """True of what is kept as it is written, with the spaces around it."""
        return self.form is not None and self.form.schema in (WRITTEN, f"|{WRITTEN}")

    @property
    def metavar(self) -> str:
        if self.form:
            return self.form.metavar
        return {int: "int", float: "float"}.get(self.base, "str")

    @property
    def choices(self) -> tuple[str, ...]:
        """What a shell completes."""
        if get_origin(self.base) is Literal:
            return get_args(self.base)
        return self.form.choices if self.form else ()

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words; empty where they need none."""
        if self._each:
            few = self._mark(Len)
            noun = "whole numbers" if self._each.base is int else "numbers"
            return f"{few.min_length} to {few.max_length} {noun} from {self._each.allowed}"
        if of := self._mark(Interval):
            return f"above {of.gt} to {of.le}" if of.gt is not None else f"{of.ge} to {of.le}"
        return self.form.allowed if self.form else ", ".join(self.choices)

    def read(self, value: Any) -> Any:
        """The typed value of a JSON or TOML value. Raises BadValue."""
        if self.form:
            return self.form.read(value)
        try:
            return self._adapter.validate_python(value)
        except ValueError as error:
            raise self._in_words(cast("ValidationError", error)) from None

    def parse(self, text: str) -> Any:
        """The typed value of a flag's or an environment variable's text. Raises BadValue."""
        if self.form and self.form.parse:
            return self.form.parse(text)
        return self.read(self._untyped(text))

    def _untyped(self, text: str) -> Any:
        """The JSON value that a text stands for; the text itself where it stands for none."""
        if self.base is int:
            return int(text) if _INTEGER.fullmatch(text) else text
        if self.base is float:
            try:
                return float(text)
            except ValueError:
                return text
        if self.base is bool or {"on", "off"} <= set(self.choices):
            return _TRUTHS.get(text.lower(), text)
        if self._each:
            return [self._each._untyped(part) for part in re.split(r"[\s,;]+", text.strip(" []"))]
        return text

    def _mark(self, of: type) -> Any:
        return next((mark for mark in self._marks if isinstance(mark, of)), None)

    def _in_words(self, error: "ValidationError") -> BadValue:
        """The first thing that is wrong with a value, in the words of its user."""
        first = error.errors(include_url=False)[0]
        kind, found = first["type"], first["input"]
        bad = first.get("ctx", {}).get("error")
        if isinstance(bad, BadValue):
            return bad
        if self._each and first["loc"]:
            return self._each._in_words(error)
        if self._each:
            what = "is not a list" if kind == "list_type" else "is too short or too long"
            slug = "wrong-type" if kind == "list_type" else "out-of-range"
            return BadValue(f"{shown(found)} {what}", f"give a list of {self.allowed}", slug)
        if self.base is bool:
            return BadValue(
                f"{shown(found)} is not true or false", "give true or false", "wrong-type"
            )
        if self.choices:
            return self._no_choice(found)
        noun = "a whole number" if self.base is int else "a number"
        above = "" if self.allowed.startswith("above") else "from "
        hint = f"give {noun} {above}{self.allowed}"
        is_number = type(found) in (int, float) and kind != "int_type"
        if is_number:
            return BadValue(f"{shown(found)} is out of range", hint, "out-of-range")
        return BadValue(f"{shown(found)} is not {noun}", hint, "wrong-type")

    def _no_choice(self, value: Any) -> BadValue:
        aliases: Mapping[Any, str] = getattr(self._mark(Aliases), "of", {})
        also = "".join(
            f'; "{alias}" means {name}' for alias, name in aliases.items() if type(alias) is str
        )
        hint = f"allowed: {self.allowed}{also}"
        if type(value) is not str:
            return BadValue(f"{shown(value)} is not text", hint, "wrong-type")
        close = nearest(value, self.choices)
        guess = f'did you mean "{close}"? ' if close else ""
        return BadValue(f"{shown(value)} is not known", guess + hint)


def read_text(noun: str, value: Any, *, may_be_empty: bool = False) -> str:
    """Text with something in it; `noun` names it in messages. Raises BadValue."""
    if type(value) is not str:
        what, hint = f"{shown(value)} is not text", f"give the {noun} as text"
        raise BadValue(what, hint, "wrong-type")
    if not value.strip() and not (may_be_empty and value == ""):
        raise BadValue(f"the {noun} is empty", f"write the {noun}", "empty-text")
    if "\0" in value:
        raise BadValue(f"the {noun} holds a NUL character", "take it out")
    return value


WRITTEN = r"[^\x00]*[^\s\x00][^\x00]*"


def text(noun: str, *, may_be_empty: bool = False) -> Form:
    """The form of a text that is named so in messages."""
    schema = f"|{WRITTEN}" if may_be_empty else WRITTEN
    return Form(partial(read_text, noun, may_be_empty=may_be_empty), schema)


def _folder(value: Any) -> str:
    named = read_text("folder", value)
    if scheme := scheme_of(named):
        what = f"{shown(named)} is not a place on this machine, and {scheme}: is not served"
        raise BadValue(what, "give a path; ./ in front of it makes it one", "not-served")
    return named


def _run_folder(value: Any) -> str:
    is_store = type(value) is str and scheme_of(value) not in ("", *NO_STORES)
    return read_text("folder", value) if is_store else _folder(value)


def _named(read: Callable[[Any], str], value: str) -> str:
    if not value:
        raise BadValue("an empty name", "for this folder give .", "empty-text")
    return read(value)


def _names(value: Any) -> tuple[str, ...]:
    if type(value) not in (list, tuple):
        raise BadValue(f"{shown(value)} is not a list", "give a list of names", "wrong-type")
    return tuple(read_text("name", name) for name in value)


def _custom_id(value: Any) -> str:
    if type(value) is not str:
        raise BadValue(f"{shown(value)} is not text", _ID_HINT, "wrong-type")
    if not is_custom_id(value):
        raise BadValue(f"{shown(value)} cannot name a job", _ID_HINT, "bad-id")
    return value


def _device(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(DEVICE_PATTERN, value):
        raise BadValue(f"{shown(value)} is not a device", f"allowed: {_DEVICES}")
    return value


_STEP_CACHES = f"none, {StepCache()}"
_STEP_NUMBERS = {
    name: Kind(int, Interval(ge=low, le=high))
    for name, low, high in (
        ("interval", 2, MAX_INTERVAL),
        ("order", 0, MAX_ORDER),
        ("first", 1, 1000),
        ("tail", 1, 1000),
    )
}


def _step_cache(value: Any) -> StepCache | None:
    if value == "none":
        return None
    kind, colon, rest = str(value).partition(":")
    given = dict(part.partition("=")[::2] for part in rest.split(",") if colon)
    is_one = type(value) is str and kind == StepCache().kind
    if not (is_one and given.keys() <= _STEP_NUMBERS.keys()):
        raise BadValue(f"{shown(value)} is not a step cache", f"write {_STEP_CACHES}")
    try:
        return StepCache(**{name: _STEP_NUMBERS[name].parse(n) for name, n in given.items()})
    except BadValue as bad:
        hint = f"{bad.hint}; for example {StepCache()}"
        raise BadValue(f"{shown(value)}: {bad.what}", hint, bad.slug) from None


def _size(value: Any) -> SizeRequest:
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


def as_json(value: Any) -> str:
    """Any JSON value of at most `MAX_DEPTH` levels as its JSON text, which takes a fraction of the
    memory. Raises BadValue.
    """
    if is_deeper(value, MAX_DEPTH):
        hint = f"{MAX_DEPTH} levels are kept; write it as text"
        raise BadValue("it is nested too deeply", hint, "out-of-range")
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        what = "a number in it is too large"
        raise BadValue(what, "write it as text", "out-of-range") from None


def json_in(cell: str) -> Any:
    """The JSON value of a table's cell; what begins with neither { nor [ is text."""
    if not cell.lstrip().startswith(("{", "[")):
        return cell
    try:
        return json_of(cell)
    except ValueError:
        hint = "a cell that begins with { or [ is read as JSON"
        raise BadValue(f"{shown(cell)} is not valid JSON", hint, "bad-json") from None


def _matrix(value: Any) -> dict[str, list[Any]]:
    hint = 'for example {"guidance_scale": [2.5, 5], "seed": [1, 2, 3]}'
    if type(value) is not dict:
        raise BadValue(f"{shown(value)} is not an object of lists", hint, "wrong-type")
    if not value:
        raise BadValue("the matrix is empty", hint, "out-of-range")
    return value


def _span(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadValue(f"{shown(value)} is no span", f"give {SPAN.allowed}", "wrong-type")
    first, last = map(_SHARE.read, value)
    if first >= last:
        raise BadValue(f"{shown(value)} is empty", f"give {SPAN.allowed}", "out-of-range")
    return first, last


def _separated(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(",") if name.strip()]


_DEVICES = "auto, cpu, cuda, cuda:N, balanced"
_COUNT = "(interval|order|first|tail)=[0-9]{1,4}"
_NAMES = {"type": "array", "items": {"type": "string", "pattern": rf"^(?:{WRITTEN})$(?!\n)"}}
FOLDER = Form(_folder, f"(?!{ADDRESS_PATTERN}){WRITTEN}", "path", parse=partial(_named, _folder))
RUN_FOLDER = Form(
    _run_folder, f"(?!(?:{NO_STORE}):/){WRITTEN}", "path", parse=partial(_named, _run_folder)
)
NAMES = Form(_names, _NAMES, "name,name", parse=lambda cell: _names(_separated(cell)))
CUSTOM_ID = Form(_custom_id, ID_PATTERN)
DEVICE = Form(
    _device, DEVICE_PATTERN, allowed=_DEVICES, choices=("auto", "cpu", "cuda", "balanced")
)
STEP_CACHE = Form(
    _step_cache, rf"none|taylor(:{_COUNT}(,{_COUNT})*)?", "text", allowed=_STEP_CACHES
)
SIZE = Form(_size, SIZE_PATTERN, allowed="auto, WIDTHxHEIGHT, WIDTH:HEIGHT")
ANYTHING = Form(as_json, {}, parse=lambda cell: as_json(json_in(cell)))
MATRIX = Form(_matrix, {"type": "object"}, parse=lambda cell: _matrix(json_in(cell)))
_SHARE = Kind(float, Interval(ge=0, le=1))
_NUMBER = {"type": "number", "minimum": 0, "maximum": 1}
SPAN = Form(
    _span,
    {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2},
    "low,high",
    "two numbers from 0 to 1, the smaller one first",
    parse=lambda cell: _span([_SHARE.parse(part) for part in cell.strip(" []").split(",")]),
)


@dataclass(frozen=True, eq=False)
class AsTuple:
    """Entries of a list as a tuple, which names each of them once where `is_distinct`."""

    is_distinct: bool

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._kept, handler(source))

    def _kept(self, numbers: list[int]) -> tuple[int, ...]:
        if self.is_distinct and len(set(numbers)) < len(numbers):
            raise BadValue(f"{shown(numbers)} names a number twice", "give each of them once")
        return tuple(numbers)


def integers(most: int, high: int, *, is_distinct: bool = False) -> Kind:
    """The kind of a list of 1 to `most` whole numbers from 0 to `high`, read as a tuple."""
    each = Annotated[int, Interval(ge=0, le=high)]
    return Kind(list[each], Len(1, most), AsTuple(is_distinct))
