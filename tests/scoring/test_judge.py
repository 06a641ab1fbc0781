"""The judge at an endpoint that is busy, broken, chatty or wrong."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked_scorers import in_order
from made_runs import made_run

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.scoring import endpoint as endpoint_of
from hyimg_cli.scoring import judge as judge_of
from hyimg_cli.scoring.process import ScorerProcess
from hyimg_cli.scoring.scorers import scorers_of
from hyimg_cli.settings.run import CandidatesConfig


@pytest.fixture
def case(write_picture: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    picture = str(write_picture())
    return lambda prompt: {"prompt": prompt, "sources": [picture], "result": picture}


def options(url: str, limit_s: float = 45.0) -> dict[str, Any]:
    (scorer,) = scorers_of(CandidatesConfig(score=("judge:qwen",), judge_url=url))
    return dict(scorer.options) | {"limit_s": limit_s}


def judged(cases: list[Any], given: Any) -> list[dict[str, Any]]:
    """What the judge yields, in the order of the cases."""
    return sorted(judge_of.judge(cases, given), key=lambda one: int(one["case"]))


def test_replies_are_read_and_what_is_not_readable_is_null(
    endpoint: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_of.time, "sleep", lambda _: None)
    monkeypatch.setenv("HYIMG_JUDGE_KEY", "secret")
    said = {
        "good": 7,
        "chatter": 7,
        "429 x2": 7,
        "500 x4": 7,
        "503": "HTTP 503, 5 times",
        "400": "HTTP 400",
        "400 jailbreak": "refused: HTTP 400: content_filter: jailbreak",
        "prose": "reply not readable: no JSON object with the marks",
        "refuses": "refused: I cannot",
        "filtered": "refused: content filter",
        "eleven": "reply not readable: no JSON object with the marks",
        "lacking": "reply not readable: no quality",
        "html": "reply not readable: not JSON",
        "out of range": "reply not readable: a number is not from 0 to 10",
    }
    found = judged([case(prompt) for prompt in said], options(endpoint.url))
    assert [one["value"] or one["fault"] for one in found] == [*said.values()]
    assert found[0]["parts"] == {"follows": 8, "preserves": 7, "quality": 9}
    # What cannot be read is kept to be looked at, and every reply says who gave it.
    assert found[[*said].index("prose")]["reason"] == "It is fine."
    host = endpoint.url.split("/")[2]
    told = {"host": host, "model": "qwen-2026-01", "fingerprint": "fp_1", "temperature": 0}
    assert found[0]["facts"].items() >= told.items()
    assert len(found[0]["facts"]["template_sha256"]) == 64
    assert {prompt: len(asked) for prompt, asked in endpoint.asked.items() if len(asked) > 1} == {
        "429 x2": 3,
        "500 x4": 5,
        "503": 5,
    }
    (request,) = endpoint.asked["good"]
    kinds = [part["type"] for part in request["messages"][1]["content"]]
    assert kinds == ["text", "text", "image_url", "text", "image_url"]
    assert {one["Authorization"] for one in endpoint.headers} == {"Bearer secret"}


def test_a_slow_reply_is_waited_for_and_no_request_is_sent_twice(endpoint: Any, case: Any) -> None:
    endpoint.slow_s = 1.5
    (found,) = judged([case("slow")], options(endpoint.url, limit_s=25.0))
    assert found["value"] == 7
    (late,) = judged([case("slow")], options(endpoint.url, limit_s=20.5))
    assert late["fault"].startswith("no answer in")
    assert len(endpoint.asked["slow"]) == 2


def test_a_reply_is_passed_on_before_the_others_of_its_batch(endpoint: Any, case: Any) -> None:
    endpoint.slow_s, came = 20.0, list[str]()
    (scorer,) = scorers_of(CandidatesConfig(score=("judge:qwen",), judge_url=endpoint.url))
    with ScorerProcess(scorer, 60.0, print) as process:
        cases = {"late": case("slow"), "a": case("good"), "b": case("prose")}
        for some in process.score(cases):
            came += some
            if len(came) == 2:
                endpoint.has_thought.set()
    assert (sorted(came[:2]), came[2]) == (["a", "b"], "late")


@pytest.mark.parametrize("code", ["401", "404", "302"])
def test_a_wrong_address_or_key_stops_and_no_redirection_is_followed(
    endpoint: Any, case: Any, code: str
) -> None:
    with pytest.raises(endpoint_of.CannotJudge, match=f"HTTP {code}"):
        judged([case(code)], options(endpoint.url))


def test_nobody_at_the_address_is_told_at_once_and_scores_nothing(case: Any) -> None:
    config = CandidatesConfig(score=("judge:qwen",), judge_url="http://127.0.0.1:9/v1")
    (scorer,) = scorers_of(config)
    with (
        ScorerProcess(scorer, 60.0, print) as process,
        pytest.raises(MachineError, match="refused"),
    ):
        in_order(process, [case("good")])


def test_only_pictures_leave_the_machine(endpoint: Any, case: Any, tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("password")
    with pytest.raises(ValueError, match="not a PNG"):
        judged([case("good") | {"sources": [str(tmp_path / "secrets")]}], options("http://x"))


def test_without_an_address_there_is_no_judge() -> None:
    with pytest.raises(UsageError, match="no address"):
        scorers_of(CandidatesConfig(score=("judge:qwen",)))
    for url in ("file:///etc/passwd", "http://user:key@host/v1", "host:80"):
        with pytest.raises(UsageError, match="not the address"):
            scorers_of(CandidatesConfig(score=("judge:qwen",), judge_url=url))


def test_another_rubric_or_model_is_another_judge_and_the_address_is_not(tmp_path: Path) -> None:
    def identity(spec: str = "judge:qwen", url: str = "http://a/v1", **more: Any) -> str:
        return scorers_of(CandidatesConfig(score=(spec,), judge_url=url, **more))[0].identity

    (tmp_path / "rubric.txt").write_text("Give 10 to all: follows, quality.")
    assert identity() == identity(url="http://b/v1")
    other = identity(rubric=str(tmp_path / "rubric.txt"))
    assert len({identity(), identity("judge:gemma"), other}) == 3
    # A sampling option is another judge, too; the default said aloud is not the default.
    hot = identity(score_option=("judge.temperature=1",))
    assert len({identity(), hot, identity(score_option=("judge.temperature=0.5",))}) == 3


def test_options_are_fields_of_the_request(endpoint: Any, case: Any) -> None:
    given = ("j.temperature=null", "j.seed=7", "j.max_tokens=9", "j.reasoning_effort=low")
    config = CandidatesConfig(score=("j=judge:qwen",), judge_url=endpoint.url, score_option=given)
    (scorer,) = scorers_of(config)
    (found,) = judged([case("good")], scorer.options)
    (asked,) = endpoint.asked["good"]
    assert "temperature" not in asked
    assert (asked["seed"], asked["max_tokens"], asked["reasoning_effort"]) == (7, 9, "low")
    assert found["facts"]["temperature"] == "default"
    assert scorer.declared["options"]["seed"] == 7


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("judge.temprature=1", "did you mean temperature"),
        ("judge.model=x", "judge:MODEL names the model"),
        ("judge.messages=[]", "remove it"),
        ("other.temperature=1", "scorers: judge"),
        ("judge=1", "for example judge.temperature=1"),
    ],
)
def test_options_that_a_judge_cannot_have(option: str, said: str) -> None:
    config = CandidatesConfig(
        score=("judge:qwen",), judge_url="http://a/v1", score_option=(option,)
    )
    with pytest.raises(UsageError) as refused:
        scorers_of(config)
    assert said in refused.value.hint


def test_a_rubric_without_the_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Say whether it follows.")
    config = CandidatesConfig(
        score=("judge:q",), judge_url="http://a/v1", rubric=str(tmp_path / "rubric.txt")
    )
    with pytest.raises(UsageError, match="does not ask for quality") as refused:
        scorers_of(config)
    assert refused.value.code == "usage.rubric"


@pytest.mark.thorough
def test_a_judge_that_is_another_model_from_a_call_on_is_told_with_both_counts(
    endpoint: Any, tmp_path: Path, run_cli: Any
) -> None:
    """Behind the same name and address, in one run of `hyimg score`: of 400 calls the last 100."""
    jobs = [
        {"custom_id": f"job-{n}", "prompt": f"number {n}", "colour": (n, 0, 0)} for n in range(100)
    ]
    made_run(tmp_path / "out", jobs)
    endpoint.renamed = (300, "qwen-2026-02")
    words = ("out", "--score", "judge:qwen", "--judge-url", endpoint.url, "--repeat", "4")
    ran = run_cli("score", *words)
    changed = "model is not the same for all scores: qwen-2026-01 (300), qwen-2026-02 (100)"
    assert f"warning: judge: {changed}" in ran.err
    compared = run_cli("eval", "scores", "out")
    assert (compared.code, changed in compared.out) == (1, True)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_judge_that_thinks_for_a_minute_is_asked_once(
    endpoint: Any, tmp_path: Path, run_cli: Any
) -> None:
    """With the limit that `hyimg score` has by default; the others are recorded meanwhile."""
    jobs = [{"custom_id": name, "prompt": name} for name in ("slow", "good", "prose")]
    out = made_run(tmp_path / "out", [job | {"colour": (n, 0, 0)} for n, job in enumerate(jobs)])
    endpoint.slow_s = 61.0
    began = time.monotonic()
    ran = run_cli("score", "out", "--score", "judge:qwen", "--judge-url", endpoint.url)
    assert time.monotonic() - began > endpoint.slow_s
    lines = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    values = [line["value"] for line in lines if "key" in line]
    assert sorted(values, key=str) == [7, 7, None], ran.err
    assert {name: len(asked) for name, asked in endpoint.asked.items()} == {
        "slow": 1,
        "good": 1,
        "prose": 1,
    }
