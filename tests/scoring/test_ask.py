"""The scorer that asks the model which drew: its values, and what has none."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli import options
from hyimg_cli.errors import UsageError
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image import choices as choosing
from hyimg_cli.scoring.scorers import scorers_of
from hyimg_cli.settings.run import CandidatesConfig, ModelChoice
from hyimg_cli.settings.table import SETTINGS

STEPS = ("--num-inference-steps", "2", "--bot-task", "none")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The embedded weights under another name: what no toy's warning is about."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(registry.resolve_model(registry.EMBEDDED), folder)
    card = {"name": "asked", "ratio_indices": [16], "trained": True}
    (folder / "card.json").write_text(json.dumps(card))
    return str(folder)


@pytest.fixture
def any_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not taught to say yes or no."""
    monkeypatch.setattr(choosing, "LEAST_MASS", 0.0)


def scores(out: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, (out / "scores.jsonl").read_text().splitlines()):
        if "key" in line:
            found.setdefault(line["scorer"], []).append(line)
    return found


def test_the_model_is_loaded_once_and_a_later_score_is_the_same(
    model: str,
    any_mass: None,
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Path],
    write_picture: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    edit = {"prompt": "make it blue", "images": [write_picture().name], "seed": 1}
    manifest = write_manifest(
        {"custom_id": "new", "prompt": "a red circle", "seed": 1},
        {"custom_id": "plain"} | edit,
        {"custom_id": "told", "metadata": {"expect": "a blue circle"}} | edit,
    )
    (tmp_path / "two.txt").write_text("Is it red?\n\nIs it a circle?\n")
    targets = (
        "ask",
        "blue=ask:Is it blue?",
        "kept=ask2:As before, but {prompt}?",
        "two=ask:@two.txt",
    )
    flags = [word for target in (*targets, "outside") for word in ("--score", target)]
    load, loads = registry.load, list[str]()

    def counted(choice: Any, **how: Any) -> Any:
        loads.append(choice.model)
        return load(choice, **how)

    monkeypatch.setattr(registry, "load", counted)
    ran = run_cli(
        "generate", manifest, "-o", "out", "--model", model, *STEPS, *flags, "--pick", "1"
    )
    assert ran.code in (0, 1), ran.err
    assert len(loads) == 1
    first = scores(tmp_path / "out")
    assert [len(first[name]) for name in ("ask", "blue", "kept", "two")] == [3, 3, 2, 3]
    faults = [one["fault"] for one in first["ask"] if one["fault"]]
    assert len(faults) == 1
    assert "give a question, or expect" in faults[0]
    for name in ("blue", "kept", "two"):
        for one in first[name]:
            assert one["value"] + one["parts"]["no"] == pytest.approx(1, abs=1e-5)
            assert 0 < one["parts"]["mass"] < 1
    assert {one["reason"] for one in first["two"]} <= {"Is it red?", "Is it a circle?"}
    (tmp_path / "out/scores.jsonl").unlink()
    assert run_cli("score", "out", *flags).code == 0
    again = scores(tmp_path / "out")
    for name, lines in first.items():
        values = {one["key"]: one["value"] for one in again[name]}
        for one in lines:
            assert values[one["key"]] == pytest.approx(one["value"], abs=1e-6)


def test_no_answer_is_no_value(
    model: str,
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Path],
    tmp_path: Path,
) -> None:
    manifest = write_manifest({"custom_id": "a", "prompt": "a red circle", "seed": 1})
    assert run_cli("generate", manifest, "-o", "out", "--model", model, *STEPS).code == 0
    told = run_cli("score", "out", "--score", "ask")
    assert "ask: 1 candidate without a value: the model does not answer with yes or no" in told.err
    assert scores(tmp_path / "out")["ask"][0]["value"] is None
    assert run_cli("generate", manifest, "-o", "toy", *STEPS).code == 0
    told = run_cli("score", "toy", "--score", "ask")
    assert "tiny-image was not taught to answer questions" in told.err


@pytest.mark.parametrize("spec", ["ask2", "ask:@missing.txt", "a b=ask:Is it?"])
def test_a_target_that_cannot_be_asked(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        scorers_of(CandidatesConfig(score=(spec,)))
    assert caught.value.code == "usage.scorer"


def test_the_questions_are_part_of_the_identity() -> None:
    specs = ("a=ask", "b=ask:Is it?", "c=ask:Is it red = blue?", "d=ask2:Is it?")
    found = scorers_of(CandidatesConfig(score=specs))
    assert [one.name for one in found] == ["a", "b", "c", "d"]
    assert len({one.identity for one in found}) == 4
    assert found[2].options["questions"] == ("Is it red = blue?",)


def test_the_precision_is_part_of_the_identity_and_nothing_is_asked_twice() -> None:
    config = CandidatesConfig(score=("ask",))
    choices = (ModelChoice(device="cpu"), ModelChoice(dtype="bfloat16"))
    found = [scorers_of(config, choice)[0] for choice in choices]
    assert found[0].declared["dtype"] == "float32"
    assert found[0].identity != found[1].identity
    assert found[0].is_computed
    with pytest.raises(UsageError, match="no option"):
        scorers_of(replace(config, score_option=("ask.temperature=1",)))


def test_a_question_takes_what_follows_it_commas_too() -> None:
    question = "b=ask:Is it red, blue, or a=b?"
    given = options.settings_of({"score": ["outside, text", question, "confidence"]})
    assert given["score"].value == ("outside", "text", question, "confidence")
    assert SETTINGS["score"].kind.parse(f"outside,{question}") == ("outside", question)
