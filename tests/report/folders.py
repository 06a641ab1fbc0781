"""Folders of runs, made up: a journal, a manifest as it was resolved, and pictures to match."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

INFO = {
    "manifest": {"name": "jobs.jsonl", "digest": "ab" * 32},
    "models": {"tiny-image": "cd" * 32},
    "versions": {"hyimg": "0.1.0", "python": "3.11.2"},
    "hardware": {"system": "Linux x86_64", "cpu": "CPU", "cores": 2, "gpus": []},
    "flags": {
        "seed": {"value": 7, "origin": "flag"},
        "size": {"value": "auto", "origin": "default"},
    },
}
Line = dict[str, Any]


def done(name: str, path: str | None = None, **more: Any) -> Line:
    path = path or f"outputs/{name}.png"
    sha256 = hashlib.sha256(path.encode()).hexdigest()
    file = {"path": path, "sha256": sha256, "width": 64, "height": 48, "seed": 5}
    times = {"queue": 3.0, "think": 0.25, "denoise_rest": 1.0, "total": 4.25}
    line = {"custom_id": name, "status": "done", "outputs": [file], "timings_s": times}
    return line | {"kv_reuse": {"status": "hit"}, "denoise_steps": 20} | more


def failed(name: str, code: str = "source.missing") -> Line:
    error = {"code": code, "message": "no such <file>", "hint": "give another"}
    return {"custom_id": name, "status": "failed", "outputs": [], "error": error}


def asked(name: str, **more: Any) -> Line:
    shared = {"custom_id": name, "task": "it2i", "prompt": "make it <b>blue</b>"}
    return shared | {"images": ["../in.png"], "seed": 5} | more


def write_run(folder: Path, results: Sequence[Line], jobs: Sequence[Line]) -> Path:
    """A run's folder without pictures."""
    (folder / "outputs").mkdir(parents=True, exist_ok=True)
    for name, lines in (("results.jsonl", results), ("manifest.resolved.jsonl", jobs)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(INFO))
    return folder


def picture(path: Path, number: int, *, size: tuple[int, int] = (96, 72)) -> Path:
    """A disc on a ground, of colours by number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, f"hsl({number * 47 % 360}, 45%, 80%)")
    middle, radius = (size[0] / 2, size[1] / 2), size[1] / 3
    ImageDraw.Draw(image).circle(middle, radius, f"hsl({number * 83 % 360}, 70%, 45%)")
    image.save(path)
    return path


def synthetic(folder: Path, count: int, *, seeds: int = 2) -> Path:
    """A run over `count` jobs: `seeds` of each photo, a failed job in 50, a warned one in 40, and
    each 30th without a source.
    """
    results, jobs = [], []
    for n in range(count):
        name, photo = f"photo-{n // seeds:04}-{n % seeds}", f"../photos/{n // seeds:04}.png"
        prompt = f"make the disc {('red', 'blue', 'green')[n % 3]}, as on a postcard"
        sources: Line = {"images": [photo]} if n % 30 else {"task": "t2i", "images": []}
        jobs.append(asked(name, prompt=prompt, seed=n, num_inference_steps=20, **sources))
        text = f"<think>They ask for {prompt}.</think><recaption>A disc, number {n}.</recaption>"
        line = done(name, f"outputs/{n % 60:02}.png", cot_text=text)
        if n % 50 == 7:
            line = failed(name)
        elif n % 40 == 9:
            line["warnings"] = ["the text was cut off"]
        results.append(line)
    for n in range(60):
        first = picture(folder.parent / f"photos/{n:04}.png", n)
        for more in range(n + 60, count // seeds + 1, 60):
            (folder.parent / f"photos/{more:04}.png").hardlink_to(first)
        picture(folder / f"outputs/{n:02}.png", n + 100, size=(64, 48))
    return write_run(folder, results, jobs)
