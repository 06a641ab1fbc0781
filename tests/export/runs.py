"""Folders of runs, made up: lines, results, pictures and sources to match, and picks."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hyimg_cli.media.images import pixel_digest

Line = dict[str, Any]
# Ids that a WebDataset key would cut, or take for a folder.
IDS = ("cat", "a.b", "a.c", "sub/dog", "ünï", "x")
LICENSED = ("--allow-licence", "unknown", "--source-licence", "CC0-1.0")


def picture(path: Path, number: int) -> Path:
    """A small picture of colours by number, of the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def job(folder: Path, name: str, number: int, sources: Iterable[int] = (), **more: Any) -> Line:
    """A line and its result as one: the picture `number`, made of the photos of these numbers."""
    suffix = ".jpg" if number % 5 == 1 else ".png"
    file = picture(folder / f"outputs/{name}{suffix}", number)
    photos = [picture(folder.parent / f"photos/{n}.jpg", 1000 + n) for n in sources]
    line = {
        "custom_id": name,
        "task": "it2i" if photos else "t2i",
        "prompt": f"make it {name.split('-')[0]}",
        "model": "tiny-image",
        "seed": number,
        "metadata": {"private": "mine"},
    }
    line |= {"images": [f"../photos/{photo.name}" for photo in photos]} if photos else {}
    pixels = pixel_digest(np.asarray(Image.open(file)))
    output = {"path": f"outputs/{name}{suffix}", "sha256": sha256_of(file), "pixel_sha256": pixels}
    result = {
        "custom_id": name,
        "status": "done",
        "key": f"{number:08}" * 8,
        "outputs": [output | {"width": 8, "height": 8, "seed": number}],
        "denoise_steps": 20,
        "model_sha256": "cd" * 32,
        "metadata": line["metadata"],
    }
    if photos:
        result["source_sha256"] = list(map(sha256_of, photos))
    if "-" in name:
        of, _, index = name.rpartition("-")
        line |= {"candidate_of": of, "candidate": int(index)}
        result |= {"candidate_of": of, "candidate": int(index)}
    return line | {"result": result | more}


def answer(folder: Path, name: str, text: str | None, sources: Iterable[int] = ()) -> Line:
    """A question and its answer as one; None: the model chose none of `yes` and `no`."""
    photos = [picture(folder.parent / f"photos/{n}.jpg", 1000 + n) for n in sources]
    file = folder / f"outputs/{name}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n" if text else "")
    line: Line = {"custom_id": name, "task": "i2t" if photos else "t2t", "prompt": "what is it?"}
    line |= {"model": "tiny-image", "images": [f"../photos/{photo.name}" for photo in photos]}
    told: Line = {"answer": text, "finish": "stop", "thought": "A thought."}
    told |= {"confidence": {"logprob": -0.5, "tokens": 3}}
    if text in ("yes", None):
        line["choices"] = ["yes", "no"]
        told = {"mass": 0.75} | (
            {"answer": text, "choices": {"yes": 0.9, "no": 0.1}} if text else {}
        )
    output = {"path": f"outputs/{name}.txt", "sha256": sha256_of(file)}
    result = {"custom_id": name, "status": "done", "key": f"{name:0<64}", "outputs": [output]}
    result |= {"model_sha256": "cd" * 32, "source_sha256": list(map(sha256_of, photos))}
    return line | {"result": result | told}


def write_run(folder: Path, jobs: Sequence[Line]) -> Path:
    lines = [{k: v for k, v in one.items() if k != "result"} for one in jobs]
    files = {"results.jsonl": [one["result"] for one in jobs], "manifest.resolved.jsonl": lines}
    folder.mkdir(parents=True, exist_ok=True)
    for name, entries in files.items():
        write_lines(folder / name, entries)
    (folder / "run.json").write_text("{}")
    return folder


def write_lines(path: Path, entries: Iterable[Line]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in entries))


def lone_jobs(folder: Path) -> Path:
    """A run of twelve jobs of mixed kinds, two for each of the ids."""
    jobs = [
        job(folder, f"{name}{more}", n, [n, n + 1][:more] if n % 3 else [])
        for n, (name, more) in enumerate((name, more) for name in IDS for more in (1, 2))
    ]
    return write_run(folder, jobs)


def candidates(folder: Path, lines: int = 6, count: int = 4) -> Path:
    """A run of several candidates of each line, of which `pick` kept the third: the others are
    rejected by a gate, or are of a lower rank; the last one was not scored.
    """
    jobs, picks = [], []
    for n in range(lines):
        ids = [f"line{n}-{index}" for index in range(count)]
        jobs += [job(folder, name, 10 * n + i, [n]) for i, name in enumerate(ids)]
        values = {"judge": 7, "judge.follows": 8.5}
        ranked = [{"custom_id": ids[i], "rank": r, "values": values} for r, i in ((1, 2), (2, 1))]
        rejected = [
            {"custom_id": ids[0], "reasons": ["judge.follows 5 < 7"], "values": {"judge": 5.5}},
            {"custom_id": ids[3], "reasons": ["not scored: judge: timed out"], "values": {}},
        ]
        rule = {"min": {"judge.follows": 7}, "max": {}, "keep": 1}
        scorer = {"name": "judge", "version": "1", "licence": "apache-2.0", "range": [0, 10]}
        picks.append(
            {"candidate_of": f"line{n}", "picked": [ids[2]], "missing": [], "chosen_by": "rule"}
            | {
                "ranking": ranked,
                "rejected": rejected,
                "rule": rule | {"scorers": {"judge": scorer}},
            }
        )
    write_run(folder, jobs)
    write_lines(folder / "picks.jsonl", picks)
    return folder
