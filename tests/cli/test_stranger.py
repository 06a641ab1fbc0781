"""Files and names of others: a true message, an exit code of its own, and nothing raw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
JOB = {"prompt": "a red circle", "num_inference_steps": 1, "bot_task": "none", "seed": 1}


@pytest.mark.parametrize(
    "words",
    [
        "generate jobs.jsonl -o s3://bucket/run",
        "plan jobs.jsonl -o S3://bucket/run",
        "check jobs.jsonl -o gs://bucket",
        "generate jobs.jsonl --cache-dir file:///tmp/cache",
        "think jobs.jsonl -o s3://bucket/texts.jsonl",
        "replay a.png -o s3://bucket",
        "bench --compare kv-reuse -o hf://bucket",
        "report . --single-file -o s3://bucket/page.html",
    ],
)
def test_an_address_that_nobody_serves_makes_no_folder(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, words: str
) -> None:
    write_manifest(JOB)
    ran = run_cli(*words.split())
    assert (ran.code, "is not a place on this machine" in ran.err) == (2, True), ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]


def test_a_recipe_names_no_address_either(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text('[output]\noutput_dir = "s3://bucket/run"\n')
    ran = run_cli("plan", write_manifest(JOB), "--recipe", "recipe.toml")
    assert (ran.code, "error[recipe.not-served]" in ran.err) == (2, True), ran.err


def test_a_folder_may_be_called_like_one(run_cli: Run, write_manifest: Callable[..., Path]) -> None:
    assert run_cli("plan", write_manifest(JOB), "-o", "./s3://bucket").code == 0
