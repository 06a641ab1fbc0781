"""The rule: gates with reasons, then the mean rank, ties to the lower number; a person above it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.candidates import Candidate
from hyimg_cli.scoring.candidates import read_candidates
from hyimg_cli.scoring.pick import Rule, pick, rule_of
from hyimg_cli.settings.run import CandidatesConfig

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


def test_a_scores_key_has_all_that_its_scorer_is_shown_and_nothing_else() -> None:
    """Two candidates of equal pixels, with other texts and masks."""
    line = {"custom_id": "a", "prompt": "x"}
    outputs = [{"path": "a.png", "pixel_sha256": "1" * 64}]
    one, other = (
        Candidate(
            line,
            {"status": "done", "outputs": outputs, "cot_text": text}
            | {"edit": {"mask": "outputs/a.mask.png", "sha256": {"mask": text}}},
            Path(),
        )
        for text in ("red", "blue")
    )
    for needs, is_same in ((["result"], True), (["text"], False), (["result", "mask"], False)):
        assert (one.key("scorer", needs) == other.key("scorer", needs)) is is_same, needs


def test_candidates_come_by_number_in_whatever_order_their_lines_are(tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"a-{n}", "candidate_of": "a", "candidate": n, "prompt": "x", "cot_text": "y"}
        for n in (2, 0, 1)
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [one.number for one in read_candidates(path)["a"]] == [0, 1, 2]


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
        "cat-6": ["not scored by a: reply not readable"],
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
    assert reasons(line)["cat-0"] == ["not scored by a: not scored yet"]


def test_a_scorer_that_gave_no_value_does_not_count(candidate: Make, rule: MakeRule) -> None:
    three = [candidate(n) for n in range(3)]
    scores = scores_of(*three, a=["crashed"] * 3, b=[3.0, 1.0, 2.0])
    (line,) = pick({"cat": three}, None, scores, rule(), {})
    assert (line["picked"], line["rule"]["left_out"]) == (["cat-1"], ["a"])
    assert line["rule"]["scorers"].keys() == {"b"}
    # A gate by it rejects; so does one value of it, on another candidate; and if nothing has one.
    (line,) = pick({"cat": three}, None, scores, rule(least={"a": 0.0}), {})
    assert reasons(line)["cat-0"] == ["not scored by a: crashed"]
    scores |= scores_of(three[2], a=[1.0])
    (line,) = pick({"cat": three}, None, scores, rule(), {})
    assert line["picked"] == ["cat-2"]
    scores = scores_of(*three, a=["crashed"] * 3, b=["crashed"] * 3)
    (line,) = pick({"cat": three}, None, scores, rule(), {})
    assert line["picked"] == []


@pytest.mark.parametrize(
    ("needs", "sources", "others", "picked"),
    [
        (["text"], (), (), []),
        (["text"], (), (1.0,), []),  # others have a text: this one has none all the same
        (["text", "source"], ("a.png",), (), []),
        (["source"], (), (), []),  # nothing in the run was judged
        (["source"], (), ("none: no edit was found",), ["cat-0"]),
        (["source"], (), (1.0,), ["cat-0"]),  # a gate on edits, and no edit
        (["source", "mask"], ("a.png",), (1.0,), []),
        (["mask"], (), (1.0,), ["cat-0"]),
    ],
)
def test_a_gate_that_judged_nothing_does_not_pass(
    candidate: Make, rule: MakeRule, needs: list[str], sources: Any, others: Any, picked: Any
) -> None:
    one, another = candidate(0), candidate(1, of="dog")
    one.line["images"] = sources
    another.line["images"] = ["b.png"]
    another.result.update(
        source_sha256=["b"],
        cot_text="a dog",
        edit={"kind": "local", "mask": "outputs/m.png", "sha256": {"mask": "m"}},
    )
    gated = rule(names=("a",), most={"a": 1.0})
    gated.declared["a"]["declared"]["needs"] = needs
    judged = [{"value": None, "fault": x} if isinstance(x, str) else {"value": x} for x in others]
    scores = {another.key("a", needs): {"parts": {}, "fault": None} | x for x in judged}
    line, _ = pick({"cat": [one], "dog": [another]}, None, scores, gated, {})
    assert line["picked"] == picked
    if picked:
        assert line["ranking"][0]["not_judged_by"] == ["a"]
    else:
        assert reasons(line)["cat-0"][0].startswith("not scored by a: no ")


def test_by_names_the_scorers_that_rank(candidate: Make, rule: MakeRule) -> None:
    three = [candidate(n) for n in range(3)]
    scores = scores_of(*three, a=[1.0, 2.0, 3.0], b=[1.0, 2.0, "crashed"])
    declared = rule().declared
    config = CandidatesConfig(least=("a=+.15e1",))
    picks = {
        by: pick({"cat": three}, None, scores, rule_of(config, declared, [by]), {})[0]["picked"]
        for by in ("a", "b")
    }
    assert picks == {"a": ["cat-2"], "b": ["cat-1"]}
    with pytest.raises(UsageError, match='no scorer is called "c"'):
        rule_of(config, declared, ["c"])


@pytest.mark.parametrize("gate", ["a", "a=", "a=x", "a=nan", "a=inf", "a=1_0", "a=1e", "a=."])
def test_what_is_not_a_gate(rule: MakeRule, gate: str) -> None:
    with pytest.raises(UsageError, match="is not a gate"):
        rule_of(CandidatesConfig(least=(gate,)), rule().declared)


def test_a_scores_key_has_the_source_whose_size_was_kept(candidate: Make) -> None:
    one, two = candidate(0, source_sha256=["x"]), candidate(0, source_sha256=["x"])
    two.line["kept_source"] = 2
    assert one.key("a", ["source"]) != two.key("a", ["source"])
    assert one.key("a", ["result"]) == two.key("a", ["result"])


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
    # The last attempt of one continued from kept latents.
    drafts = [candidate(n, denoise_steps=0) for n in range(3)]
    drafts = [replace(one, line={**one.line, "num_inference_steps": 6}) for one in drafts]
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
    unfit = rule(keep=keep)
    for one in unfit.declared.values():
        one["declared"]["needs"] = ["source"]
    (line,) = pick({"cat": two}, None, {}, unfit, {})
    assert line["picked"] == ["cat-0", "cat-1"][:keep]
    assert line["ranking"][0]["mean_rank"] is None
