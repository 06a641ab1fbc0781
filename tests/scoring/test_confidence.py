"""The scorer `confidence`, from a run and from a file of texts."""

import json
from pathlib import Path
from typing import Any

LINE = {"prompt": "put something next to the ball", "temperature": 1.5, "max_new_tokens": 40}


def scores(path: Path) -> dict[float, dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["value"]: line for line in lines if "value" in line}


def test_texts_are_scored_and_picked_before_anything_is_drawn(run_cli: Any, tmp_path: Path) -> None:
    line = LINE | {"custom_id": "ball", "n": 4, "vary": "text", "num_inference_steps": 2}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(line) + "\n")
    assert run_cli("think", "jobs.jsonl", "-o", "texts.jsonl").code == 0
    notes = {
        one["custom_id"]: one
        for one in map(json.loads, (tmp_path / "texts.jsonl").read_text().splitlines())
    }
    logprobs = {name: one["written"]["confidence"]["logprob"] for name, one in notes.items()}
    assert len({*logprobs.values()}) == 4
    assert run_cli("score", "texts.jsonl", "--score", "confidence").code == 0
    found = scores(tmp_path / "texts.scores.jsonl")
    assert found.keys() == {*logprobs.values()}
    record = notes["ball-0"]["written"]["confidence"]
    parts = found[record["logprob"]]["parts"]
    assert parts["mean"] == record["logprob"] / record["tokens"]
    assert parts["recaption"] == record["recaption_logprob"]
    assert run_cli("pick", "texts.jsonl", "-o", "best.jsonl").code == 0
    (best,) = map(json.loads, (tmp_path / "best.jsonl").read_text().splitlines())
    surest = max(logprobs, key=lambda name: logprobs[name])
    assert best["custom_id"] == surest
    # The drawing has its text's value, in its line and on the page.
    assert run_cli("generate", "best.jsonl", "-o", "out").code == 0
    (result,) = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
    assert result["confidence"]["logprob"] == logprobs[surest]
    shown = f"{logprobs[surest]:.2f}, {result['confidence']['tokens']} tokens"
    assert any(shown in part.read_text() for part in (tmp_path / "out/report").glob("*.js"))
    # A text that somebody edited has none: its scorer is not shown the line.
    notes["ball-0"]["cot_text"] = notes["ball-0"]["cot_text"].replace("</think>", " So.</think>")
    (tmp_path / "edited.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in notes.values()))
    told = run_cli("score", "edited.jsonl", "--score", "confidence")
    assert "confidence: 1 candidate skipped: no confidence to show to it" in told.err


def test_a_gate_rejects_what_has_no_confidence(run_cli: Any, tmp_path: Path) -> None:
    lines = [
        LINE | {"custom_id": "given", "cot_text": "<recaption>a ball</recaption>"},
        LINE | {"custom_id": "own"},
    ]
    lines[0] = {k: v for k, v in lines[0].items() if k not in ("temperature", "max_new_tokens")}
    (tmp_path / "jobs.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    flags = ("--score", "confidence", "--min", "confidence.mean=-9", "--num-inference-steps", "2")
    assert run_cli("generate", "jobs.jsonl", "-o", "out", "--pick", "1", *flags).code == 1
    picks = {
        one["candidate_of"]: one
        for one in map(json.loads, (tmp_path / "out/picks.jsonl").read_text().splitlines())
    }
    assert picks["own"]["picked"] == ["own"]
    (rejected,) = picks["given"]["rejected"]
    why = "not scored by confidence: its text was not written by a model"
    assert why in rejected["reasons"]
