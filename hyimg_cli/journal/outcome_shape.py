"""Of what kind the fields of a line in results.jsonl must be: those of `Outcome`.

A folder may come from others, or a line from an editor, and files are opened, and removed, by the
paths in it.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import PurePosixPath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hyimg_cli.settings.kinds import shown
from hyimg_cli.spec.events import Outcome

_PATHS = ("path", "frames_path")
# Beyond any seed, second or count; a float can hold it.
_LARGEST = 2**64


def fault_in(entry: Mapping[str, Any]) -> str:
    """Fault of an outcome: its first field that is not of its kind; else empty."""
    for name, is_kind in _fields(Outcome).items():
        if name in entry and not is_kind(entry[name]):
            return f"{name} is {shown(entry[name])}"
    for output in entry.get("outputs", ()):
        if "path" not in output:
            return "an output has no path"
        for name in _PATHS:
            if output.get(name) is not None and not _stays_inside(output[name]):
                return f"{name} is {shown(output[name])}"
    return ""


def _stays_inside(path: str) -> bool:
    pure = PurePosixPath(path)
    return bool(pure.parts) and not (pure.is_absolute() or ".." in pure.parts or "\0" in path)


@cache
def _fields(cls: type) -> dict[str, Callable[[Any], bool]]:
    """A check for each field of a dataclass, those of what is derived from it among them."""
    kinds = {
        name: kind
        for one in (cls, *cls.__subclasses__())
        for name, kind in get_type_hints(one).items()
    }
    return {name: _check(kind) for name, kind in kinds.items()}


def _check(kind: Any) -> Callable[[Any], bool]:
    """Tells if a JSON value is of a type, of which a tuple is a list and a dataclass an object."""
    inner = get_args(kind)
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            checks = [_check(one) for one in inner]
            return lambda value: any(check(value) for check in checks)
        case origin if origin is Literal:
            return lambda value: value in inner
        case origin if origin is tuple:
            each = _check(inner[0])
            return lambda value: type(value) is list and all(map(each, value))
        case origin if origin is dict:
            each = _check(inner[1])
            return lambda value: type(value) is dict and all(map(each, value.values()))
    if kind is Any:
        return lambda value: True
    if kind in (int, float):
        allowed = (int,) if kind is int else (int, float)
        return lambda value: type(value) in allowed and abs(value) < _LARGEST
    if kind in (str, bool, NoneType):
        return lambda value: type(value) is kind
    fields = _fields(kind)
    return lambda value: (
        type(value) is dict
        and all(name not in value or check(value[name]) for name, check in fields.items())
    )
