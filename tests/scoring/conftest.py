"""Candidates without a model, and scorers that behave and misbehave, as files of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.scoring.candidates import Candidate
from hyimg_cli.scoring.pick import Rule

# What a scorer does is said by the prompt of the case that it is shown.
SCORERS = """
import os, sys, time

SCORERS = {
    "odd": {"version": "1", "range": [0, 10], "needs": ["prompt", "result"]},
    "blind": {"version": "1", "needs": ["prompt"], "higher_is_better": False},
    "random": {"version": "1", "needs": ["result"], "range": [0, 1]},
}


def odd(cases, options):
    print("\\x1b[31mred\\x1b[0m and loud")
    answers = [answer(case["prompt"]) for case in cases]
    return answers[1:] if any(case["prompt"] == "too few" for case in cases) else answers


def answer(prompt):
    if prompt == "raises":
        raise RuntimeError("no such thing")
    if prompt == "exits":
        os._exit(3)
    if prompt == "hangs":
        time.sleep(60)
    if prompt == "chatters":
        os.write(int(sys.argv[2]), b"not json\\n")
    return {
        "nan": float("nan"), "eleven": 11, "text": "ten", "true": True, "none": None,
        "huge": 10**400,
        "guessed": {"value": 5, "reason": "guess_if_cannot_parse"},
        "refused": {"value": None, "fault": "refused: \\x1b[2J no"},
        "part": {"value": 5, "parts": {"a": float("inf")}},
        "parts": {"value": 5, "parts": {"a": 7}, "reason": "fine"},
    }.get(prompt, 5)


def blind(cases, options):
    return [len(case["prompt"]) for case in cases]


def random(cases, options):
    return [number(case["id"]) for case in cases]


def number(name):
    # Neither in the order of the candidates nor against it.
    return int(name.rpartition("-")[2]) * 7 % 5 / 5
"""


@pytest.fixture
def scorers_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCORERS)
    return path


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[..., Candidate]:
    """A candidate `cat-N` that was drawn; `more` are fields of its result."""

    def make(number: int, of: str = "cat", prompt: str = "a cat", **more: Any) -> Candidate:
        name = f"{of}-{number}"
        line = {"custom_id": name, "candidate_of": of, "candidate": number, "prompt": prompt}
        output = {"path": f"outputs/{name}.png", "pixel_sha256": name, "sha256": name}
        result = {"custom_id": name, "status": "done", "outputs": [output]}
        return Candidate(line, result | more, tmp_path)

    return make


@pytest.fixture
def rule() -> Callable[..., Rule]:
    """A rule over scorers `a` (higher is better) and `b` (lower is)."""

    def make(**more: Any) -> Rule:
        declared = {
            name: {
                "identity": name,
                "declared": {"needs": ["result"], "higher_is_better": name != "b"},
            }
            for name in more.pop("names", ("a", "b"))
        }
        given = {"least": {}, "most": {}, "keep": 1, "audit": None} | more
        return Rule(**given, declared=declared)

    return make
