"""The rule: gates with reasons, then the mean rank, ties to the lower number; a person above it."""

from collections.abc import Callable
from typing import Any

import pytest

from hyimg_cli.scoring.candidates import Candidate
from hyimg_cli.scoring.pick import Rule, pick

Make = Callable[..., Candidate]
MakeRule = Callable[..., Rule]


def scores_of(*candidates: Candidate, **values: list[Any]) -> dict[str, dict[str, Any]]:
    """Scores by scorer, a value for each candidate; text is a fault, a pair has a part `x`."""
    found = {}
    for name, some in values.items():
        for one, value in zip(candidates, some, strict=True):
            line: dict[str, Any] = {"value": value, "parts": {}, "fault": None}
            if isinstance(value, str):
                line |= {"value": None, "fault": value}
            elif isinstance(value, tuple):
                line |= {"value": value[0], "parts": {"x": value[1]}}
            found[one.key(name, ["result"])] = line
    return found


def reasons(line: dict[str, Any]) -> dict[str, list[str]]:
    return {one["custom_id"]: one["reasons"] for one in line["rejected"]}


def test_mean_rank_over_scorers_and_ties_to_the_lower_number(
    candidate: Make, rule: MakeRule
) -> None:
    four = [candidate(n) for n in range(4)]
    scores = scores_of(*four, a=[1.0, 9.0, 9.0, 5.0], b=[300.0, 7.0, 7.0, 1.0])
    (line,) = pick({"cat": four}, None, scores, rule(keep=2), {})
    # cat-1 and cat-2 share ranks 1 and 2 by a, 2 and 3 by b.
    assert {one["custom_id"]: one["mean_rank"] for one in line["ranking"]} == {
        "cat-1": 2.0,
        "cat-2": 2.0,
        "cat-3": 2.0,
        "cat-0": 4.0,
    }
    assert line["picked"] == ["cat-1", "cat-2"]
    assert [one["rank"] for one in line["ranking"]] == [1, 2, 3, 4]
    assert pick({"cat": four}, None, scores, rule(keep=2), {}) == [line]


def test_every_reject_has_its_reason(candidate: Make, rule: MakeRule) -> None:
    every = [
        candidate(0),
        candidate(1),
        candidate(2),
        candidate(3, outputs=[{"pixel_sha256": "cat-0", "path": "outputs/cat-0.png"}]),
        candidate(4, status="failed", error={"message": "no memory"}),
        candidate(5, edit={"kind": "none"}),
        candidate(6),
        candidate(7),
    ]
    scores = scores_of(
        *every,
        a=[(8.0, 8.0), (5.0, 5.0), *[(8.0, 8.0)] * 4, "reply not readable", (8.0, 6.0)],
        b=[1.0, 1.0, 4.1, 1.0, 1.0, 1.0, 1.0, "global: structure 0.41 < 0.7"],
    )
    rules = rule(least={"a.x": 7.0}, most={"b": 3.0})
    (line,) = pick({"cat": every}, None, scores, rules, {})
    assert line["picked"] == ["cat-0"]
    assert reasons(line) == {
        "cat-1": ["a.x 5 < 7"],
        "cat-2": ["b 4.1 > 3"],
        "cat-3": ["duplicate of cat-0"],
        "cat-4": ["failed: no memory"],
        "cat-5": ["none: no edit was found"],
        "cat-6": ["not scored: a: reply not readable"],
        "cat-7": ["global: structure 0.41 < 0.7", "a.x 6 < 7"],
    }


def test_null_is_never_a_number_and_a_missing_score_is_told(
    candidate: Make, rule: MakeRule
) -> None:
    two = [candidate(0), candidate(1)]
    scores = scores_of(*two, a=["timed out", 0.0])
    (line,) = pick({"cat": two}, None, scores, rule(names=("a",)), {})
    assert line["picked"] == ["cat-1"]
    (line,) = pick({"cat": two}, None, {}, rule(names=("a",)), {})
    assert line["picked"] == []
    assert reasons(line)["cat-0"] == ["not scored: a: not scored yet"]


def test_an_audit_never_chooses(candidate: Make, rule: MakeRule) -> None:
    three = [candidate(n) for n in range(3)]
    scores = scores_of(*three, a=[1.0, 2.0, 3.0], b=["crashed", 9.0, 4.0])
    (line,) = pick({"cat": three}, None, scores, rule(audit="b"), {})
    assert line["picked"] == ["cat-2"]
    assert line["audit"] == {"b": {"picked": 4.0, "all": 6.5}}


def test_a_person_stands_above_gates_and_order(candidate: Make, rule: MakeRule) -> None:
    three = [candidate(n) for n in range(3)]
    scores = scores_of(*three, a=[1.0, 2.0, 3.0])
    gated = rule(names=("a",), least={"a": 1.5})
    chosen = {"cat": ["cat-0", "cat-9"]}
    (line,) = pick({"cat": three}, None, scores, gated, chosen)
    assert (line["picked"], line["chosen_by"]) == (["cat-0"], "person")
    assert line["ranking"][0]["overruled"] == ["a 1 < 1.5"]
    assert [one["custom_id"] for one in line["ranking"]] == ["cat-0", "cat-2", "cat-1"]
    (line,) = pick({"cat": three}, None, scores, gated, {"cat": []})
    assert (line["picked"], line["chosen_by"]) == ([], "person")


def test_a_final_that_a_gate_rejects_makes_way_for_the_next(
    candidate: Make, rule: MakeRule
) -> None:
    drafts = [candidate(n, denoise_steps=6) for n in range(3)]
    full = candidate(2, outputs=[{"pixel_sha256": "full", "path": "outputs/cat-2.png"}])
    scores = scores_of(*drafts, a=[1.0, 2.0, 3.0]) | scores_of(full, a=[0.5])
    (line,) = pick({"cat": drafts}, {}, scores, rule(names=("a",)), {})
    assert (line["picked"], line["missing"], line["draft_steps"]) == (["cat-2"], ["cat-2"], 6)
    gated = rule(names=("a",), least={"a": 0.7})
    (line,) = pick({"cat": drafts}, {"cat-2": full}, scores, gated, {})
    assert (line["picked"], line["missing"]) == (["cat-1"], ["cat-1"])
    assert reasons(line) == {"cat-2": ["final: a 0.5 < 0.7"]}
    (line,) = pick({"cat": drafts}, {"cat-2": full}, scores, rule(names=("a",)), {})
    assert (line["picked"], line["missing"]) == (["cat-2"], [])
    assert line["ranking"][0]["final_values"] == {"a": 0.5}


@pytest.mark.parametrize("keep", [1, 5])
def test_a_scorer_that_does_not_fit_leaves_the_order_to_the_numbers(
    candidate: Make, rule: MakeRule, keep: int
) -> None:
    two = [candidate(1), candidate(0)]
    unfit = rule(keep=keep, most={"a": 1.0})
    for one in unfit.declared.values():
        one["declared"]["needs"] = ["source"]
    (line,) = pick({"cat": two}, None, {}, unfit, {})
    assert line["picked"] == ["cat-0", "cat-1"][:keep]
    assert line["ranking"][0]["mean_rank"] is None
