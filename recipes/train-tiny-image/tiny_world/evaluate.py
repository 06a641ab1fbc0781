"""Measure a checkpoint on held-out jobs with the product: `hyimg generate`, then the judge."""

import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tiny_world.captions import Edit, Wish, scene_of
from tiny_world.draw import no_jitter, render
from tiny_world.free_words import free_edit, free_wish
from tiny_world.heldout import held_out, ordinary_prompts
from tiny_world.judge import judge
from tiny_world.sample import write_sheet
from tiny_world.scenes import FACTS, PICTURE_PX, Scene

Task = Wish | Edit
_LOOSE_SEED = 7


@dataclass(frozen=True)
class Question:
    """One job and the required content of its picture: `facts` of `wanted`."""

    custom_id: str
    kind: str
    task: Task
    bot_task: str
    wanted: Scene
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """An answer: the picture, its wrong facts, and the scene that its text states."""

    question: Question
    picture_CYX: Tensor
    wrong: tuple[str, ...]
    told: Scene | None

    @property
    def is_text_right(self) -> bool:
        """Return True if the recaption is canonical and states what was asked."""
        if self.told is None:
            return False
        facts, wanted = self.question.facts, self.question.wanted
        return all(getattr(self.told, fact) == getattr(wanted, fact) for fact in facts)


def questions(count: int) -> list[Question]:
    """Return up to `count` held-out jobs of a kind, plain and loose, with and without text."""
    lists = held_out()
    plain = ordinary_prompts()
    every = max(1, len(plain) // count)
    rng = random.Random(_LOOSE_SEED)
    loose = [free_wish(rng, wish.scene) for wish in lists.prompts[:count]]
    loose_edits = [free_edit(rng, edit) for edit in lists.edits[:count]]
    groups: list[tuple[str, str, Sequence[Task]]] = [
        ("new", "think_recaption", lists.prompts[:count]),
        ("new-recaption", "recaption", lists.prompts[-(count // 2) :]),
        ("new-direct", "none", lists.prompts[: count // 2]),
        ("plain", "think_recaption", plain[::every][:count]),
        ("edit", "think_recaption", lists.edits[:count]),
        ("edit-recaption", "recaption", lists.edits[-(count // 2) :]),
        ("edit-direct", "none", lists.edits[: count // 2]),
        ("loose", "think_recaption", loose),
        ("loose-edit", "think_recaption", loose_edits),
    ]
    return [
        _question(f"{kind}-{number:03d}", kind, task, bot_task)
        for kind, bot_task, tasks in groups
        for number, task in enumerate(tasks)
    ]


def answers(
    checkpoint: Path, asked: Sequence[Question], folder: Path, *, workers: int = 1
) -> list[Answer]:
    """Answer every question with `hyimg generate`; resumes an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [(asked[n::workers], folder / f"part-{n}") for n in range(workers)]
    running = [_generating(checkpoint, part, place) for part, place in parts if part]
    codes = [process.wait() for process in running]
    # 1: some jobs failed; they count as wrong.
    assert set(codes) <= {0, 1}, f"hyimg generate ended with {codes}"
    return [answer for part, place in parts if part for answer in _collected(part, place)]


def rates(given: Iterable[Answer]) -> dict[str, dict[str, float]]:
    """Return rates by kind, and for edits by what they change.

    Number, share right, share by fact, share of right texts.
    """
    by_kind: dict[str, list[Answer]] = defaultdict(list)
    for answer in given:
        question = answer.question
        by_kind[question.kind].append(answer)
        if isinstance(question.task, Edit):
            by_kind[f"{question.kind}:{question.task.facts[0]}"].append(answer)
    return {kind: _rates_of(group) for kind, group in by_kind.items()}


def write_failures(given: Iterable[Answer], file: Path, *, limit: int = 96) -> None:
    """Write a contact sheet of wrong pictures; nothing if there are none."""
    wrong = [answer.picture_CYX for answer in given if answer.wrong][:limit]
    file.unlink(missing_ok=True)
    if wrong:
        write_sheet(torch.stack(wrong), file)


def _question(custom_id: str, kind: str, task: Task, bot_task: str) -> Question:
    wanted, facts = task.demand
    return Question(custom_id, kind, task, bot_task, wanted, facts)


def _generating(
    checkpoint: Path, asked: Sequence[Question], folder: Path
) -> subprocess.Popen[bytes]:
    """Run the product on some questions, on one thread."""
    folder.mkdir(exist_ok=True)
    manifest = folder / "heldout.jsonl"
    manifest.write_text("".join(_line(q, folder) for q in asked), encoding="utf-8")
    command = [sys.executable, "-m", "hyimg_cli", "generate", str(manifest)]
    command += ["-o", str(folder / "out"), "--model", str(checkpoint), "--progress", "none"]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _collected(asked: Sequence[Question], folder: Path) -> list[Answer]:
    lines = (folder / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {line["custom_id"]: line for line in map(json.loads, lines)}
    return [_answer(q, results[q.custom_id], folder / "out") for q in asked]


def _line(question: Question, folder: Path) -> str:
    job = {
        "custom_id": question.custom_id,
        "task": "t2i",
        "prompt": question.task.text,
        "seed": sum(question.custom_id.encode()),
        "bot_task": question.bot_task,
    }
    if isinstance(question.task, Edit):
        name = f"{question.custom_id}.png"
        picture_CYX = render([question.task.source], no_jitter(1))[0]
        Image.fromarray(picture_CYX.permute(1, 2, 0).numpy()).save(folder / name)
        job |= {"task": "it2i", "images": [name]}
    return json.dumps(job) + "\n"


def _answer(question: Question, result: dict[str, object], folder: Path) -> Answer:
    if result["status"] != "done":
        blank = torch.zeros(3, PICTURE_PX, PICTURE_PX, dtype=torch.uint8)
        return Answer(question, blank, question.facts, None)
    outputs: list[dict[str, str]] = result["outputs"]  # type: ignore[assignment]
    pixels = np.array(Image.open(folder / outputs[0]["path"]).convert("RGB"))
    picture_CYX = torch.from_numpy(pixels).permute(2, 0, 1)
    wrong = judge(picture_CYX).wrong(question.wanted, question.facts)
    return Answer(question, picture_CYX, wrong, _told(str(result.get("cot_text") or "")))


def _told(cot_text: str) -> Scene | None:
    _, _, after = cot_text.partition("<recaption>")
    return scene_of(after.partition("</recaption>")[0])


def _rates_of(group: Sequence[Answer]) -> dict[str, float]:
    asked = {fact: [a for a in group if fact in a.question.facts] for fact in FACTS}
    facts = {f: _share(f not in a.wrong for a in some) for f, some in asked.items() if some}
    is_written = group[0].question.bot_task != "none"
    text = {"text": _share(a.is_text_right for a in group)} if is_written else {}
    return {"n": len(group), "right": _share(not a.wrong for a in group)} | text | facts


def _share(truths: Iterable[bool]) -> float:
    values = list(truths)
    return round(sum(values) / len(values), 4)
