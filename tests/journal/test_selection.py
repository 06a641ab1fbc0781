"""Conditions on results: which facts a line has, and which jobs meet what is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.candidates import Candidate
from hyimg_cli.journal.selection import chosen, facts_in, selected_in

EDIT = {
    "kind": "local",
    "area": 0.25,
    "spill": 0.0,
    "halo": 3.0,
    "change": {"mean_de": 0.5},
    "gates": ["max_spill 0: …"],
}
LINES: dict[str, dict[str, Any]] = {
    "a-1": {"status": "done", "edit": EDIT, "share_s": {"total": 2.5}, "attempt": 1},
    "a-2": {"status": "failed", "error": {"code": "job.timeout"}, "attempt": 2, "warnings": []},
    "b": {"status": "done", "warnings": ["look"], "attempt": 1},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three jobs with a result, one without, and the scores of one."""
    names = (*LINES, "c")
    lines = [json.dumps({"custom_id": name, "prompt": name}) for name in names]
    (tmp_path / "manifest.resolved.jsonl").write_text("\n".join(lines) + "\n")
    output = [{"path": "outputs/b.png", "pixel_sha256": "1" * 64}]
    results = {name: {"custom_id": name, "outputs": []} | one for name, one in LINES.items()}
    results["b"]["outputs"] = output
    text = "".join(json.dumps(one) + "\n" for one in results.values())
    (tmp_path / "results.jsonl").write_text(text)
    key = Candidate({"custom_id": "b", "prompt": "b"}, results["b"], tmp_path).key("id", ["result"])
    declared = {"scorer": "text", "identity": "id", "declared": {"needs": ["result"]}}
    score = {"key": key, "scorer": "text", "value": 0.25, "parts": {"x": 7.0}, "fault": None}
    (tmp_path / "scores.jsonl").write_text(f"{json.dumps(declared)}\n{json.dumps(score)}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["status=done"], "a-1 b"),
        (["status!=done"], "a-2 c"),
        (["status=failed, left"], "a-2 c"),
        (["code=job.*"], "a-2"),
        (["kind=local"], "a-1"),
        (["kind!=local"], "a-2 b c"),
        (["outside>0.1"], "a-1"),
        (["outside>0.5"], None),
        (["outside >= 0.5"], "a-1"),
        (["area<=.25"], "a-1"),
        (["spill<0.1"], "a-1"),
        (["seam==3"], "a-1"),
        (["gates>0"], "a-1"),
        (["warnings>0"], "b"),
        (["attempt=2"], "a-2"),
        (["attempt<1"], "c"),
        (["seconds>2"], "a-1"),
        (["score.text<0.5"], "b"),
        (["score.text.x!=7"], None),
        (["a-*"], "a-1 a-2"),
        (["a-1,c"], "a-1 c"),
        (["a-*", "status=done"], "a-1"),
    ],
)
def test_each_fact_is_compared_and_a_job_without_it_is_not_taken(
    run: Path, texts: list[str], names: str | None
) -> None:
    if names is None:
        with pytest.raises(UsageError):
            selected_in(run, texts)
    else:
        assert selected_in(run, texts) == {*names.split()}


def test_failed_jobs_run_again_only_where_they_are_asked_for() -> None:
    said = {"status=failed": True, "code=*": True, "status=left": False, "status!=done": False}
    for text, retries in (said | {"outside>1": False, "cat-*": False}).items():
        assert chosen([text]).retries == retries, text


def test_a_folder_without_a_run_has_no_facts(tmp_path: Path) -> None:
    assert facts_in(tmp_path / "nothing") == {}
