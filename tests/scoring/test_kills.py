"""Runs of candidates, killed anywhere again and again: nothing is lost, nothing done twice."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.picks import read_picks
from hyimg_cli.scoring.candidates import BATCH

SCORE_KILLS, RUN_KILLS = 50, 15
SLOW = """
import os, time
SCORERS = {"slow": {"needs": ["text"], "version": "1"}}


def slow(cases, options):
    for case in cases:
        with open("asked.log", "a") as log:
            log.write(case["id"] + "\\n")
        time.sleep(0.004)
    return [len(case["text"]) for case in cases]
"""
DRAW = {"num_inference_steps": 4, "max_new_tokens": 24, "n": 3}


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hyimg_cli", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, **quiet)  # type: ignore[call-overload, no-any-return]


def runners(folder: Path) -> list[str]:
    """Scorers' processes that work in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
            if (
                any(word.endswith("runner.py") for word in words)
                and place.joinpath("cwd").resolve() == folder
            ):
                found.append(place.name)
        except OSError:
            continue
    return found


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_killed_score_asks_again_at_most_its_batch(tmp_path: Path) -> None:
    rng, count = random.Random(1), 1500
    (tmp_path / "slow.py").write_text(SLOW)
    texts = tmp_path / "texts.jsonl"
    lines = [{"custom_id": f"t-{n}", "prompt": "a", "cot_text": f"text {n}"} for n in range(count)]
    texts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words, scores = (
        ("score", "texts.jsonl", "--score", "slow.py:slow"),
        tmp_path / "texts.scores.jsonl",
    )
    killed = 0
    for _ in range(SCORE_KILLS):
        before = len(scores.read_bytes()) if scores.exists() else 0
        more = rng.randint(1, 24 * 240)
        with start(tmp_path, *words) as process:
            while (
                process.poll() is None
                and (scores.stat().st_size if scores.exists() else 0) < before + more
            ):
                time.sleep(0.001)
            killed += process.poll() is None
            process.send_signal(signal.SIGKILL)
    time.sleep(1)
    assert not runners(tmp_path)
    with start(tmp_path, *words) as process:
        assert process.wait() == 0
    found = [json.loads(line) for line in scores.read_text().splitlines()]
    keys = Counter(line["key"] for line in found if "key" in line)
    assert (len(keys), max(keys.values())) == (count, 1)
    asked = Counter((tmp_path / "asked.log").read_text().split())
    again = sum(asked.values()) - count
    said = f"{killed} kills while it scored, {len(keys)} scores, {again} asked again\n"
    sys.stdout.write(said)
    assert asked.keys() == {f"t-{n}" for n in range(count)}
    assert again <= killed * BATCH


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("replicas", [1, 2])
def test_killed_drafts_and_finals_are_those_of_a_plain_run(
    tmp_path: Path, scorers_file: Path, replicas: int
) -> None:
    rng = random.Random(replicas)
    lines = [
        {"custom_id": f"job-{n}", "prompt": f"a {c} circle", "bot_task": "recaption", **DRAW}
        for n, c in enumerate(("red", "blue", "green"))
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with start(tmp_path, "generate", "jobs.jsonl", "-o", "plain") as process:
        assert process.wait() == 0
    words = (
        "generate",
        "jobs.jsonl",
        "--replicas",
        str(replicas),
        "--draft-steps",
        "2",
    )
    words += ("--score", "mine.py:random", "--score", "text", "--pick", "2")
    with start(tmp_path, *words, "-o", "whole") as process:
        assert process.wait() == 0
    files = ("drafts/results.jsonl", "scores.jsonl", "results.jsonl")

    def lines_of(folder: Path) -> int:
        paths = [folder / name for name in files]
        paths += [*folder.glob("pieces/*.jsonl"), *folder.glob("drafts/pieces/*.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    killed = runs = 0
    while killed < RUN_KILLS:
        out = tmp_path / f"out-{runs}"
        until = lines_of(out) + rng.randint(1, 3)
        with start(tmp_path, *words, "-o", out.name) as process:
            while process.poll() is None and lines_of(out) < until:
                time.sleep(0.005)
            # Somewhere behind that line: in a batch, at a scorer, or while a model is loaded.
            try:
                process.wait(rng.choice((0, 0, 0.5, 2)))
                runs += 1
            except subprocess.TimeoutExpired:
                killed += 1
            process.send_signal(signal.SIGKILL)
    with start(tmp_path, *words, "-o", out.name) as process:
        assert process.wait() == 0
    sys.stdout.write(f"{killed} kills, replicas {replicas}, {runs} runs ended before\n")
    plain, drawn, whole = (
        {
            name: line["outputs"][0]["pixel_sha256"]
            for name, line in RunFolder(folder).results().items()
        }
        for folder in (tmp_path / "plain", out, tmp_path / "whole")
    )
    assert drawn == whole
    assert len(drawn) == 6
    assert drawn.items() <= plain.items()
    picks, expected = read_picks(out), read_picks(tmp_path / "whole")
    assert [json.dumps(picks[name]) for name in expected] == [*map(json.dumps, expected.values())]
    keys = [json.loads(line).get("key") for line in (out / "scores.jsonl").read_text().splitlines()]
    assert max(Counter(filter(None, keys)).values()) == 1


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_killed_judge_asks_for_nothing_that_was_answered(endpoint: Any, tmp_path: Path) -> None:
    """The stand-in counts what it is asked: a request that is under way as hyimg is killed is
    waited for by the judge's process, and the next run records its reply.
    """
    rng, kills, repeats = random.Random(2), 20, 3
    jobs = [{"custom_id": f"job-{n}", "prompt": f"number {n}"} for n in range(60)]
    out = made_run(tmp_path / "out", [job | {"colour": (n, 0, 0)} for n, job in enumerate(jobs)])
    endpoint.every_s = 0.2
    words = ("score", "out", "--score", "judge:m", "--judge-url", endpoint.url)
    words += ("--repeat", str(repeats), "-q")
    scores, killed = out / "scores.jsonl", 0
    for _ in range(kills):
        before = scores.stat().st_size if scores.exists() else 0
        with start(tmp_path, *words) as process:
            until = before + rng.randint(1, 2500)
            while process.poll() is None and (not scores.exists() or scores.stat().st_size < until):
                time.sleep(0.001)
            killed += process.poll() is None
            process.send_signal(signal.SIGKILL)
    with start(tmp_path, *words) as process:
        assert process.wait() == 0
    found = [json.loads(line) for line in scores.read_text().splitlines()]
    keys = Counter(line["key"] for line in found if "key" in line)
    assert (len(keys), max(keys.values())) == (len(jobs) * repeats, 1)
    asked = {prompt: len(bodies) for prompt, bodies in endpoint.asked.items()}
    sys.stdout.write(f"{killed} kills, {sum(asked.values())} asked for {len(keys)} scores\n")
    assert killed >= kills // 2
    assert asked == {job["prompt"]: repeats for job in jobs}
    assert not [*out.glob(".*.replies")]


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_drawing_that_is_killed_asks_a_judge_for_nothing_twice(
    endpoint: Any, tmp_path: Path
) -> None:
    """Of `generate --repeat`: each candidate that was drawn has each of its scores, asked once."""
    rng, kills, repeats, candidates = random.Random(3), 20, 3, DRAW["n"]
    lines = [{"custom_id": f"job-{n}", "prompt": f"number {n}", **DRAW} for n in range(12)]
    (tmp_path / "jobs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ("generate", "jobs.jsonl", "-o", "out", "--no-report", "-q")
    words += ("--score", "judge:m", "--judge-url", endpoint.url, "--repeat", str(repeats))
    endpoint.every_s = 0.1
    scores, results = tmp_path / "out/scores.jsonl", tmp_path / "out/results.jsonl"

    def count() -> int:
        return sum(path.read_bytes().count(b"\n") for path in (scores, results) if path.exists())

    killed = 0
    for _ in range(kills):
        until = count() + rng.randint(1, 12)
        with start(tmp_path, *words) as process:
            while process.poll() is None and count() < until:
                time.sleep(0.005)
            killed += process.poll() is None
            process.send_signal(signal.SIGKILL)
    with start(tmp_path, *words) as process:
        assert process.wait() == 0
    drawn = [json.loads(line) for line in results.read_text().splitlines()]
    names = Counter(line["custom_id"] for line in drawn if line["status"] == "done")
    found = [json.loads(line) for line in scores.read_text().splitlines()]
    keys = Counter(line["key"] for line in found if "key" in line)
    asked = {prompt: len(bodies) for prompt, bodies in endpoint.asked.items()}
    said = f"{killed} kills, {len(names)} drawn, {sum(asked.values())} asked for {len(keys)} scores"
    sys.stdout.write(f"{said}\n")
    assert (len(names), max(names.values())) == (len(lines) * candidates, 1)
    assert (len(keys), max(keys.values())) == (len(lines) * candidates * repeats, 1)
    assert asked == {line["prompt"]: candidates * repeats for line in lines}
    assert killed >= kills // 2
