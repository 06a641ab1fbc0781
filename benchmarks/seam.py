"""Measure the seam of edits: false alarms on clean edits, and planted faults that are found.

Simulated edits of packaged photographs (`tests/simulated_edits.py`), each in three regions: the
edit's own box, and ones that are 5 % and 20 % wider. Then planted on each edit: a cast of 2, 3 and
5 levels that finishing did not undo, the same as a wave over the picture, and a region that cuts
off a third of the edit.

    python benchmarks/seam.py --cases 120 --out benchmarks/results/seam-2core-cpu.json
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measured import keep
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_edits import LOCAL, Case, cases

from hyimg_cli.finishing.outside import Edit, edit_of
from hyimg_cli.finishing.placement import Placement
from hyimg_cli.finishing.planes import Plane, opponent
from hyimg_cli.finishing.seam import Seam, seam_of
from hyimg_cli.journal.edit_facts import seam_level

WIDER, CASTS = (0.0, 0.05, 0.2), (2.0, 3.0, 5.0)
NAMES = ("cast", "step", "level", "own", "cut", "cut_step")
# `level` is what `--max-seam` limits.
LIMITS = {"cast": 1.5, "step": 3.0, "level": 2.5}
# Part of a region's border that an edit crosses at least if it is cut off. Of several patches, some
# may be left out whole, which `spill` says.
LEAST_CROSSED = 0.03
Box = tuple[int, int, int, int]


def main() -> None:
    """Measure, print the summary, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--area", type=float, default=0.4e6, help="pixels that a model draws")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    started, rows = time.process_time(), []
    for number, one in enumerate(cases(given.cases, given.seed, LOCAL, given.area)):
        rows += _measured(one, np.random.default_rng(number))
    result = {
        "what": "seams of simulated edits in a region, clean and with planted faults",
        "clean": {name: _spread(rows, name) for name in NAMES},
        "above": {name: _above(rows, name, limit) for name, limit in LIMITS.items()},
        "cut off": _cuts(rows),
        "processor_s": round(time.process_time() - started, 1),
        "cases": [row for row in rows if row["planted"] == "cut" or row.get("cut")],
    }
    keep(given, result)
    print(json.dumps({name: of for name, of in result.items() if name != "cases"}, indent=1))


def _measured(one: Case, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield the seam of a case in each region, and with each planted fault in one of them."""
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    edit = edit_of(one.drawn, one.reference, place)
    facts = {"name": one.name, "kind": edit.kind, "reasons": [*edit.reasons]}
    if edit.kind != "local" or edit.reasons:
        yield facts | {"planted": "nothing"}
        return
    boxes = {wider: _box_of(one.mask, wider) for wider in WIDER}
    limited = {wider: _limited(edit, one, box) for wider, box in boxes.items()}
    for wider, clean in limited.items():
        yield facts | {"wider": wider, "planted": "nothing"} | _numbers(seam_of(clean))
    wider = WIDER[int(rng.integers(len(WIDER)))]
    edit, facts = limited[wider], facts | {"wider": wider}
    for levels in CASTS:
        colour = rng.normal(size=(3, 1, 1)).astype(np.float32)
        colour *= levels / np.linalg.norm(opponent(colour))
        for how, where in (("cast", np.float32(1)), ("wave", _wave(edit.mask.shape, rng))):
            faulty = replace(edit, drawn=edit.drawn + colour * where)
            yield facts | {"planted": f"{how} {levels:g}"} | _numbers(seam_of(faulty))
    smaller = _cut_off(boxes[wider], rng)
    facts |= {"planted": "cut", "crosses": _crosses(one, smaller)}
    yield facts | _numbers(seam_of(_limited(edit, one, smaller)))


def _limited(edit: Edit, one: Case, box: Box) -> Edit:
    """Return a local edit limited to a box of its source, as if it had been given."""
    given = Image.new("L", (one.source.shape[1], one.source.shape[0]))
    given.paste(255, box)
    height, width = edit.mask.shape
    allowed = np.asarray(given.resize((width, height), Image.Resampling.NEAREST)) > 0
    return replace(edit, allowed=allowed, mask=edit.found & allowed)


def _numbers(seam: Seam | None) -> dict[str, Any]:
    if seam is None:
        return {}
    level = seam_level({"seam": seam.to_json()})
    return seam.to_json() | {"doubt": bool(seam.doubts), "level": level}


def _wave(shape: tuple[int, int], rng: np.random.Generator) -> Plane:
    """Return a half cosine over the picture in a direction, from -1 to 1."""
    y, x = (np.linspace(0, 1, side, dtype=np.float32) for side in shape)
    angle = rng.uniform(0, 2 * np.pi)
    along = np.cos(angle) * x + np.sin(angle) * y[:, None]
    return np.cos(np.pi * (along - along.min()) / np.ptp(along)).astype(np.float32)


def _box_of(mask: np.ndarray, wider: float) -> Box:
    """Return the box of an edit, wider by a part of its sides."""
    left, top, right, bottom = Image.fromarray(mask).getbbox() or (0, 0, 1, 1)
    x, y = (round(wider * side / 2) for side in (right - left, bottom - top))
    height, width = mask.shape
    return max(0, left - x), max(0, top - y), min(width, right + x), min(height, bottom + y)


def _cut_off(box: Box, rng: np.random.Generator) -> Box:
    """Return the box without a third, on one side."""
    sides, at = [*box], int(rng.integers(4))
    third = round((box[2 + at % 2] - box[at % 2]) / 3)
    sides[at] += third if at < 2 else -third
    return sides[0], sides[1], sides[2], sides[3]


def _crosses(one: Case, box: Box) -> float:
    """Return the part of a region's border in the edit."""
    left, top, right, bottom = box
    inside = one.mask[top:bottom, left:right]
    border = np.concatenate([inside[0], inside[-1], inside[:, 0], inside[:, -1]])
    return round(float(border.mean()), 4)


def _of(rows: list[dict[str, Any]], planted: str) -> list[dict[str, Any]]:
    """Return the rows with a planted fault, of edits that finishing found to be local."""
    return [row for row in rows if row["planted"] == planted and "cut" in row]


def _spread(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    values = [row[name] for row in _of(rows, "nothing") if row[name] is not None]
    points = {"median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    found = {word: round(float(np.quantile(values, at)), 3) for word, at in points.items()}
    return {"n": len(values)} | found


def _above(rows: list[dict[str, Any]], name: str, limit: float) -> dict[str, Any]:
    """Return the share of edits above a limit, clean and with each fault."""
    found: dict[str, Any] = {"limit": limit}
    for planted in dict.fromkeys(row["planted"] for row in rows):
        values = [row[name] for row in _of(rows, planted) if row[name] is not None]
        if values and planted != "cut":
            found[planted] = round(float(np.mean([value > limit for value in values])), 3)
    return found


def _cuts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of edits with the doubt, by region."""
    groups = {f"clean, {wider:.0%} wider": wider for wider in WIDER}
    shares: dict[str, Any] = {
        name: _share([row for row in _of(rows, "nothing") if row["wider"] == wider])
        for name, wider in groups.items()
    }
    cut = [row for row in _of(rows, "cut") if row["crosses"] >= LEAST_CROSSED]
    return shares | {"a third cut off": _share(cut)}


def _share(rows: list[dict[str, Any]]) -> dict[str, Any]:
    doubts = sum(row["doubt"] for row in rows)
    return {"n": len(rows), "doubts": doubts, "share": round(doubts / max(1, len(rows)), 3)}


if __name__ == "__main__":
    main()
