"""The matrix of a line: the fields that it combines, and their values."""

import math
from collections.abc import Callable
from typing import Any

from hyimg_cli.manifest.fields import IN_MATRIX
from hyimg_cli.settings.other_names import field_of
from hyimg_cli.settings.values import BadValue, nearest, shown

MOST = 1000


# The values of each field, by the texts that distinguish them.
Axes = dict[str, dict[str, Any]]


def axes_of(lists: Any, add: Callable[..., None]) -> Axes:
    """Return the axes of a matrix. Each fault goes to `add`, and its axis is left out.

    Raises BadValue if it is not an object, and if all together would be too many jobs.
    """
    if type(lists) is not dict or not lists:
        hint = 'for example {"guidance_scale": [2.5, 5], "seed": [1, 2, 3]}'
        raise BadValue(f"{shown(lists)} is not an object of lists", hint, "wrong-type")
    sides = [len(values) for values in lists.values() if isinstance(values, list)]
    if max(len(lists), *sides, 0) > MOST:
        hint = f"the limit is {MOST} jobs per line"
        raise BadValue("the matrix is too large", hint, "out-of-range")
    axes: Axes = {}
    for key, values in lists.items():
        try:
            name, axis = _read_axis(key, values)
        except BadValue as bad:
            place = f"matrix.{key if key.isidentifier() else shown(key, 40)}"
            add(bad.slug, bad.what, place, bad.hint)
            continue
        if name in axes:
            what = f"{name} is given under two names"
            add("duplicate-field", what, "matrix", "remove one of them")
        else:
            axes[name] = axis
    count = math.prod(map(len, axes.values()))
    if count > MOST:
        shape = " x ".join(str(len(axis)) for axis in axes.values())
        what = f"the matrix makes {count} jobs ({shape})"
        raise BadValue(what, f"the limit is {MOST} per line; write several lines", "out-of-range")
    return axes


def _read_axis(key: str, values: Any) -> tuple[str, dict[str, Any]]:
    """Return the field that a key names, and its values by their texts. Raises BadValue."""
    known = IN_MATRIX.get(key)
    if known is None:
        meant = field_of(key)
        close = meant if meant in IN_MATRIX else nearest(key, IN_MATRIX)
        names = ", ".join(dict.fromkeys(field.name for field in IN_MATRIX.values()))
        hint = f'did you mean "{close}"?' if close else f"allowed: {names}"
        raise BadValue(f"{shown(key)} cannot be in a matrix", hint, "unknown-field")
    if not isinstance(values, list) or not values:
        what, hint = f"{shown(values)} is not a list of values", "give a list of at least one value"
        raise BadValue(what, hint, "wrong-type")
    found: dict[str, Any] = {}
    for value in values:
        typed, text = known.kind.read(value), str(value)
        if isinstance(typed, bool):
            text = text.lower()
        elif isinstance(typed, int | float):  # 5 and 5.0 are the same number
            text = repr(typed).removesuffix(".0")
        found[text] = typed
    if len(found) < len(values):
        raise BadValue(f"{shown(values)} contains a value twice", "remove one of them")
    return known.name, found
