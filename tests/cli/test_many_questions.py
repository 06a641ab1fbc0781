"""Eight questions about each of twelve pictures: together, alone, in another order, after kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import studio_of
from engine.test_shared_texts import run
from PIL import Image, ImageDraw

from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import TextJob

FACTS = ("answer", "answer_token_ids", "finish", "choices", "mass")
PICTURES, QUESTIONS, KILLS = 12, 8, 20
# One of these is how the untaught model begins, so that there is a choice.
CHOICES = ["m picture", "blue"]


@pytest.fixture
def lines(tmp_path: Path) -> list[dict[str, Any]]:
    found = []
    for n in range(PICTURES):
        picture = Image.new("RGB", (64, 64), (250, 20 * n, 250))
        ImageDraw.Draw(picture).ellipse((10 + n, 12, 44 + n, 50), fill=(20 * n, 30, 200 - 9 * n))
        picture.save(tmp_path / f"p{n}.png")
        for q in range(QUESTIONS):
            line = {"custom_id": f"p{n}-q{q}", "task": "i2t", "images": [f"p{n}.png"]}
            line |= {"prompt": f"what is {q} here?"}
            line |= {"choices": CHOICES} if q % 4 == 3 else {"max_new_tokens": 16 + q}
            found.append(line)
    return found


def results(out: Path) -> dict[str, dict[str, Any]]:
    read = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in read}


def told(out: Path) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(line.get(fact) for fact in FACTS) for name, line in results(out).items()}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.thorough
def test_the_same_answers_and_each_picture_once(
    lines: list[dict[str, Any]], run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    manifest = write(tmp_path / "jobs.jsonl", lines)
    (group,) = json.loads(run_cli("plan", manifest, "--json").out)["groups"]
    assert run_cli("generate", manifest, "-o", "whole", "-q", "--no-report").code == 0
    whole = told(tmp_path / "whole")
    assert len(whole) == PICTURES * QUESTIONS
    assert len({answer for answer, *_ in whole.values()}) > PICTURES
    reuse = [line["kv_reuse"] for line in results(tmp_path / "whole").values()]
    shared = Counter(one["ar_shared_tokens"] for one in reuse)
    # Of each picture, the first question computes it; all share the four tokens before a picture.
    assert shared == {0: 1, 4: PICTURES - 1, 42: PICTURES * (QUESTIONS - 1)}
    assert group["shared_rows"] == sum(one["ar_shared_tokens"] for one in reuse)
    computed = sum(one["ar_prefill_tokens"] for one in reuse)
    assert group["prompt_rows"] == group["shared_rows"] + computed
    # In another order, a few at a time.
    mixed = random.Random(5).sample(lines, len(lines))
    other = write(tmp_path / "mixed.jsonl", mixed)
    words = ("--batching-max-size", "3", "-q", "--no-report")
    assert run_cli("generate", other, "-o", "mixed", *words).code == 0
    assert told(tmp_path / "mixed") == whole
    # Each alone, without anything that is shared.
    family = registry.load(ModelChoice(registry.EMBEDDED, device="cpu"))
    jobs = [job for job in jobs_of(manifest) if isinstance(job, TextJob)]
    for job in jobs:
        (end,) = run([replace(job, custom_id="alone")], studio_of(family), 1).values()
        answer, ids, finish, shares, _ = whole[job.custom_id]
        assert (end.answer.text, list(end.answer.ids)) == (answer, ids), job.custom_id
        if end.choice:
            assert {text: round(p, 6) for text, p in end.choice.shares.items()} == shares
        else:
            assert end.answer.finish == finish


def jobs_of(manifest: Path) -> Any:
    from hyimg_cli.engine import runner
    from hyimg_cli.manifest.manifest import read_manifest
    from hyimg_cli.settings.config import settle

    return runner.accept(read_manifest(manifest), settle({}, {}, {}))[0]


@pytest.mark.thorough
def test_the_same_answers_after_kills(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path / "jobs.jsonl", lines)

    def start(out: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "hyimg_cli", "generate", "jobs.jsonl", "-o", out, "-q"]
        words += ["--batching-max-size", "2", "--no-report", "--no-prewarm"]
        return subprocess.Popen(words, cwd=tmp_path, start_new_session=True)

    assert start("whole").wait(600) == 0
    kills, file = 0, tmp_path / "out/results.jsonl"
    while kills < KILLS:
        before = len(file.read_bytes().splitlines()) if file.exists() else 0
        process = start("out")
        while process.poll() is None:
            time.sleep(0.01)
            # While a batch is at work, or its lines are being written.
            if file.exists() and len(file.read_bytes().splitlines()) > before + kills % 3:
                os.killpg(process.pid, signal.SIGKILL)
                break
        if process.wait() == 0:
            break
        kills += 1
    assert kills == KILLS
    assert start("out").wait(600) == 0
    names = Counter(json.loads(line)["custom_id"] for line in file.read_text().splitlines())
    assert len(names) == PICTURES * QUESTIONS
    assert set(names.values()) == {1}
    assert told(tmp_path / "out") == told(tmp_path / "whole")
