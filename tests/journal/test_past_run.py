"""The jobs of a finished, stopped, changed or damaged run."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli import past_jobs
from hyimg_cli.errors import OutputFolderError


def write(folder: Path, lines: list[Any], results: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "manifest.resolved.jsonl").write_text("".join(f"{text}\n" for text in texts))
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in results))
    return folder


def line(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "prompt": f"a {custom_id}", "images": ["../in.png"]}


def result(custom_id: str, status: str = "done", **facts: Any) -> dict[str, Any]:
    output = {"path": f"outputs/{custom_id}.png", "sha256": "0" * 64}
    return {"custom_id": custom_id, "status": status, "outputs": [output]} | facts


def test_jobs_have_their_line_and_last_result_in_the_manifests_order(tmp_path: Path) -> None:
    lines = [line(name) for name in ("b", "a", "waits", "failed")]
    results = [result("a", "failed"), result("gone"), result("failed", "failed"), result("a")]
    found = list(past_jobs(write(tmp_path / "out", lines, [*results, result("b")])))
    assert [one.custom_id for one in found] == ["b", "a", "waits", "failed", "gone"]
    assert [one.is_done for one in found] == [True, True, False, False, True]
    assert [len(one.outputs) for one in found] == [1, 1, 0, 0, 1]
    assert [bool(one.result) for one in found] == [True, True, False, True, True]
    assert (found[0].line["prompt"], found[-1].line) == ("a b", {})
    assert {one.folder for one in found} == {tmp_path / "out"}


def test_lines_before_a_damaged_one_are_read(tmp_path: Path) -> None:
    jobs = past_jobs(write(tmp_path / "out", [line("a"), "{", line("b")], []))
    assert next(jobs).custom_id == "a"
    with pytest.raises(OutputFolderError, match="cannot be read"):
        next(jobs)


def test_results_that_name_files_elsewhere_are_refused(tmp_path: Path) -> None:
    bad = [{"path": "../x.png", "sha256": "0" * 64}]
    jobs = past_jobs(write(tmp_path / "out", [line("a")], [result("a", outputs=bad)]))
    with pytest.raises(OutputFolderError, match="outputs is"):
        next(jobs)


def test_a_folder_without_a_run_has_no_jobs(tmp_path: Path) -> None:
    assert list(past_jobs(tmp_path)) == []
