"""Measure a checkpoint on films made by `hyimg generate` and read by the judge."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tiny_films.captions import plain_prompt, random_prompt
from tiny_films.judge import Verdict, judge
from tiny_films.sample import write_sheet
from tiny_films.world import FACTS, HELD_OUT, TRAINABLE, Scene

_SEED = 11


@dataclass(frozen=True)
class Question:
    """One job, and the scene that its film must show."""

    custom_id: str
    kind: str
    prompt: str
    wanted: Scene


@dataclass(frozen=True)
class Answer:
    """The film that was made, uint8 [T, 3, H, W], what it shows, and what is wrong."""

    question: Question
    film_TCHW: Tensor
    verdict: Verdict
    wrong: tuple[str, ...]


def questions(count: int) -> list[Question]:
    """Return up to `count` of a kind: held-out scenes, plain and loose, and trained ones."""
    rng = random.Random(_SEED)
    kinds = [
        ("held-out", HELD_OUT, plain_prompt),
        ("held-out-worded", HELD_OUT, lambda scene: random_prompt(rng, scene)),
        ("seen", tuple(rng.sample(TRAINABLE, len(TRAINABLE))), plain_prompt),
    ]
    return [
        Question(f"{kind}-{number:03d}", kind, worded(scenes[number % len(scenes)]),
                 scenes[number % len(scenes)])
        for kind, scenes, worded in kinds
        for number in range(count)
    ]  # fmt: skip


def answers(checkpoint: Path, asked: Sequence[Question], folder: Path) -> list[Answer]:
    """Answer every question; resumes an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "jobs.jsonl"
    manifest.write_text("".join(_line(question) for question in asked), encoding="utf-8")
    command = [sys.executable, "-m", "hyimg_cli", "generate", str(manifest)]
    command += ["-o", str(folder / "out"), "--video-model", str(checkpoint)]
    command += ["--frames", "png", "--progress", "none", "--no-report"]
    code = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    ).returncode
    assert code == 0, f"hyimg generate ended with {code}"
    lines = (folder / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {line["custom_id"]: line for line in map(json.loads, lines)}
    return [_answer(question, results[question.custom_id], folder / "out") for question in asked]


def rates(given: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Return rates by kind: number, number right in everything, and number right by fact."""
    kinds = dict.fromkeys(answer.question.kind for answer in given)
    return {kind: _rates([a for a in given if a.question.kind == kind]) for kind in kinds}


def write_failures(given: Sequence[Answer], file: Path, *, limit: int = 48) -> None:
    """Write a contact sheet of wrong films; no file if there are none."""
    wrong = [answer.film_TCHW for answer in given if answer.wrong][:limit]
    file.unlink(missing_ok=True)
    if wrong:
        write_sheet(torch.stack(wrong), file)


def _rates(group: Sequence[Answer]) -> dict[str, float]:
    facts = {fact: sum(fact not in answer.wrong for answer in group) for fact in FACTS}
    return {"n": len(group), "right": sum(not answer.wrong for answer in group)} | facts


def _line(question: Question) -> str:
    job = {
        "custom_id": question.custom_id,
        "task": "t2v",
        "prompt": question.prompt,
        "seed": sum(question.custom_id.encode()),
    }
    return json.dumps(job) + "\n"


def _answer(question: Question, result: dict[str, Any], folder: Path) -> Answer:
    film_TCHW = read_film(folder / result["outputs"][0]["frames_path"])
    verdict = judge(film_TCHW)
    return Answer(question, film_TCHW, verdict, verdict.wrong(question.wanted))


def read_film(frames_folder: Path) -> Tensor:
    """Read the frames that `--frames png` wrote next to a film, uint8 [T, 3, H, W]."""
    files = sorted(frames_folder.glob("*.png"))
    frames = [np.array(Image.open(file).convert("RGB")) for file in files]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
