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
    (tmp_path / "picks.jsonl").write_text(json.dumps(LINE) + "\n")
    found = shown_picks(tmp_path)
    assert found["scorers"] == {"a": False}
    why = ["picked by a person", "rank 1 of 2", "a 3 < 5"]
    picked = {"line": "cat", "state": "picked", "why": why, "values": {"a": 4.0}}
    assert found["jobs"]["cat-1"] == picked
    assert shown_picks(tmp_path / "drafts")["jobs"]["cat-1"] == picked | {"values": {"a": 3.0}}
    assert (found["jobs"]["cat-0"]["state"], found["jobs"]["cat-2"]["state"]) == (
        "ranked",
        "rejected",
    )
