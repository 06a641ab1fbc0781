"""Picks on the page: each candidate's line, values, and the reason for its rank."""

import json
from pathlib import Path

from hyimg_cli.report.picks import shown_picks

LINE = {
    "candidate_of": "cat",
    "picked": ["cat-1"],
    "chosen_by": "person",
    "ranking": [
        {"custom_id": "cat-1", "rank": 1, "values": {"a": 3.0}, "final_values": {"a": 4.0}}
        | {"overruled": ["a 3 < 5"]},
        {"custom_id": "cat-0", "rank": 2, "values": {"a": 6.0}},
    ],
    "rejected": [{"custom_id": "cat-2", "values": {}, "reasons": ["failed: </script>"]}],
    "rule": {"scorers": {"a": {"higher_is_better": False}}},
}


def test_a_run_shows_its_full_pictures_values_and_its_drafts_their_own(tmp_path: Path) -> None:
    assert shown_picks(tmp_path) == {}
    (tmp_path / "drafts").mkdir()
    (tmp_path / "candidates.jsonl").touch()
    (tmp_path / "picks.jsonl").write_text(json.dumps(LINE) + "\n")
    found = shown_picks(tmp_path)
    assert (found["run"], shown_picks(tmp_path / "drafts")["run"]) == (".", "..")
    assert found["scorers"] == {"a": False}
    why = ["picked by a person", "rank 1 of 2", "a 3 < 5"]
    picked = {"line": "cat", "state": "picked", "why": why, "values": {"a": 4.0}}
    assert found["jobs"]["cat-1"] == picked
    assert shown_picks(tmp_path / "drafts")["jobs"]["cat-1"] == picked | {"values": {"a": 3.0}}
    assert (found["jobs"]["cat-0"]["state"], found["jobs"]["cat-2"]["state"]) == (
        "ranked",
        "rejected",
    )


def test_lines_without_an_accepted_candidate_are_named(tmp_path: Path) -> None:
    """As the exit code counts them: nothing picked, or nothing of it drawn in full."""
    lines = [LINE, LINE | {"candidate_of": "dog", "picked": []}]
    lines += [LINE | {"candidate_of": "half", "missing": ["cat-1"]}]
    lines += [LINE | {"candidate_of": "none", "picked": [], "ranking": [], "rejected": []}]
    (tmp_path / "picks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert shown_picks(tmp_path)["poor"] == ["dog", "half", "none"]


def test_a_run_in_a_folder_of_the_name_drafts_has_its_own_picks(tmp_path: Path) -> None:
    run = tmp_path / "drafts"
    run.mkdir()
    for folder, line in ((run, LINE), (tmp_path, LINE | {"candidate_of": "other"})):
        (folder / "candidates.jsonl").touch()
        (folder / "picks.jsonl").write_text(json.dumps(line) + "\n")
    assert shown_picks(run)["jobs"]["cat-0"]["line"] == "cat"
    assert shown_picks(run)["run"] == "."
