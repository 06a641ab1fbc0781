"""Answers of several processes, in a bucket, and merged; and their files, read back."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from store_server import addresses_at, s3_endpoint

from hyimg_cli import remote

Run = Callable[..., Any]
FACTS = ("key", "answer", "answer_token_ids", "finish", "choices", "mass", "confidence")


def lines_of(out: Path) -> dict[str, Any]:
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: {fact: line.get(fact) for fact in FACTS} for line in lines}


def asked(picture: str) -> list[dict[str, Any]]:
    """Questions about a picture, one with choices, a text, and a drawing among them."""
    about = {"task": "i2t", "images": [picture], "max_new_tokens": 4}
    return [
        *({"custom_id": f"q{n}", "prompt": f"what is {n}?"} | about for n in range(3)),
        {"custom_id": "red", "task": "i2t", "images": [picture], "prompt": "is it red?",
         "choices": ["yes", "no"]},
        {"custom_id": "hello", "task": "t2t", "prompt": "hello", "max_new_tokens": 4},
        {"custom_id": "new", "prompt": "a red circle", "steps": 1, "bot_task": "none", "seed": 1},
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_two_replicas_answer_as_one_process(
    run_cli: Run,
    write_manifest: Callable[..., Path],
    write_picture: Callable[..., Path],
    tmp_path: Path,
) -> None:
    manifest = write_manifest(*asked(write_picture().name))
    flags = ("--no-prewarm", "--no-report", "--no-disk-cache")
    assert run_cli("generate", manifest, "-o", "alone", *flags).code == 0
    ran = run_cli("generate", manifest, "-o", "shared", "--replicas", "2", *flags)
    assert ran.code == 0, ran.err
    assert lines_of(tmp_path / "shared") == lines_of(tmp_path / "alone")
    for file in sorted((tmp_path / "alone/outputs").glob("*.txt")):
        assert (tmp_path / "shared/outputs" / file.name).read_text() == file.read_text()


@pytest.mark.thorough
def test_answers_in_a_bucket_resume_and_merge(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with s3_endpoint() as served, addresses_at(served, monkeypatch):
        system, _ = remote.locate("s3://bucket")
        Image.new("RGB", (64, 64), (200, 30, 30)).save(tmp_path / "in.png")
        system.put_file(str(tmp_path / "in.png"), "bucket/in.png")
        text = "".join(json.dumps(line) + "\n" for line in asked("in.png"))
        system.pipe_file("bucket/jobs.jsonl", text.encode())
        (tmp_path / "jobs.jsonl").write_text(text)
        words = ("generate", "s3://bucket/jobs.jsonl", "-o", "s3://bucket/run", "--no-prewarm")
        assert run_cli(*words, "--limit", "2").code == 0
        ran = run_cli(*words)
        assert (ran.code, "2 skipped" in ran.err) == (0, True), ran.err
        ran = run_cli("merge", "s3://bucket/run", "-o", "all")
        assert (ran.code, "6 done, 0 failed, 0 missing" in ran.err) == (0, True), ran.err
    assert run_cli("generate", "jobs.jsonl", "-o", "here", "--no-prewarm").code == 0
    assert lines_of(tmp_path / "all") == lines_of(tmp_path / "here")
    answer = lines_of(tmp_path / "here")["q0"]["answer"]
    assert (tmp_path / "all/outputs/q0.txt").read_text() == answer + "\n"


@pytest.mark.parametrize("command", ["info", "replay"])
def test_an_answers_file_has_no_record(run_cli: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "q.txt").write_text("a red circle\n")
    ran = run_cli(command, "q.txt")
    assert ran.code == 2
    assert "q.txt" in ran.err


def test_a_video_model_answers_nothing(
    run_cli: Run, write_manifest: Callable[..., Path], write_picture: Callable[..., Path]
) -> None:
    """`check` refuses what `generate` refuses, by its name."""
    line = {"custom_id": "q", "task": "i2t", "images": [write_picture().name], "prompt": "what?"}
    manifest = write_manifest(line | {"model": "tiny-video"})
    for words in (("check", manifest), ("generate", manifest, "-o", "out")):
        ran = run_cli(*words)
        assert ran.code == 2, ran.err
        assert "tiny-video" in ran.out + ran.err


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Here and in every replica: sums of several threads round otherwise than those of one."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
