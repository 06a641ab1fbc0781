"""Candidates without a model, and scorers that behave and misbehave, as files of their own."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.journal.candidates import Candidate
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


class Scalar:
    # As numpy and torch have them.
    def __init__(self, value):
        self.value = value

    def item(self):
        if isinstance(self.value, list):
            raise RuntimeError("a tensor with 2 elements cannot be converted to a scalar")
        return self.value


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
        "array": Scalar(5), "bad array": Scalar([5, 6]), "truth array": Scalar(True),
        "nan": float("nan"), "eleven": 11, "text": "ten", "true": True, "none": None,
        "huge": 10**400,
        "guessed": {"value": 5, "reason": "guess_if_cannot_parse"},
        "refused": {"value": None, "fault": "refused: \\x1b[2J no"},
        "part": {"value": 5, "parts": {"a": float("inf")}},
        "parts": {"value": Scalar(5.0), "parts": {"a": Scalar(7)}, "reason": "fine"},
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
        given = {"least": {}, "most": {}, "keep": 1} | more
        return Rule(**given, declared=declared)

    return make


GOOD = '{"follows": 8, "preserves": 7, "quality": 9, "reason": "red"}'


class Endpoint(ThreadingHTTPServer):
    """Answers each request by what its prompt asks for; `asked`: the requests by prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self.headers: list[dict[str, str]] = []
        # What it says that it is, and how long it thinks about the prompt "slow".
        self.model, self.slow_s = "qwen-2026-01", 0.0
        # Ends that thinking.
        self.has_thought = threading.Event()
        # Seconds before each answer.
        self.every_s = 0.0
        # From which call on it is another model, and which.
        self.renamed: tuple[int, str] | None = None
        self._count, self._lock = 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def model_now(self) -> str:
        """Count a call, and return what it says that it is."""
        with self._lock:
            self._count += 1
            is_renamed = self.renamed is not None and self._count > self.renamed[0]
        return self.renamed[1] if is_renamed and self.renamed else self.model


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][1]["content"][0]["text"].removeprefix("Instruction: ")
        before = self.server.asked.setdefault(prompt, [])
        before.append(body)
        self.server.headers.append(dict(self.headers))
        status, _, count = prompt.partition(" x")
        code = int(status) if status.isdecimal() and len(before) <= int(count or 99) else 200
        text = {
            "chatter": f"Well. {GOOD} Is that all?",
            "prose": "It is fine.",
            "eleven": "11",
            "lacking": '{"follows": 8}',
        }.get(prompt, GOOD.replace("8", "11") if prompt == "out of range" else GOOD)
        choice: dict[str, Any] = {"message": {"content": text}}
        if prompt == "refuses":
            choice = {"message": {"content": None, "refusal": "I cannot"}}
        if prompt == "filtered":
            choice = {"message": {"content": ""}, "finish_reason": "content_filter"}
        answer = {
            "choices": [choice],
            "model": self.server.model_now(),
            "system_fingerprint": "fp_1",
        }
        if prompt == "400 jailbreak":
            code, answer = 400, {"error": {"code": "content_filter", "message": "jailbreak"}}
        if prompt == "slow":
            self.server.has_thought.wait(self.server.slow_s)
        else:
            time.sleep(self.server.every_s)
        with suppress(OSError):
            self.send_response(code)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(b"<html>" if prompt == "html" else json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
