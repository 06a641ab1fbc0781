"""Compare `hyimg generate` with a plain loop over diffusers' pipeline, by processor time.

The loop over the classic pipeline loads once and saves each picture. Manifests repeat nothing,
prompts, sources, or both. Each run is its own process with an empty cache; the two take turns and
must give the same pixels. A first run of each, which finds no compiled Python files, is not
counted. After `--minutes`, no further run begins.

    python recipes/build-tiny-editors/tiny_editors.py wide --wide both
    python benchmarks/editors.py wide/klein-base --jobs 12 --steps 4 --out FILE
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measured import keep, processor_s
from PIL import Image

from hyimg_cli.quality.metrics import max_abs

SIDE = 256
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LOOP = """
import json, sys, warnings
from pathlib import Path
import diffusers, torch
from PIL import Image
model, manifest, out = map(Path, sys.argv[1:])
name = json.loads((model / "model_index.json").read_text())["_class_name"]
pipe = getattr(diffusers, name).from_pretrained(model)
pipe.set_progress_bar_config(disable=True)
out.mkdir()
for line in map(json.loads, manifest.read_text().splitlines()):
    pictures = [Image.open(manifest.parent / path).convert("RGB") for path in line["images"]]
    scale = {"true_cfg_scale": 1.0} if name.startswith("Qwen") else {"guidance_scale": 1.0}
    made = pipe(prompt=line["prompt"], image=pictures, height=SIDE, width=SIDE,
                num_inference_steps=line["num_inference_steps"],
                generator=torch.Generator().manual_seed(line["seed"]), **scale)
    made.images[0].save(out / (line["custom_id"] + ".png"))
""".replace("SIDE", str(SIDE))


def main() -> None:
    """Run all, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    given, started = parser.parse_args(), time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        model, rows = given.checkpoint.resolve(), dict[str, Any]()
        (first := place / "first").mkdir()
        run_pair(model, manifests(first, 1, 2)["both"], 0)
        for number in range(given.repeats):
            for name, manifest in manifests(place, given.jobs, given.steps).items():
                if (time.perf_counter() - started) / 60 < given.minutes:
                    pair = run_pair(model, manifest, number)
                    rows.setdefault(name, []).append(pair)
                    print(name, *pair, flush=True)
        rows = {name: row_of(pairs) for name, pairs in rows.items()}
        for name, row in rows.items():
            print(
                f"{name:10} loop {spread(row['loop'])}   hyimg {spread(row['hyimg'])}   "
                f"{row['ratio']:.2f}x   largest difference {row['levels']} levels",
                flush=True,
            )
    keep(given, {"side": SIDE, "threads": 1, "shapes": shapes(model), "rows": rows})


def spread(seconds: Sequence[float]) -> str:
    """Return median, minimum and maximum of processor seconds."""
    return f"{median(seconds):6.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def shapes(model: Path) -> dict[str, Any]:
    """Return numbers and widths of transformer and text encoder, from their configurations."""
    files = {name: model / name / "config.json" for name in ("transformer", "text_encoder")}
    own = {name: json.loads(file.read_text()).items() for name, file in files.items()}
    wanted = ("layers", "_size", "_dim", "heads", "_config")
    return {name: {k: v for k, v in one if k.endswith(wanted)} for name, one in own.items()}


def manifests(place: Path, jobs: int, steps: int) -> dict[str, Path]:
    """Return edits that repeat nothing, the prompt, the source, or both with another seed."""
    numbers = np.random.default_rng(0)
    for number in range(jobs):
        pixels = numbers.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    kinds = {
        "nothing": [(n, n) for n in range(jobs)],
        "prompts": [(n, 0) for n in range(jobs)],
        "sources": [(0, n) for n in range(jobs)],
        "both": [(0, 0)] * jobs,
    }
    for name, pairs in kinds.items():
        lines = [
            {"custom_id": f"j{seed}", "task": "it2i", "images": [f"{source}.png"], "seed": seed,
             "prompt": f"paint number {prompt} red", "num_inference_steps": steps,
             "size": f"{SIDE}x{SIDE}", "guidance_scale": 1.0}
            for seed, (source, prompt) in enumerate(pairs)
        ]  # fmt: skip
        (place / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return {name: place / f"{name}.jsonl" for name in kinds}


def run_pair(model: Path, manifest: Path, number: int) -> tuple[float, float, int]:
    """Return processor seconds of the loop and of hyimg, and how far their pixels differ."""
    ours, theirs = (manifest.with_suffix(f".{side}{number}") for side in ("hyimg", "loop"))
    how = {"env": os.environ | ONE_THREAD, "capture_output": True}
    plain = [sys.executable, "-W", "ignore", "-c", LOOP, model, manifest, theirs]
    loop_s = processor_s(plain, **how)
    cache = manifest.with_suffix(f".cache{number}")
    command = [sys.executable, "-m", "hyimg_cli", "generate", manifest, "-q", "-o", ours]
    command += ["--model", model, "--cache-dir", cache, "--device", "cpu"]
    hyimg_s = processor_s(command, **how)
    pairs = ((path, ours / "outputs" / path.name) for path in theirs.iterdir())
    levels = (max_abs(*(np.asarray(Image.open(one)) for one in pair)) for pair in pairs)
    return loop_s, hyimg_s, max(levels)


def row_of(pairs: Sequence[tuple[float, float, int]]) -> dict[str, Any]:
    """Return the medians of one manifest's pairs, and all of their values."""
    loop, hyimg, levels = zip(*pairs, strict=True)
    loop_s, hyimg_s = median(loop), median(hyimg)
    row: dict[str, Any] = {
        "loop_s": loop_s,
        "hyimg_s": hyimg_s,
        "ratio": loop_s / hyimg_s,
        "levels": max(levels),
    }
    return row | {"loop": loop, "hyimg": hyimg}


if __name__ == "__main__":
    main()
