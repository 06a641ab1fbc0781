"""Lines that ask for a text, from the command line: files, resume, the plan, the page, refusals."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from questions import question

from hyimg_cli.errors import JobError
from hyimg_cli.models.hunyuan_image3.prompter import Prompter

CHECKPOINT = Path(__file__).parents[1] / "parity" / "tiny" / "checkpoint"
TOY = "tiny-image is a toy that was not taught to answer questions"


def lines_of(out: Path) -> dict[str, Any]:
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in lines}


@pytest.fixture
def manifest(write_manifest: Callable[..., Path], write_picture: Callable[..., Path]) -> Path:
    picture = write_picture().name
    asked = {"task": "i2t", "images": [picture], "max_new_tokens": 5}
    return write_manifest(
        *({"custom_id": f"q{n}", "prompt": f"what is {n}?"} | asked for n in range(8)),
        {"custom_id": "new", "prompt": "a red circle", "num_inference_steps": 2, "seed": 1},
        {"custom_id": "hello", "task": "t2t", "prompt": "hello", "max_new_tokens": 4},
    )


def test_answers_are_files_and_lines_beside_pictures(
    manifest: Path, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    told = run_cli("plan", manifest, "--json")
    groups = json.loads(told.out)["groups"]
    assert [group["size_class"] for group in groups] == ["text", "auto"]
    assert run_cli("generate", manifest, "-o", "out").code == 0
    lines = lines_of(tmp_path / "out")
    answers = {name: line for name, line in lines.items() if name != "new"}
    reuse = [line["kv_reuse"] for line in answers.values()]
    shared = sum(one["ar_shared_tokens"] for one in reuse)
    assert groups[0]["shared_rows"] == shared == 7 * 42
    assert groups[0]["prompt_rows"] == shared + sum(one["ar_prefill_tokens"] for one in reuse)
    for name, line in answers.items():
        (file,) = line["outputs"]
        assert file["path"] == f"outputs/{name}.txt"
        assert (tmp_path / "out" / file["path"]).read_text() == line["answer"] + "\n"
        assert line["finish"] == "length"
        assert TOY in line["warnings"]
        assert line["cot_text"] is None
    assert "answer" not in lines["new"]
    data = "".join(part.read_text() for part in (tmp_path / "out/report").glob("*.js"))
    assert json.dumps(lines["hello"]["answer"])[1:-1] in data
    # Nothing is asked again; a changed question is refused, and asked with --force.
    assert "10 skipped" in run_cli("generate", manifest, "-o", "out").err
    manifest.write_text(manifest.read_text().replace("what is 3?", "what is three?"))
    refused = run_cli("generate", manifest, "-o", "out")
    assert (refused.code, "error[output.other-job]" in refused.err) == (2, True)
    assert run_cli("generate", manifest, "-o", "out", "--force").code == 0
    again = lines_of(tmp_path / "out")
    assert again["q3"]["key"] != lines["q3"]["key"]
    (tmp_path / "out/outputs/q1.txt").write_text("changed")
    told = run_cli("info", "out/outputs/q1.txt")
    assert (told.code, "the answer was changed after it was written" in told.err) == (2, True)
    assert "1 done" in run_cli("generate", manifest, "-o", "out").err
    read_back(run_cli, tmp_path, again["hello"])


def read_back(run_cli: Callable[..., Any], tmp_path: Path, hello: dict[str, Any]) -> None:
    """`info` and `replay` of an answer, and two runs whose answers differ."""
    told = run_cli("info", "out/outputs/hello.txt", "--json")
    record = json.loads(told.out)["record"]
    assert record["job"]["prompt"] == "hello"
    assert record["settings"]["dtype"] == "float32"
    for name in ("answer", "answer_token_ids", "finish", "confidence"):
        assert record[name] == hello[name]
    assert "confidence: {logprob:.2f}, 4 tokens".format_map(hello["confidence"]) in run_cli(
        "info", "out/outputs/hello.txt"
    ).out  # fmt: skip
    replayed = ("replay", "out/outputs/hello.txt", "--expect-equal", "-o")
    ran = run_cli(*replayed, "again")
    assert (ran.code, "equal: the characters of" in ran.err) == (0, True), ran.err
    # A run that recorded another answer, which is not the one that the model gives.
    results, file = tmp_path / "out/results.jsonl", tmp_path / "out/outputs/hello.txt"
    lines = lines_of(tmp_path / "out")
    file.write_text("goodbye\n")
    lines["hello"]["answer"] = "goodbye"
    lines["hello"]["outputs"][0]["sha256"] = hashlib.sha256(b"goodbye\n").hexdigest()
    results.write_text("".join(json.dumps(one) + "\n" for one in lines.values()))
    ran = run_cli(*replayed, "other")
    assert (ran.code, f'"goodbye", now {json.dumps(hello["answer"])}' in ran.err) == (1, True)
    ran = run_cli("diff", "out", "again")
    assert (ran.code, "hello: answer " in ran.out) == (1, True), ran.out
    ran = run_cli("eval", "psnr", "out", "out")
    assert (ran.code, "hello" in ran.out) == (0, False), ran.err


def test_what_asks_for_no_drawing_is_refused_where_a_drawing_is(
    manifest: Path, run_cli: Callable[..., Any]
) -> None:
    told = run_cli("think", manifest, "-o", "texts.jsonl")
    assert (told.code, "error[usage.answers]" in told.err) == (2, True)
    base = Prompter(CHECKPOINT, "base")
    vars(base)["arch"] = SimpleNamespace(is_base=True)
    with pytest.raises(JobError) as caught:
        base.check(question("q", "what?"))
    assert caught.value.code == "job.no-text"


@pytest.mark.thorough
def test_a_killed_run_asks_nothing_twice(
    write_manifest: Callable[..., Path], write_picture: Callable[..., Path], tmp_path: Path
) -> None:
    """But what was in flight; the answers are those of an undisturbed run."""
    picture = write_picture().name
    asked = {"task": "i2t", "images": [picture], "max_new_tokens": 30}
    lines = ({"custom_id": f"q{n}", "prompt": f"what is {n}?"} | asked for n in range(200))
    manifest = write_manifest(*lines)

    def start(out: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "hyimg_cli", "generate", manifest.name, "-o", out]
        return subprocess.Popen(
            [*words, "--batching-max-size", "8", "-q"], cwd=tmp_path, start_new_session=True
        )

    assert start("whole").wait(300) == 0
    kills = 0
    while kills < 20:
        process, results = start("out"), tmp_path / "out/results.jsonl"
        before = len(results.read_bytes().splitlines()) if results.exists() else 0
        while process.poll() is None:
            time.sleep(0.02)
            now = len(results.read_bytes().splitlines()) if results.exists() else 0
            if now > before + 4:
                os.killpg(process.pid, signal.SIGKILL)
                break
        kills += process.wait() != 0
        if process.returncode == 0:
            break
    assert kills > 3
    assert start("out").wait(300) == 0
    counts = Counter(
        json.loads(line)["custom_id"]
        for line in (tmp_path / "out/results.jsonl").read_text().splitlines()
    )
    assert len(counts) == 200
    assert set(counts.values()) == {1}
    answers = [
        {n: x["answer"] for n, x in lines_of(tmp_path / o).items()} for o in ("out", "whole")
    ]
    assert answers[0] == answers[1]
