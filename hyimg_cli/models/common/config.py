"""Values of a checkpoint's JSON files, each checked as it is read; no torch.

A value of the wrong type or out of range raises here, with its file and field, so later code need
not check it again.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from pydantic import StrictBool, StrictStr, TypeAdapter, ValidationError, confloat, conint, conlist

from hyimg_cli.errors import CheckpointError, required
from hyimg_cli.loading.checkpoint import fault, read_json
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import BadValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Facts = TypeVar("Facts", bound="DataclassInstance")
_MOST_SHOWN = 60
_MOST_NUMBER = 1e15
# Keys for modules that are built one by one; other keys are widths of tensors.
MODULES = re.compile(r"(layers|blocks|experts|depth)(_per_\w+)?$")
MOST_MODULES, MOST_WIDTH = 10_000, 1 << 24


@dataclass(frozen=True)
class Config:
    """A JSON object of a file, or a `part` of one. A null counts as a missing key.

    Keys without a default are required. Every method that reads one raises CheckpointError.
    """

    values: Mapping[str, Any]
    where: Path | str
    part: str = ""

    @classmethod
    def read(cls, path: Path, *, is_optional: bool = False) -> "Config":
        """Return the object in a file; an empty one if an optional file is missing."""
        return cls({} if is_optional and not path.exists() else read_json(path), path)

    def has(self, name: str) -> bool:
        """Return True if the key has a value other than null."""
        return self.values.get(name) is not None

    def count(self, name: str, default: int | None = None, **bounds: int) -> int:
        """Return a whole number from `least` (1) to `most` (what can be built)."""
        return int(self._of_type(_whole(name, **bounds), name, default))

    def counts(
        self, name: str, default: tuple[int, ...] | None = None, length: int = 0, **bounds: int
    ) -> tuple[int, ...]:
        """Return a list of such numbers, `length` of them, or at least one."""
        kind = conlist(_whole(name, **bounds), min_length=length or 1, max_length=length or None)
        return tuple(self._of_type(kind, name, default))

    def flags(self, name: str, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return a list of booleans."""
        return tuple(self._of_type(conlist(StrictBool, min_length=1), name, default))

    def numbers(self, name: str, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        return tuple(self._of_type(conlist(_number(), min_length=1), name, default))

    def number(
        self, name: str, default: float | None = None, *, above: float = -_MOST_NUMBER
    ) -> float:
        """Return a finite number."""
        return float(self._of_type(_number(above), name, default))

    def flag(self, name: str, default: bool | None = None) -> bool:
        return bool(self._of_type(StrictBool, name, default))

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._of_type(StrictStr, name, default))

    def table(self, name: str, default: Mapping[str, Any] | None = None) -> "Config":
        """Return the object at a key."""
        return Config(self._of_type(dict, name, default), self.where, f"{self.part}{name}.")

    def setting(self, name: str, key: str = "") -> Any:
        """Return the value of `key` (default `name`), checked as the setting `name` of jobs."""
        try:
            return SETTINGS[name].kind.read(self.values[key or name])
        except BadValue as error:
            what = f"{self.part}{key or name}: {error.what}"
            raise fault("config", what, self.where, error.hint) from None

    def facts(self, cls: type[Facts], **known: Any) -> Facts:
        """Return a dataclass of facts: `known` ones, and the others by their fields' names and
        types.

        Whole numbers must be 1 or more, other numbers above 0.
        """
        readers: dict[Any, Callable[[str, Any], Any]] = {
            tuple: self.counts,
            int: self.count,
            bool: self.flag,
            str: self.text,
            float: partial(self.number, above=0),
        }
        read, kinds = {}, get_type_hints(cls)
        for field in fields(cls):
            if field.name not in known and (field.default is not None or self.has(field.name)):
                kind = get_origin(kinds[field.name]) or kinds[field.name]
                default = None if field.default is MISSING else field.default
                read[field.name] = readers.get(kind, self.number)(field.name, default)
        return cls(**read, **known)

    def fault(self, name: str, value: object, expected: str) -> CheckpointError:
        """Return the error for a value."""
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        found = "is missing" if value is None else f"is {shown}"
        what = f"{self.part}{name} {found}; expected {expected}"
        return fault("config", what, self.where, "correct the file, or download it again")

    def _of_type(self, kind: Any, name: str, default: Any) -> Any:
        value = self.values.get(name)
        try:
            return _adapter(kind).validate_python(default if value is None else value)
        except ValidationError as error:
            raise self.fault(name, value, required(error.errors()[0]["msg"])) from None


@dataclass(frozen=True, kw_only=True)
class VitShape:
    """Numbers of a ViT, by the keys of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    layer_norm_eps: float = 1e-6


def refuse_unreleased(config: Config, released: Mapping[str, Any]) -> None:
    """Raise CheckpointError for keys with a value other than the one `released`.

    Other values exist in unreleased code only, and would be computed wrongly.
    """
    for key, only in released.items():
        value = config.values.get(key)
        if value is not None and value != only:
            raise config.fault(key, value, f"{only!r}, the only one that was released")


def _whole(name: str, least: int = 1, most: int | None = None) -> Any:
    built = MOST_MODULES if MODULES.search(name) else MOST_WIDTH
    return conint(strict=True, ge=least, le=built if most is None else most)


def _number(above: float = -_MOST_NUMBER) -> Any:
    return confloat(strict=True, gt=above, lt=_MOST_NUMBER)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
