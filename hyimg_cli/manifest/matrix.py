"""The matrix of a line: which fields it combines, and by which values."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from hyimg_cli.manifest.fields import IN_MATRIX
from hyimg_cli.settings.values import BadValue, nearest, shown

MOST = 1000


# The values of each field, by the texts that tell them apart.
Axes = dict[str, dict[str, Any]]


def axes_of(lists: Mapping[str, Any], add: Callable[..., None]) -> Axes:
    """The axes of a matrix. Each fault goes to `add`, and its axis is left out.

    Raises BadValue where all together would be too many jobs.
    """
    sides = [len(values) for values in lists.values() if isinstance(values, list)]
    if max(len(lists), *sides, 0) > MOST:
        hint = f"up to {MOST} jobs are made of a line"
        raise BadValue("the matrix is too large", hint, "out-of-range")
    axes: Axes = {}
    for key, values in lists.items():
        axis, known = _axis(key, values, add), IN_MATRIX.get(key)
        if axis and known and known.name in axes:
            what = f"{known.name} is there by two names"
            add("duplicate-field", what, field="matrix", hint="keep one")
        elif axis and known:
            axes[known.name] = axis
    count = math.prod(map(len, axes.values()))
    if count > MOST:
        shape = " x ".join(str(len(axis)) for axis in axes.values())
        what = f"the matrix makes {count} jobs ({shape})"
        raise BadValue(what, f"up to {MOST} are made of a line; write several", "out-of-range")
    return axes


def _axis(key: str, values: Any, add: Callable[..., None]) -> dict[str, Any] | None:
    known, place = IN_MATRIX.get(key), f"matrix.{key if key.isidentifier() else shown(key, 40)}"
    if known is None:
        close = nearest(key, IN_MATRIX)
        names = ", ".join(dict.fromkeys(field.name for field in IN_MATRIX.values()))
        hint = f'did you mean "{close}"?' if close else f"these can: {names}"
        add("unknown-field", f"{shown(key)} cannot be in a matrix", field=place, hint=hint)
        return None
    if not isinstance(values, list) or not values:
        hint = "give a list of one value or more"
        add("wrong-type", f"{shown(values)} is not a list of values", field=place, hint=hint)
        return None
    found: dict[str, Any] = {}
    for value in values:
        try:
            typed = known.kind.read(value)
        except BadValue as bad:
            add(bad.slug, bad.what, field=place, hint=bad.hint)
            return None
        found[_text(typed, value)] = typed
    if len(found) < len(values):
        add("bad-value", f"{shown(values)} names a value twice", field=place, hint="keep one")
        return None
    return found


def _text(typed: Any, value: Any) -> str:
    """A value as it stands in ids: 5 and 5.0 are the same number."""
    if isinstance(typed, bool):
        return str(typed).lower()
    return repr(typed).removesuffix(".0") if isinstance(typed, int | float) else str(value)
