"""Measure `--keep-outside`: edits found, pixels equal outside, whole edits recognized.

Photographs that scikit-image ships, edited and redrawn at random (`tests/simulated_edits.py`: the
truth is known), the embedded model's own edits, and one source of 12 megapixels from file to file.
Equality is counted in the files, as Pillow decodes them.

    python benchmarks/outside.py --cases 60 --out benchmarks/results/outside-2core-cpu.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from measured import keep
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_edits import GLOBAL, LOCAL, Case, case, cases, fitted, photograph

from hyimg_cli.engine.runner import make_plan
from hyimg_cli.finishing.outside import edit_of, put_back
from hyimg_cli.finishing.placement import Placement, mapped_back
from hyimg_cli.journal.job_pictures import Drawing, finish
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.media.formats import encode
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec.job import Job

# Edits by the embedded model: trained ones, and a background, which edits the whole picture.
EDITS = ("make the circle blue", "make the circle green", "make the circle yellow")
SOURCE = Path(__file__).parents[1] / "recipes" / "quickstart" / "red-circle.png"
_LARGE = (3000, 4000)
_SHOWN = ("overlap", "equal_outside", "kept", "psnr", "psnr_plain", "seam", "seam_plain")


def main() -> None:
    """Measure, print the summary, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60, help="local edits; half as many whole")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--area", type=float, default=0.4e6, help="pixels that a model draws")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/outside.json"))
    given = parser.parse_args()
    kinds = (
        ("local", LOCAL, given.cases),
        ("global", GLOBAL, given.cases // 2),
        ("none", ("none",), given.cases // 6),
    )
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, (group, names, count) in enumerate(kinds):
        for one in cases(count, given.seed + number, names, given.area):
            rows[group].append(_measured(one))
    result = {
        "what": "simulated edits and redraws of packaged photographs; equality counted in files",
        "local": {kind: _spread([r for r in rows["local"] if r["edit"] == kind]) for kind in LOCAL},
        "all_local": _spread(rows["local"]),
        "global": _verdicts(rows["global"]),
        "none": _verdicts(rows["none"]),
        "embedded": list(_embedded()),
        "large": list(_large()),
        "cases": [row for group in rows.values() for row in group],
    }
    keep(given, result)
    print(json.dumps({name: of for name, of in result.items() if name != "cases"}, indent=1))
    assert result["all_local"]["equal_outside"]["min"] == 1.0, "outside every pixel is equal"


def _measured(one: Case) -> dict[str, Any]:
    """Measure a case through the method and a file."""
    started = time.process_time()
    place = Placement.stretched(one.source.shape[:2], one.drawn.shape[:2])
    edit = edit_of(one.drawn, one.reference, place)
    result = put_back(one.source, one.drawn, one.reference, edit)
    seconds = time.process_time() - started
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "result.png"
        path.write_bytes(encode(result.pixels, fast=True))
        pixels = np.array(Image.open(path))
    height, width = one.source.shape[:2]
    mask = np.asarray(Image.fromarray(edit.mask).resize((width, height)))
    outside, change = result.matte == 0, np.abs(one.truth.astype(int) - one.source).sum(2)
    plain = mapped_back(one.drawn, place, (0, height), (0, width))
    return {
        "name": one.name,
        "edit": one.kind,
        "kind": edit.kind,
        "reasons": list(edit.reasons),
        "overlap": float((mask & one.mask).sum() / max(1, (mask | one.mask).sum())),
        "equal_outside": _equal_share(pixels, one.source, outside),
        "equal_outside_truth": _equal_share(pixels, one.source, ~one.mask),
        "kept": float(change[result.matte > 127].sum() / max(1, change.sum())),
        "psnr": _psnr(pixels, one.truth),
        "psnr_plain": _psnr(plain, one.truth),
        "seam": _seam(pixels, one, result.matte),
        "seam_plain": _seam(plain, one, result.matte),
        "processor_s": round(seconds, 3),
    }


def _equal_share(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float | None:
    return float((a == b).all(2)[where].mean()) if where.any() else None


def _psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.square(a.astype(float) - b).mean())
    return round(10 * np.log10(255**2 / max(error, 1e-3)), 2)


def _seam(pixels: np.ndarray, one: Case, matte: np.ndarray) -> float | None:
    """Return the gradient's error where the edit is blended in, in levels a pixel."""
    ring = (matte > 0) & (matte < 255)
    if not ring.any():
        return None
    slopes = [np.stack(np.gradient(p.astype(float), axis=(0, 1))) for p in (pixels, one.truth)]
    return round(float(np.abs(slopes[0] - slopes[1]).mean(axis=(0, 3))[ring].mean()), 3)


def _spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many local edits were found, and the spread of each number."""
    local = [row for row in rows if row["kind"] == "local"]
    found: dict[str, Any] = _verdicts(rows)
    for name in (*_SHOWN, "equal_outside_truth", "processor_s"):
        values = sorted(row[name] for row in local if row[name] is not None)
        if values:
            found[name] = {
                "median": round(statistics.median(values), 4),
                "mean": round(statistics.fmean(values), 4),
                "p10": round(float(np.quantile(values, 0.1)), 4),
                "min": round(values[0], 6),
                "max": round(values[-1], 4),
            }
    return found


def _verdicts(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {"n": len(rows)} | {
        kind: sum(row["kind"] == kind for row in rows) for kind in ("local", "none", "global")
    }


def _embedded() -> Iterator[dict[str, Any]]:
    """Yield the embedded model's edits, drawn by the command itself."""
    with tempfile.TemporaryDirectory() as name:
        folder, manifest = Path(name) / "run", Path(name) / "jobs.jsonl"
        common = {"images": [str(SOURCE)], "seeds": [1, 2], "keep_outside": True}
        lines = [common | {"custom_id": f"{n}", "prompt": text} for n, text in enumerate(EDITS)]
        manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "hyimg_cli", "generate", str(manifest), "-o", str(folder)]
        subprocess.run([*command, "--device", "cpu", "-q"], check=True)
        own = np.array(Image.open(SOURCE).convert("RGB"))
        for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
            edit = line["edit"]
            pixels = np.array(Image.open(folder / line["outputs"][0]["path"]).convert("RGB"))
            free = np.array(Image.open(folder / edit["mask"])) == 0
            yield {
                "name": line["custom_id"],
                "kind": edit["kind"],
                "area": edit["area"],
                "equal_outside": _equal_share(pixels, own, free),
                "outside": round(float(free.mean()), 3),
            }


def _large() -> Iterator[dict[str, Any]]:
    """Finish redraws of about a megapixel on sources of 12, each in its own process.

    A photograph, and an edit of everything in a picture that is half transparent nearly everywhere.
    """
    source = fitted(photograph("motorcycle_left.png"), _LARGE)
    one = case("large", "recolour", source, np.random.default_rng(3), 1024**2)
    alpha = np.broadcast_to(np.linspace(0, 255, _LARGE[1]).astype(np.uint8), _LARGE)
    pictures = {
        "photograph.jpg": source,
        "whole-frame.png": np.dstack([source, alpha]),
        "drawn.png": one.drawn,
        "shown.png": one.reference,
    }
    with tempfile.TemporaryDirectory() as name:
        for file, pixels in pictures.items():
            Image.fromarray(pixels).save(f"{name}/{file}", quality=95)
        for file in list(pictures)[:2]:
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                yield alone.submit(_finished, Path(name) / file).result()


def _finished(source: Path) -> dict[str, Any]:
    """Finish from file to file: read, find, put back, write and read back."""
    folder = source.parent
    drawn, shown = (np.array(Image.open(folder / f"{name}.png")) for name in ("drawn", "shown"))
    edit: dict[str, Any] = {"kind": "unfinished", "sha256": {}}
    before = _peak_mb()
    with RunFolder(folder / source.stem) as run:
        started, wall = time.process_time(), time.perf_counter()
        drawings, config = [Drawing(drawn, shown)], OutputConfig(folder, metadata=False)
        finish(run, _job(source), drawings, edit, config)
        seconds = time.process_time() - started
    return {
        "source": f"{source.stem}, {_LARGE[1]}x{_LARGE[0]}",
        "drawn": f"{drawn.shape[1]}x{drawn.shape[0]}",
        "kind": edit["kind"],
        "edited": edit["area"],
        "outside_equal": edit["outside_equal"],
        "processor_s": round(seconds, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "peak_memory_mb": _peak_mb(),
        "peak_before_mb": before,
    }


def _peak_mb() -> int:
    """Return this process's maximum memory. `ru_maxrss` includes the parent's, too."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1000)


def _job(source: Path) -> Job:
    line = {"prompt": "any", "images": [source.name], "keep_outside": True}
    if source.stem == "whole-frame":
        line |= {"region": f"0,0,{_LARGE[1]},{_LARGE[0]}", "region_mode": "instead"}
    manifest = source.with_suffix(".jsonl")
    manifest.write_text(json.dumps(line))
    (job,) = make_plan(read_manifest(manifest)).jobs
    return job


if __name__ == "__main__":
    main()
