"""Of what kind the fields of a line in results.jsonl must be: those of `Outcome`.

A folder may come from others, or a line from an editor, and files are opened, and removed, by the
paths in it. Imported where there is a line to read: pydantic takes 0.2 s.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import PurePosixPath
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError, create_model

from hyimg_cli.settings.values import shown
from hyimg_cli.spec.events import Outcome

# Beyond any seed, second or count; a float can hold it.
_LARGEST = 2**64


def fault_in(entry: Mapping[str, Any]) -> str:
    """Fault of an outcome: its first field that is not of its kind; else empty."""
    try:
        _LINE.validate_python(entry)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        return f"{name} is {shown(entry[name])}"
    for output in entry.get("outputs", ()):
        if "path" not in output:
            return "an output has no path"
        for name in ("path", "frames_path"):
            if (path := output.get(name)) is not None:
                parts = PurePosixPath(path).parts
                if not parts or path.startswith("/") or ".." in parts or "\0" in path:
                    return f"{name} is {shown(path)}"
    return ""


def _shape(kind: Any) -> Any:
    """A kind as JSON has it: nothing is converted, and any field of an object may be missing. A
    dataclass has the fields of what is derived from it too.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        classes = (kind, *kind.__subclasses__())
        hints = {name: own for one in classes for name, own in get_type_hints(one).items()}
        fields: dict[str, Any] = {name: (_shape(own), None) for name, own in hints.items()}
        return create_model(kind.__name__, **fields)
    if kind in (int, float):
        return Annotated[kind, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
    if kind in (str, bool):
        return Annotated[kind, Field(strict=True)]
    origin: Any = Union if get_origin(kind) is UnionType else get_origin(kind)
    return origin[tuple(map(_shape, get_args(kind)))] if origin in (Union, tuple, dict) else kind


_LINE = TypeAdapter(_shape(Outcome))
