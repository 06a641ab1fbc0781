"""Compare two results row by row, as a time over the earlier time.

Nothing is refused; differences in machine, versions or layers are printed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from shapes.kept import WIDTH

Result = dict[str, Any]
Key = tuple[str, str]
_SHOWN = 6


def compared(old: Result, new: Result) -> list[str]:
    """Return lines of a table; below one is faster.

    Milliseconds of a layer if layers were timed.
    """
    before, after = _rows(old), _rows(new)
    both = [key for key in after if key in before]
    lines = [*_machines(old, new), f"{'':{WIDTH}} {'':6} {'before':>12} {'now':>12}  now / before"]
    lines += [_line(key, before[key], after[key]) for key in both]
    for title, one, other in (("now alone", after, before), ("before alone", before, after)):
        if alone := [f"{name} ({form})" for name, form in one if (name, form) not in other]:
            more = f"; and {len(alone) - _SHOWN} more" if len(alone) > _SHOWN else ""
            lines.append(f"{title}: {'; '.join(alone[:_SHOWN])}{more}")
    return lines


def _machines(old: Result, new: Result) -> Iterator[str]:
    yield f"before: {_machine(old)}"
    yield f"now:    {_machine(new)}"
    for part in ("hardware", "versions", "environment", "scale"):
        one, other = old.get(part, {}), new.get(part, {})
        differ = [n for n in sorted(one.keys() | other.keys()) if one.get(n) != other.get(n)]
        if differ:
            said = "; ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in differ)
            yield f"    ! {part} differ: {said}"


def _machine(result: Result) -> str:
    gpus = ", ".join(result["hardware"]["gpus"]) or result["hardware"]["cpu"]
    layers = (f"{b['form']} {b['layers']} layers" for b in result["building"])
    return "; ".join((gpus, f"torch {result['versions']['torch']}", *layers, result["date"]))


def _rows(result: Result) -> dict[Key, dict[str, Any]]:
    """Return every time by name and form: rows, first calls if recorded, requests."""
    found: dict[Key, dict[str, Any]] = {}
    for row in result["rows"]:
        key, took, layers = (row["name"], row["form"]), row["timed"], row["layers"]
        by = 1 if row["per_layer"] is None else layers
        found[key] = _figures([took[name] / by for name in ("median", "least", "most")], layers)
        found[key]["is_of_layer"] = row["per_layer"] is not None
        if row.get("shows_first"):
            found[f"{key[0]}, first call", key[1]] = _figures([took["first_ms"]] * 3, layers)
    for served in result["requests"]:
        if served["seconds_each"] is not None:
            times = [1e3 * served["seconds_each"]] * 3
            found[served["name"], served["form"]] = _figures(times, served["layers"])
    return found


def _figures(times: Sequence[float], layers: int | None) -> dict[str, Any]:
    figures = dict(zip(("time", "least", "most"), times, strict=True))
    return figures | {"layers": layers, "is_of_layer": False}


def _line(key: Key, old: dict[str, Any], new: dict[str, Any]) -> str:
    name, form = key
    remarks = []
    if old["layers"] != new["layers"]:
        of = "a layer's time, of" if new["is_of_layer"] else "NOT of as many layers:"
        remarks.append(f"{of} {old['layers']} and {new['layers']}")
    if old["least"] <= new["most"] and new["least"] <= old["most"]:
        remarks.append("within the spread")
    said = f" ({'; '.join(remarks)})" if remarks else ""
    ratio = new["time"] / old["time"] if old["time"] else math.inf
    return f"{name:{WIDTH}} {form:6} {old['time']:12.3f} {new['time']:12.3f} {ratio:9.3f}{said}"
