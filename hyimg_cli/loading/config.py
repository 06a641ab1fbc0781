"""Values of a checkpoint's JSON files, each checked as it is read; no torch.

Who computes with what these return need not look again: a value of another kind, or out of its
range, ends here with its file and its field.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import MOST_WIDTH, read_json
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import BadValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Facts = TypeVar("Facts", bound="DataclassInstance")
_MOST_SHOWN = 60
_MOST_NUMBER = 1e15


@dataclass(frozen=True)
class Config:
    """A JSON object of a file, or a `part` of one. A null is as if its key were not there.

    Keys without a default must be there. Every method that reads one raises CheckpointError.
    """

    values: Mapping[str, Any]
    where: Path | str
    part: str = ""

    @classmethod
    def read(cls, path: Path, *, is_optional: bool = False) -> "Config":
        """The object in a file; an empty one where the file is optional and not there."""
        return cls({} if is_optional and not path.exists() else read_json(path), path)

    def has(self, name: str) -> bool:
        """True if there is a value that is not null."""
        return self.values.get(name) is not None

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST_WIDTH
    ) -> int:
        """A whole number in a range."""
        value = self._value(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.fault(name, value, f"a whole number from {least:,} to {most:,}")
        return value

    def counts(
        self,
        name: str,
        default: tuple[int, ...] | None = None,
        *,
        length: int | None = None,
        least: int = 1,
        most: int = MOST_WIDTH,
    ) -> tuple[int, ...]:
        """A list of whole numbers in a range, `length` of them, or one or more."""

        def is_one(value: object) -> bool:
            return type(value) is int and least <= value <= most

        many = "" if length is None else f"{length} "
        found = self._list(
            name, default, is_one, f"a list of {many}whole numbers from {least:,} to {most:,}"
        )
        if length not in (None, len(found)):
            raise self.fault(name, found, f"a list of {length}")
        return found

    def flags(self, name: str, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """A list of true and false."""
        return self._list(name, default, lambda one: type(one) is bool, "a list of true and false")

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of finite numbers."""
        return self._list(name, default, _is_number, "a list of numbers")

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """A finite number."""
        value = self._value(name, default)
        if not _is_number(value) or value <= above:
            raise self.fault(name, value, "a number" if above < 0 else f"a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.fault(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if type(value) is not str:
            raise self.fault(name, value, "a text")
        return value

    def table(self, name: str, default: Mapping[str, Any] | None = None) -> "Config":
        """The object that stands under a key."""
        value = self._value(name, default)
        if not isinstance(value, Mapping):
            raise self.fault(name, value, "an object")
        return Config(value, self.where, f"{self.part}{name}.")

    def setting(self, name: str, key: str = "") -> Any:
        """The value under `key`, by default `name`, which jobs may set: as that setting's."""
        try:
            return SETTINGS[name].kind.read(self.values[key or name])
        except BadValue as error:
            raise CheckpointError(
                f"{self.part}{key or name}: {error.what}",
                where=self.where,
                hint=error.hint,
                code="checkpoint.config",
            ) from None

    def facts(self, cls: type[Facts], **known: Any) -> Facts:
        """A dataclass of facts: those `known`, the others by the names and types of its fields.

        Whole numbers are 1 or more, others above 0.
        """
        kinds = get_type_hints(cls)
        read = {
            field.name: self._of_kind(
                kinds[field.name],
                field.name,
                None if field.default is MISSING else field.default,
            )
            for field in fields(cls)
            if field.name not in known and (field.default is not None or self.has(field.name))
        }
        return cls(**read, **known)

    def fault(self, name: str, value: object, expected: str) -> CheckpointError:
        """The error for a value."""
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        what = "is missing" if value is None else f"is {shown}"
        return CheckpointError(
            f"{self.part}{name} {what}; expected {expected}",
            where=self.where,
            hint="correct the file, or download it again",
            code="checkpoint.config",
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _list(
        self, name: str, default: Any, is_one: Callable[[Any], bool], expected: str
    ) -> tuple[Any, ...]:
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or not value or not all(map(is_one, value)):
            raise self.fault(name, value, expected)
        return tuple(value)

    def _of_kind(self, kind: Any, name: str, default: Any) -> Any:
        if get_origin(kind) is tuple:
            return self.counts(name, default)
        if kind is int:
            return self.count(name, default)
        if kind is bool:
            return self.flag(name, default)
        if kind is str:
            return self.text(name, default)
        return self.number(name, default, above=0 if kind is float else -math.inf)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST_NUMBER
