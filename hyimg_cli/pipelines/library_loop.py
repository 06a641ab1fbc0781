"""Edit pictures by a plain loop over diffusers' own pipeline, for comparison with a run.

    python -m hyimg_cli.pipelines.library_loop < LOOP.json > FIGURES.json

LOOP.json has `model`, `pictures`, `prompt`, `steps`, `seed`, `device` and `out`, a folder for the
results. The pipeline has its own defaults otherwise. If it does not fit on the GPU, its networks
take turns there, as its documentation advises.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Tried in this order.
_PLACES = ("device", "model offload", "sequential offload")


def main() -> None:
    """Read what to draw, draw it, and print the figures as JSON."""
    sys.stdout.write(json.dumps(draw(json.load(sys.stdin))) + "\n")


def draw(loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return seconds of loading and of each picture, peak memory, and where the networks were."""
    import torch

    device = "cuda" if loop["device"] != "cpu" and torch.cuda.is_available() else "cpu"
    for place in _PLACES if device == "cuda" else _PLACES[:1]:
        try:
            return _drawn(loop, device, place)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return {"error": "out of memory"}


def _drawn(loop: Mapping[str, Any], device: str, place: str) -> dict[str, Any]:
    import diffusers
    import torch
    from PIL import Image, ImageOps

    began = time.perf_counter()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        loop["model"], torch_dtype=dtype, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    if place == "model offload":
        pipe.enable_model_cpu_offload()
    elif place == "sequential offload":
        pipe.enable_sequential_cpu_offload()
    else:
        pipe.to(device)
    load_s, seconds = time.perf_counter() - began, list[float]()
    out = Path(loop["out"])
    out.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(loop["pictures"]):
        began = time.perf_counter()
        with Image.open(name) as file:
            picture = ImageOps.exif_transpose(file).convert("RGB")
        made = pipe(
            prompt=loop["prompt"],
            image=picture,
            num_inference_steps=loop["steps"],
            generator=torch.Generator().manual_seed(loop["seed"]),
        )
        made.images[0].save(out / f"{number:03}.png")
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "pipeline": type(pipe).__name__,
        "place": place,
        "load_s": round(load_s, 2),
        "seconds": [round(one, 3) for one in seconds],
        "peak_memory_mb": round(peak / 1e6, 1),
    }


if __name__ == "__main__":
    main()
