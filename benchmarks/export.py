"""Rows per processor second of `hyimg export`, by format, from a run of made-up pairs.

    python benchmarks/export.py --rows 10000 --side 64 --rounds 3

Each export and each `--verify` is its own process. Its whole processor time counts; the time of a
process that exports one row is printed next to it.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from measured import processor_s
from PIL import Image

FORMATS = ("parquet", "webdataset", "folder")
HYIMG = (sys.executable, "-m", "hyimg_cli", "export")
ALLOWED = ("--allow-licence", "unknown", "--source-licence", "CC0-1.0", "-q")


def write_run(folder: Path, rows: int, side: int) -> Path:
    """Write a run of edits, each with its own source: a smooth picture with a little noise."""
    (folder / "outputs").mkdir(parents=True)
    lines, results = [], []
    for n in range(rows):
        paths = folder / f"outputs/{n:06}.png", folder / f"in-{n:06}.png"
        for number, path in enumerate(paths):
            random = np.random.default_rng(2 * n + number)
            small = Image.fromarray(random.integers(0, 255, (8, 8, 3), np.uint8))
            pixels = np.asarray(small.resize((side, side))).astype(np.int16)
            noise = random.integers(0, 2, pixels.shape)
            Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(path)
        sha256s = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        line = {"custom_id": f"{n:06}", "task": "it2i", "prompt": f"edit {n}"}
        lines.append(line | {"model": "tiny-image", "images": [paths[1].name], "seed": n})
        output = {"path": f"outputs/{paths[0].name}", "sha256": sha256s[0], "seed": n}
        output |= {"pixel_sha256": sha256s[0], "width": side, "height": side}
        result = {"custom_id": f"{n:06}", "status": "done", "key": "", "outputs": [output]}
        results.append(result | {"source_sha256": sha256s[1:], "denoise_steps": 20})
    for name, entries in (("manifest.resolved.jsonl", lines), ("results.jsonl", results)):
        (folder / name).write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run = str(write_run(folder / "run", asked.rows, asked.side))
        one = str(write_run(folder / "one", 1, asked.side))
        nbytes = sum(p.stat().st_size for p in (folder / "run").rglob("*.png"))
        print(json.dumps({"rows": asked.rows, "bytes of a pair": nbytes / asked.rows}))
        for form in FORMATS:
            taken: dict[str, list[float]] = {"export": [], "verify": [], "one row": []}
            named = ["--format", form, *ALLOWED]
            for n in range(asked.rounds):
                out = str(folder / f"{form}-{n}")
                taken["export"].append(processor_s([*HYIMG, run, "-o", out, *named]))
                taken["verify"].append(processor_s([*HYIMG, "--verify", out, "-q"]))
                taken["one row"].append(processor_s([*HYIMG, one, "-o", f"{out}-one", *named]))
            size = sum(p.stat().st_size for p in Path(out).rglob("*") if p.is_file())
            facts = {name: [min(s), statistics.median(s), max(s)] for name, s in taken.items()}
            rate = asked.rows / (facts["export"][1] - facts["one row"][1])
            told = {"format": form, "rows a processor second": round(rate), "size": size / nbytes}
            print(json.dumps(told | {n: [round(x, 2) for x in f] for n, f in facts.items()}))


if __name__ == "__main__":
    main()
