"""Measure new backgrounds: recognized, the subject equal to its source, restyles left whole, and
doubts of hair, glass, shadows and subjects without detail.

Photographs that scikit-image ships, with subjects of 10 to 60 % and soft borders, redrawn with a
shift, zoom, cast, blur, grain and warp (`tests/simulated_backgrounds.py`: the subject is known).

    python benchmarks/background.py --out benchmarks/results/background-2core-cpu.json
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from measured import keep
from PIL import Image
from scipy import ndimage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_backgrounds import (
    BACKDROPS,
    OUTLINES,
    RESTYLES,
    TRAITS,
    Replaced,
    background,
    restyle,
)

from hyimg_cli.finishing.doubts import background_doubts
from hyimg_cli.finishing.outside import edit_of, put_back
from hyimg_cli.finishing.placement import Placement

# Pixels of the source within the subject's border, which soft borders and the blend may change.
_INNER = 4
_SHARES = (0.1, 0.6)
# Words that name a doubt.
_NAMED = ("hair and glass", "shadow", "without detail")


def main() -> None:
    """Measure, print the summary, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backgrounds", type=int, default=80)
    parser.add_argument("--restyles", type=int, default=30)
    parser.add_argument("--traits", type=int, default=20, help="backgrounds of each trait")
    parser.add_argument("--seed", type=int, default=2029)
    parser.add_argument("--drawn", type=int, default=448, help="side of the redraw, in pixels")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rng, side = np.random.default_rng(given.seed), given.drawn * 11 // 8
    shares = np.linspace(*_SHARES, given.backgrounds)
    rng.shuffle(shares)
    replaced = []
    for number, share in enumerate(shares):
        outline = OUTLINES[number % len(OUTLINES)]
        backdrop = BACKDROPS[number // len(OUTLINES) % len(BACKDROPS)]
        one = background(rng, outline, backdrop, float(share), side, given.drawn)
        replaced.append(_measured(one) | {"outline": outline, "backdrop": backdrop})
    restyled = [
        _measured(restyle(rng, RESTYLES[number % len(RESTYLES)], side, given.drawn))
        for number in range(given.restyles)
    ]
    special = {
        trait: [
            _measured(_special(rng, trait, number, side, given.drawn))
            for number in range(given.traits)
        ]
        for trait in TRAITS
    }
    found = [row for row in replaced if row["kind"] == "background"]
    result = {
        "what": "simulated backgrounds and restyles of packaged photographs",
        "backgrounds": {"n": len(replaced), "kinds": Counter(row["kind"] for row in replaced)}
        | {name: _spread(found, name) for name in ("inner_equal", "covered", "psnr", "psnr_plain")},
        "restyles": {"n": len(restyled), "kinds": Counter(row["kind"] for row in restyled)},
        "doubts": {
            name: _doubts(rows)
            for name, rows in ({"backgrounds": replaced, "restyles": restyled} | special).items()
        },
        "processor_s": {
            name: _spread(rows, "processor_s")
            for name, rows in (("backgrounds", replaced), ("restyles", restyled))
        },
        "cases": [*replaced, *restyled, *(row for rows in special.values() for row in rows)],
    }
    keep(given, result)
    print(json.dumps({name: of for name, of in result.items() if name != "cases"}, indent=1))


def _measured(one: Replaced) -> dict[str, Any]:
    started = time.process_time()
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    edit = edit_of(one.drawn, one.reference, place)
    seconds = time.process_time() - started
    row: dict[str, Any] = {"name": one.name, "kind": edit.kind, "reasons": list(edit.reasons)}
    row["processor_s"] = round(seconds, 3)
    row["look_at"] = list(background_doubts(edit, one.drawn))
    inner = ndimage.distance_transform_edt(one.subject > 0.999) > _INNER
    if not inner.any():
        return row
    result = put_back(one.source, one.drawn, one.reference, edit)
    size = one.source.shape[1], one.source.shape[0]
    plain = np.asarray(Image.fromarray(one.drawn).resize(size, Image.Resampling.LANCZOS))
    return row | {
        "subject": round(float((one.subject > 0.5).mean()), 4),
        "inner_equal": round(float((result.pixels == one.source).all(2)[inner].mean()), 5),
        "covered": round(float((result.matte > 0)[one.subject < 0.01].mean()), 5),
        "psnr": _psnr(result.pixels, one.truth),
        "psnr_plain": _psnr(plain, one.truth),
        "doubts": list(edit.doubts),
    }


def _special(rng: np.random.Generator, trait: str, number: int, side: int, drawn: int) -> Replaced:
    """Return a background with a trait: a shadow before white or a gradient, others before all."""
    outline = OUTLINES[number // len(BACKDROPS) % len(OUTLINES)]
    backdrops = BACKDROPS[:2] if trait == "shadow" else BACKDROPS
    backdrop = backdrops[number % len(backdrops)]
    share = float(rng.uniform(*_SHARES))
    return background(rng, outline, backdrop, share, side, drawn, trait=trait)


def _doubts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts, and the doubts by what they name."""
    named = [name for row in rows for name in _NAMED if any(name in one for one in row["look_at"])]
    return {"n": len(rows), "kinds": Counter(row["kind"] for row in rows)} | Counter(named)


def _psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.square(a.astype(float) - b).mean())
    return round(10 * np.log10(255**2 / max(error, 1e-3)), 2)


def _spread(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    values = sorted(row[name] for row in rows if name in row)
    if not values:
        return {}
    return {
        "median": round(statistics.median(values), 4),
        "p10": round(float(np.quantile(values, 0.1)), 4),
        "min": values[0],
        "max": values[-1],
    }


if __name__ == "__main__":
    main()
