"""Whether drafts are worth it: tasks whose answers are known, and a scorer that knows nothing."""

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyimg_cli.measure.bench.drafts import Task, expected_best, judge_drafts, markdown


def tasks(noise: float, count: int = 60, n: int = 8) -> list[Task]:
    """Tasks whose drafts of 6 steps see the value of a picture in full through so much noise."""
    rng = np.random.default_rng(3)
    full = rng.normal(size=(count, n))
    seen = full + noise * rng.normal(size=(count, n))
    return [Task(f, {6: s}, steps=20) for f, s in zip(full, seen, strict=True)]


def test_drafts_that_see_all_keep_the_whole_gain() -> None:
    row = judge_drafts(tasks(0.0), 6, 1)
    assert (row["share"]["value"], row["same_winner"], row["is_worth_it"]) == (1.0, 1.0, True)
    assert (row["steps"], row["steps_of_all_in_full"]) == (68.0, 160.0)
    # 68 of 160 steps are 3.4 pictures in full.
    assert 0.5 < row["fewer"]["value"] < 0.75


@pytest.mark.parametrize("redone", [1, 2])
def test_a_scorer_that_knows_nothing_of_the_full_picture_is_not_worth_it(redone: int) -> None:
    row = judge_drafts(tasks(1e9), 6, redone)
    assert row["is_worth_it"] is False
    assert row["difference"]["high"] < 0
    (table,) = [
        line
        for line in markdown({"x": {"tasks": 60, "left_out": 0, "rows": [row]}}).split("\n")
        if "steps |" in line and "6" in line
    ]
    assert table.endswith("| not worth it |")


def test_nothing_to_gain_is_no_saving() -> None:
    row = judge_drafts([Task(np.ones(4), {6: np.arange(4.0)}, 20)] * 3, 6, 1)
    assert (row["share"]["value"], row["is_worth_it"]) == (None, False)


def test_the_expected_best_is_that_of_every_choice() -> None:
    values = np.array([3.0, 1.0, 7.0, 2.0, 2.0])
    by_count = [np.mean([max(some) for some in combinations(values, k)]) for k in range(1, 6)]
    assert [expected_best(values, k) for k in range(1, 6)] == pytest.approx(by_count)
    assert expected_best(values, 2.25) == pytest.approx(0.75 * by_count[1] + 0.25 * by_count[2])
    assert expected_best(values, 9.0) == 7.0


def test_a_scorer_without_a_value_leaves_the_others_theirs(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    """`ask` of a toy that was not taught to answer, next to `confidence`; alone it is an error."""
    line = {"custom_id": "a", "prompt": "put something next to the ball", "bot_task": "recaption"}
    manifest = write_manifest(line | {"num_inference_steps": 2, "max_new_tokens": 12})
    words = ("bench", "--compare", "drafts", "--manifest", manifest, "--candidates", "2")
    words += ("--draft-steps", "1", "-o", "b", "--score")
    ran = run_cli(*words, "confidence", "--score", "ask:is it red?")
    assert ran.code == 0, ran.err
    assert "by ask: no line has two candidates with a value: tiny-image was not taught" in ran.out
    assert "by confidence, over 1 lines" in ran.out
    found = json.loads((tmp_path / "b/drafts.json").read_text())["scorers"]
    assert (found["ask"]["rows"], len(found["confidence"]["rows"])) == ([], 2)
    ran = run_cli(*words, "ask:is it red?")
    assert (ran.code, "ask: tiny-image was not taught to answer" in ran.err) == (2, True)
