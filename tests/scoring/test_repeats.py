"""Repeated scores: each is asked for once, the picks use their mean, and changed facts are told."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.journal.picks import ScoreKey, ScoresFile
from hyimg_cli.scoring.candidates import Candidate, score_candidates
from hyimg_cli.scoring.scorers import scorers_of
from hyimg_cli.settings.run import CandidatesConfig

# Counts what it is asked in a file, and changes its name after some of it.
COUNTING = """
SCORERS = {"count": {"version": "1", "needs": ["text"], "options": {"model": "a"}}}


def count(cases, options):
    for place, case in enumerate(cases):
        with open("asked.log", "a") as log:
            log.write(case["id"] + "\\n")
        asked = len(open("asked.log").readlines())
        facts = {"model": options["model"] if asked <= 5 else "a-2", "temperature": 1}
        if case["id"] == "t-1" and asked < 4:
            yield {"case": place, "value": None, "fault": "refused: no", "facts": facts}
        else:
            yield {"case": place, "value": asked, "parts": {"x": asked}, "facts": facts}
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(COUNTING)
    return [
        Candidate({"custom_id": f"t-{n}", "prompt": "a", "cot_text": f"text {n}"}, {}, tmp_path)
        for n in range(3)
    ]


def scored(texts: list[Candidate], *options: str, **more: Any) -> tuple[int, list[str]]:
    retry = {"retry_failed": more.pop("retry_failed", False)}
    config = CandidatesConfig(score=("mine.py:count",), score_option=options, **more)
    told: list[str] = []
    with ScoresFile(Path("texts.jsonl")) as file:
        return score_candidates(texts, scorers_of(config), file, config, told.append, **retry), told


def values(texts: list[Candidate]) -> list[list[float | None]]:
    config = CandidatesConfig(score=("mine.py:count",))
    (scorer,) = scorers_of(config)
    file = ScoresFile(Path("texts.jsonl"))
    keys = [one.key(scorer.identity, ["text"]) for one in texts]
    return [[line["value"] for line in file.repeats(key).values()] for key in keys]


def test_each_repeat_is_asked_once_and_a_higher_number_adds(texts: list[Candidate]) -> None:
    assert scored(texts)[0] == 3
    assert values(texts) == [[1], [None], [3]]
    assert scored(texts, repeat=3)[0] == 6
    # Every picture has its second score before one has its third.
    assert values(texts) == [[1, 4, 7], [None, 5, 8], [3, 6, 9]]
    assert scored(texts, repeat=3)[0] == scored(texts, repeat=2)[0] == 0
    assert scored(texts, repeat=3, retry_failed=True)[0] == 1
    assert values(texts)[1] == [10, 5, 8]
    asked = Counter(Path("asked.log").read_text().split())
    assert asked == {"t-0": 3, "t-1": 4, "t-2": 3}


def test_picks_use_the_mean_of_the_values(texts: list[Candidate]) -> None:
    scored(texts, repeat=3)
    (scorer,) = scorers_of(CandidatesConfig(score=("mine.py:count",)))
    means = ScoresFile(Path("texts.jsonl")).means()
    found = [means[one.key(scorer.identity, ["text"])] for one in texts]
    assert [one["value"] for one in found] == [4, 6.5, 6]
    assert found[1]["parts"] == {"x": 6.5}
    assert found[1]["fault"] is None
    assert len(means) == 3


def test_a_scorer_that_changes_within_a_run_is_told_with_counts(texts: list[Candidate]) -> None:
    told = scored(texts, repeat=3)[1]
    changed = "warning: count: model is not the same for all scores: a (4), a-2 (4)"
    assert changed in told
    assert not any("temperature" in one for one in told)
    # It is told whenever these scores are looked at, also by a command that asks for nothing.
    assert changed in scored(texts, repeat=3)[1]
    lines = [json.loads(one) for one in Path("texts.scores.jsonl").read_text().splitlines()]
    facts = [line["facts"]["model"] for line in lines if "key" in line]
    assert Counter(facts) == {"a": 5, "a-2": 4}


def test_another_option_is_another_score(texts: list[Candidate]) -> None:
    assert scored(texts)[0] == 3
    assert scored(texts, "count.model=b")[0] == 3
    assert scored(texts, "count.model=b")[0] == 0


def test_a_killed_file_loses_no_repeat_and_merging_keeps_them(
    texts: list[Candidate], tmp_path: Path
) -> None:
    scored(texts, repeat=2)
    path, other = Path("texts.scores.jsonl"), tmp_path / "other.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert scored(texts, repeat=2)[0] == 1
    with ScoresFile(other) as into:
        into.join(ScoresFile(Path("texts.jsonl")))
    assert ScoresFile(other).means() == ScoresFile(Path("texts.jsonl")).means()


def test_what_is_computed_is_asked_once(tmp_path: Path) -> None:
    config = CandidatesConfig(score=("text",), repeat=5)
    line = {"custom_id": "a", "prompt": "a red cat", "cot_text": "a red cat"}
    told: list[str] = []
    with ScoresFile(tmp_path / "texts.jsonl") as file:
        one = [Candidate(line, {}, tmp_path)]
        assert score_candidates(one, scorers_of(config), file, config, told.append) == 1
    assert any("asked once" in text for text in told)


def test_the_first_repeat_has_the_key_of_a_score_that_is_not_repeated() -> None:
    assert ScoreKey("abc").own == "abc"
    assert len({ScoreKey("abc", n).own for n in range(4)}) == 4
    assert ScoreKey("abc").recorded == {"key": "abc"}
