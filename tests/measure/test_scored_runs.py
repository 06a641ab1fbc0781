"""Scored runs by the command: what is missing is named, and then there is no single number."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run

from hyimg_cli.measure.scores.scored_runs import read_scored_run

SCORER = """
import json, os
SCORERS = {"mark": {"version": "1", "needs": ["result"], "range": [0, 10], "options": {"bias": 0}}}


def mark(cases, options):
    marks = json.load(open(os.environ["MARKS"]))
    for place, case in enumerate(cases):
        given = marks[case["result"].split("/")[-3]][case["id"]]
        value = given.pop(0) if isinstance(given, list) else given
        facts = {"model": marks.get("model", "m-1"), "fingerprint": marks.get("print", "fp")}
        if isinstance(value, str):
            yield {"case": place, "value": None, "fault": value, "facts": facts}
        else:
            parts = {"half": value / 2}
            yield {"case": place, "value": value + options["bias"], "parts": parts, "facts": facts}
    json.dump(marks, open(os.environ["MARKS"], "w"))
"""
NAMES = [f"cat-{n}" for n in range(6)]
MARKS = {
    "a": dict(zip(NAMES, ([8, 7], [9, 8], [6, 7], [7, 7], [9, 9], [8, 8]), strict=True)),
    "b": dict(zip(NAMES, ([7, 7], [7, 6], [6, 5], [6, 6], [7, 8], [6, 7]), strict=True)),
}


class Lab:
    """Two runs of one list in a folder, scored by a file of marks."""

    def __init__(self, folder: Path, run_cli: Any) -> None:
        self.folder, self.run_cli = folder, run_cli
        self.jobs = [
            {"custom_id": name, "prompt": f"paint {name}", "colour": (n * 40, 0, 0)}
            for n, name in enumerate(NAMES)
        ]

    def draw(self, name: str, **more: Any) -> None:
        jobs = [job | more.get(str(job["custom_id"]).replace("-", "_"), {}) for job in self.jobs]
        made_run(self.folder / name, jobs)

    def score(self, name: str, *words: str, marks: Any = None, repeat: int = 2) -> Any:
        given = {"a": {}, "b": {}} | json.loads(json.dumps(marks or MARKS))
        (self.folder / "marks.json").write_text(json.dumps(given))
        scorer = ("--score", "mine.py:mark", "--repeat", str(repeat))
        return self.run_cli("score", name, *scorer, *words)

    def compare(self, *words: str) -> Any:
        return self.run_cli("eval", "scores", *words)

    def record(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.compare(*words, "--json").out)
        return found


@pytest.fixture
def lab(tmp_path: Path, run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARKS", str(tmp_path / "marks.json"))
    (tmp_path / "mine.py").write_text(SCORER)
    return Lab(tmp_path, run_cli)


@pytest.fixture
def scored(lab: Lab) -> Lab:
    for name in ("a", "b"):
        lab.draw(name)
        assert lab.score(name).code == 0
    return lab


def test_two_runs_of_one_list(scored: Lab) -> None:
    ran = scored.compare("a", "b")
    assert ran.code == 0, ran.err
    assert "difference A - B: +1.250" in ran.out
    assert ran.out.splitlines()[-1] == "  A (a) has the better scores"
    assert "scored by: model m-1" in ran.out
    found = scored.record("a", "b")
    one = found["difference"]["left_out"]
    assert found["difference"].keys() == {"left_out"}
    assert (one["samples"], one["pictures"], one["repeats"]) == (6, 6, 2)
    assert one["new_pictures"][0] < one["same_list"][0] < 1.25
    assert found["better"] == "a"


def test_a_part_of_a_score_is_compared_by_its_name(scored: Lab) -> None:
    assert "mark.half: A a: 6 samples" in scored.compare("a", "b", "--by", "mark.half").out
    found = scored.record("a", "b", "--by", "mark.half")["difference"]
    assert found["left_out"]["mean"] == pytest.approx(0.625)
    refused = scored.compare("a", "--by", "mark.hlf")
    assert 'mark has no part "hlf"' in refused.err


def test_equal_runs_differ_by_nothing(scored: Lab) -> None:
    shutil.copytree("a", "c")
    ran = scored.compare("a", "c")
    assert ran.code == 0
    assert "difference A - B: +0.000" in ran.out
    assert "cannot be told apart" in ran.out
    low, high = scored.record("a", "c")["difference"]["left_out"]["same_list"]
    assert low < 0 < high


def test_one_run_alone_has_both_intervals(scored: Lab) -> None:
    ran = scored.compare("a")
    assert ran.code == 0
    assert "mean: 7.750" in ran.out
    assert "other pictures of this kind:" in ran.out
    assert "these pictures, scored again:" in ran.out


def test_scores_of_one_repeat_say_what_they_do_not_know(lab: Lab) -> None:
    lab.draw("a")
    lab.score("a", repeat=1)
    ran = lab.compare("a")
    assert "these pictures, scored again: not known without --repeat" in ran.out


FAULTS = [
    ("failed", {"cat_1": {"failed": "out of memory"}}, {}, "failed: out of memory", "1 failed"),
    ("missing", {"cat_1": {"is_left": True}}, {}, "not drawn", "1 missing"),
    ("refused", {}, {"cat-1": ["refused: no", "refused: no"]}, "refused: no", "1 refused"),
    ("prose", {}, {"cat-1": ["reply not readable: x", 7]}, "reply not readable: x", "1 unreadable"),
    ("late", {}, {"cat-1": ["no answer in 9 s", 7]}, "no answer in 9 s", "1 no value"),
]


@pytest.mark.parametrize(("name", "jobs", "marks", "why", "kind"), FAULTS)
def test_what_is_missing_is_named_and_two_numbers_are_printed(
    lab: Lab, name: str, jobs: Any, marks: Any, why: str, kind: str
) -> None:
    lab.draw("a")
    lab.draw("b", **jobs)
    lab.score("a")
    lab.score("b", marks=MARKS | {"b": MARKS["b"] | marks})
    for words in (("b",), ("a", "b")):
        ran = lab.compare(*words)
        assert ran.code == 1
        assert f"    cat-1: {why}" in ran.out
        assert f": 1 ({kind})" in ran.out
        assert "missing left out: " in ran.out
        assert "missing as 0: " in ran.out
        found = lab.record(*words)
        assert [*found.get("difference", found.get("mean"))] == ["left_out", "as_worst"]
        assert "cat-1" in found[["a", "b"][len(words) - 1]]["missing"]


def test_a_picture_that_was_edited_after_its_run_has_no_score(scored: Lab) -> None:
    (scored.folder / "b/outputs/cat-2.png").write_bytes(b"other")
    ran = scored.compare("a", "b")
    assert ran.code == 1
    assert "cat-2: changed: the file is not as its run wrote it" in ran.out
    assert "1 changed" in ran.out


@pytest.mark.parametrize("change", ["prompt", "source"])
def test_another_list_is_refused(
    lab: Lab, change: str, write_picture: Callable[..., Path], tmp_path: Path
) -> None:
    sources = [write_picture(), tmp_path / "other.png"]
    shutil.copy(sources[0], sources[1])
    for name, source in (("a", sources[0]), ("b", sources[1])):
        lab.draw(name, cat_1={"images": [source]})
        lab.score(name)
    assert lab.compare("a", "b").code == 0  # equal bytes in another folder are the same source
    other = {"prompt": "paint cat-1 blue"} if change == "prompt" else {"images": [lab.folder / "x"]}
    (lab.folder / "x").write_bytes(sources[0].read_bytes() + b"1")
    lab.draw("b", cat_1={"images": [sources[1]]} | other)
    lab.score("b")
    ran = lab.compare("a", "b")
    assert ran.code == 2
    assert "error[eval.scores]: cat-1: the prompt or the sources are not those of a" in ran.err


def test_the_digest_of_a_list_is_that_of_its_content(scored: Lab) -> None:
    first = read_scored_run(Path("a"), "mark").list_sha256
    scored.jobs.reverse()
    scored.draw("elsewhere")
    shutil.copy("a/scores.jsonl", "elsewhere")
    assert read_scored_run(Path("elsewhere"), "mark").list_sha256 == first
    scored.jobs[0]["prompt"] = "paint another"
    scored.draw("elsewhere")
    assert read_scored_run(Path("elsewhere"), "mark").list_sha256 != first


def test_a_sample_of_one_run_only_is_refused_or_left_out(scored: Lab) -> None:
    scored.jobs = scored.jobs[:4]
    scored.draw("b")
    refused = scored.compare("a", "b")
    assert (refused.code, "--allow-unpaired" in refused.err) == (2, True)
    ran = scored.compare("a", "b", "--allow-unpaired")
    assert "warning: left out, because only one run has them: cat-4, cat-5" in ran.out
    assert ran.code == 1


def test_another_scorer_or_judge_is_said(lab: Lab) -> None:
    for name in ("a", "b"):
        lab.draw(name)
    lab.score("a")
    lab.score("b", marks=MARKS | {"model": "m-2"})
    ran = lab.compare("a", "b")
    assert ran.code == 1
    assert "warning: model is m-1 in A and m-2 in B: another judge" in ran.out
    lab.score("b", "--score-option", "mark.bias=1")
    refused = lab.compare("a", "b")
    assert refused.code == 2
    assert 'options {"bias": 0} and {"bias": 1}' in refused.err


def test_a_judge_that_changed_within_a_run_is_said_with_counts(lab: Lab) -> None:
    lab.draw("a")
    lab.score("a", repeat=1)
    lab.score("a", marks=MARKS | {"model": "m-2"}, repeat=2)
    ran = lab.compare("a")
    assert ran.code == 1
    assert "model is not the same for all scores: m-1 (6), m-2 (6)" in ran.out


def test_another_fingerprint_is_noted_only(lab: Lab) -> None:
    for name in ("a", "b"):
        lab.draw(name)
        lab.score(name, marks=MARKS | {"print": f"fp-{name}"})
    ran = lab.compare("a", "b")
    assert ran.code == 0
    assert "note: fingerprint is fp-a in A and fp-b in B\n" in ran.out


def test_the_page_shows_the_comparison_and_the_pairs(scored: Lab) -> None:
    ran = scored.compare("a", "b", "--page", "scores.html")
    assert ran.code == 0, ran.err
    page = Path("scores.html").read_text(encoding="utf-8")
    assert "<title>hyimg eval scores: two scored runs</title>" in page
    assert "A (a) has the better scores" in page
    assert page.count('<article class="compare">') == 6
    assert "paint cat-0" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_the_page_says_why_it_is_a_warning(scored: Lab) -> None:
    """Two decimals as in the text; what is missing stands beside the verdict."""
    scored.draw("b", cat_3={"failed": "out of memory"})
    assert scored.compare("a", "b", "--page", "scores.html").code == 1
    page = Path("scores.html").read_text(encoding="utf-8")
    assert page.index("1 result of B without all scores") < page.index("<pre")
    facts = re.findall(r"<dt>(A|B|A - B)</dt>\s*<dd>([^<]*)</dd>", page)
    assert {name for name, _ in facts} == {"A", "B", "A - B"}
    assert all(re.fullmatch(r"[+-]?\d+\.\d\d", value) for _, value in facts), facts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "hyimg eval scores A B"),
        (("a", "--page", "x.html"), "a page needs two runs"),
        (("a", "--by", "mrk"), "did you mean mark?"),
        (("empty",), "score it first: hyimg score empty --score"),
        (("a", "b", "--net", "vgg", "--min-psnr", "3"), "scores does not take --min-psnr"),
    ],
)
def test_usage(scored: Lab, words: tuple[str, ...], said: str) -> None:
    made_run(scored.folder / "empty", scored.jobs)
    ran = scored.compare(*words)
    assert ran.code == 2
    assert said in ran.err
