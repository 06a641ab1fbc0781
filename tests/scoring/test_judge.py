"""The judge at an endpoint that is busy, broken, chatty or wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import MachineError, UsageError
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


def test_replies_are_read_and_what_is_not_readable_is_null(
    endpoint: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_of.time, "sleep", lambda _: None)
    monkeypatch.setenv("HYIMG_JUDGE_KEY", "secret")
    said = {
        "good": 7,
        "chatter": 7,
        "429 x2": 7,
        "500 x4": 7,
        "503": "HTTP 503, 5 times",
        "400": "HTTP 400",
        "prose": "reply not readable",
        "refuses": "reply not readable",
        "eleven": "reply not readable",
        "html": "reply not readable: not JSON",
        "out of range": "reply not readable: a number is not from 0 to 10",
    }
    found = judge_of.judge([case(prompt) for prompt in said], options(endpoint.url))
    assert [one["value"] or one["fault"] for one in found] == [*said.values()]
    assert found[0]["parts"] == {"follows": 8, "preserves": 7, "quality": 9}
    assert {prompt: len(asked) for prompt, asked in endpoint.asked.items() if len(asked) > 1} == {
        "429 x2": 3,
        "500 x4": 5,
        "503": 5,
    }
    (request,) = endpoint.asked["good"]
    kinds = [part["type"] for part in request["messages"][1]["content"]]
    assert kinds == ["text", "text", "image_url", "text", "image_url"]
    assert {one["Authorization"] for one in endpoint.headers} == {"Bearer secret"}


@pytest.mark.parametrize("code", ["401", "404", "302"])
def test_a_wrong_address_or_key_stops_and_no_redirection_is_followed(
    endpoint: Any, case: Any, code: str
) -> None:
    with pytest.raises(judge_of.CannotJudge, match=f"HTTP {code}"):
        judge_of.judge([case(code)], options(endpoint.url))


def test_nobody_at_the_address_is_told_at_once_and_scores_nothing(case: Any) -> None:
    config = CandidatesConfig(score=("judge:qwen",), judge_url="http://127.0.0.1:9/v1")
    (scorer,) = scorers_of(config)
    with (
        ScorerProcess(scorer, 60.0, print) as process,
        pytest.raises(MachineError, match="refused"),
    ):
        [*process.score([case("good")])]


def test_only_pictures_leave_the_machine(endpoint: Any, case: Any, tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("password")
    with pytest.raises(ValueError, match="not a PNG"):
        judge_of.judge(
            [case("good") | {"sources": [str(tmp_path / "secrets")]}], options("http://x")
        )


def test_without_an_address_there_is_no_judge() -> None:
    with pytest.raises(UsageError, match="no address"):
        scorers_of(CandidatesConfig(score=("judge:qwen",)))
    for url in ("file:///etc/passwd", "http://user:key@host/v1", "host:80"):
        with pytest.raises(UsageError, match="not the address"):
            scorers_of(CandidatesConfig(score=("judge:qwen",), judge_url=url))


def test_another_rubric_or_model_is_another_judge_and_the_address_is_not(tmp_path: Path) -> None:
    def identity(spec: str = "judge:qwen", url: str = "http://a/v1", **more: Any) -> str:
        return scorers_of(CandidatesConfig(score=(spec,), judge_url=url, **more))[0].identity

    (tmp_path / "rubric.txt").write_text("Give 10 to all.")
    assert identity() == identity(url="http://b/v1")
    other = identity(rubric=str(tmp_path / "rubric.txt"))
    assert len({identity(), identity("judge:gemma"), other}) == 3
