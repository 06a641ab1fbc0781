"""Compare K/V shared by jobs with diffusers, which keeps K/V for one job.

Compares the rows that the transformer computes, and processor seconds of all denoise steps, in
turn. The checkpoint is random, and wide enough for the transformer to be most of the work.

    python benchmarks/editor_prefixes.py --kind qwen-image-2.1 --references 1 4 10 --out FILE
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from measured import keep
from PIL import Image

from hyimg_cli.engine.runner import accept
from hyimg_cli.journal.keys import source_digest
from hyimg_cli.kv.slices import Slice
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.models import registry
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import ModelChoice

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "build-tiny-editors"))
import tiny_editors

_CLASSES = {
    "qwen-image-2.1": diffusers.QwenImage21Transformer2DModel,
    "klein-kv": diffusers.Flux2Transformer2DModel,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=_CLASSES, default="qwen-image-2.1")
    parser.add_argument("--references", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("--sources", type=int, default=8, help="sets of them")
    parser.add_argument("--instructions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--side", type=int, default=192, help="of results and references")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        checkpoint = _write(given, place)
        found = [_measure(given, place, checkpoint, count) for count in given.references]
    print(json.dumps(found, indent=1))
    keep(given, {"threads": 1, "found": found})


def _write(given: argparse.Namespace, place: Path) -> Path:
    tiny = tiny_editors.write(place / "tiny", given.kind)
    config = json.loads((tiny / "transformer" / "config.json").read_text())
    wide = {"num_layers": given.layers, "attention_head_dim": 64}
    wide |= {"num_attention_heads": given.width // 64, "axes_dims_rope": (16, 24, 24)}
    if given.kind == "klein-kv":
        wide |= {"num_single_layers": 2 * given.layers, "axes_dims_rope": (16, 16, 16, 16)}
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    transformer = _CLASSES[given.kind](**own | wide)
    made = tiny_editors.write(place / given.kind, given.kind, transformer=transformer)
    card = json.loads((made / "card.json").read_text()) | {"base_size": given.side}
    (made / "card.json").write_text(json.dumps(card))
    return made


def _measure(
    given: argparse.Namespace, place: Path, checkpoint: Path, references: int
) -> dict[str, Any]:
    numbers, lines = np.random.default_rng(0), []
    for number in range(given.sources * references):
        pixels = numbers.integers(0, 256, (given.side, given.side, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    for one, text in product(range(given.sources), range(given.instructions)):
        names = [f"{one * references + at}.png" for at in range(references)]
        line = {"custom_id": f"{one}-{text}", "task": "it2i", "prompt": f"instruction {text}"}
        line |= {"images": names, "model": str(checkpoint), "num_inference_steps": given.steps}
        lines.append(line | {"seed": text, "size": f"{given.side}x{given.side}"})
    manifest = place / "jobs.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = list(accept(read_manifest(manifest), settle({}, {}, {}))[0])
    model = registry.load_editor(ModelChoice(str(checkpoint), dtype="float32", device="cpu"))
    kept, wanted = dict[Any, Any](), []
    for job in jobs:
        wanted.append(model.conditions(job, [source_digest(path) for path in job.images]))
        for one in wanted[-1].keys() - kept.keys():
            kept[one] = model.encoder.encode(one)
    model.load_weights()
    ways = {"library": None, "shared": KVTree[Slice](10**11)}
    rows, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    furthest = 0.0
    for job, own in zip(jobs, wanted, strict=True):
        made = []
        # Job by job in turn, so that other programs slow both equally.
        for way, model.tree in ways.items():
            began = time.process_time()
            denoiser = model.denoiser(job, {one: kept[one] for one in own})
            latents = denoiser.latents
            for step in range(denoiser.steps):
                latents = denoiser.step(step, latents)
            seconds[way] += time.process_time() - began
            made.append(latents)
            branches = denoiser.branches
            rows[way] += sum(one.computed + one.per_step * given.steps for one in branches)
        furthest = max(furthest, float((made[0] - made[1]).abs().max()))
    counted, timed = (one["library"] / one["shared"] for one in (rows, seconds))
    return {
        "references": references,
        "rows": rows,
        "seconds": {way: round(one, 2) for way, one in seconds.items()},
        "counted_gain": round(counted, 3),
        "timed_gain": round(timed, 3),
        "part_of_gain": round(timed / counted, 3),
        "largest_difference": furthest,
    }


if __name__ == "__main__":
    main()
