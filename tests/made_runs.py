"""Run folders without a model: pictures of one colour, and the lines that a run writes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from hyimg_cli.media.images import pixel_digest, read_image


def made_run(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> Path:
    """A finished run. A job has `custom_id` and `prompt`, and may have the `colour` of its result,
    `images` (paths that exist), `failed`, a message, or `is_left`.
    """
    (folder / "outputs").mkdir(parents=True, exist_ok=True)
    lines, results = [], []
    for job in jobs:
        name, sources = job["custom_id"], [Path(path) for path in job.get("images", ())]
        line = {"custom_id": name, "task": "it2i" if sources else "t2i", "prompt": job["prompt"]}
        line |= {"images": [str(path.absolute()) for path in sources]} if sources else {}
        line |= {key: value for key, value in job.items() if key.startswith("x_")}
        lines.append(line)
        result: dict[str, Any] = {"custom_id": name, "status": "done", "key": "k"}
        result["source_sha256"] = [digest(path) for path in sources]
        if "failed" in job:
            error = {"code": "job.failed", "message": job["failed"]}
            results.append(result | {"status": "failed", "error": error})
        elif not job.get("is_left"):
            path = folder / "outputs" / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), job.get("colour", "red")).save(path)
            pixels = pixel_digest(read_image(path).pixels)
            output = {"path": f"outputs/{name}.png", "sha256": digest(path), "width": 16}
            output |= {"pixel_sha256": pixels, "height": 16, "seed": 1}
            results.append(result | {"outputs": [output]})
    for file, entries in (("manifest.resolved.jsonl", lines), ("results.jsonl", results)):
        (folder / file).write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
