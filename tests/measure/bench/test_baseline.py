"""`--baseline`: what has become worse, and what is only noise or another machine."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.measure.bench.record import is_same_machine, read_baseline, read_share, regressions


def entry(wall_s: float = 1.0, speedup: float = 2.0, verdict: str = "identical") -> dict[str, Any]:
    wall = {"n": 5, "median": wall_s, "min": wall_s * 0.99, "max": wall_s * 1.01}
    up = {"median": speedup, "low": speedup * 0.98, "high": speedup * 1.02, "coverage": 0.9}
    return {
        "format": 1,
        "name": "kv-reuse",
        "verdict": {"name": verdict},
        "common": {"batching_max_size": 1},
        "jobs": [{"custom_id": "one"}],
        "environment": {"hardware": {"cpu": "one"}, "model_fingerprint": "f"},
        "timings": [
            {"steps": 8, "pair": ["reuse", "recompute once"], "a": {"wall_s": wall}, "speedup": up}
        ],
    }


def test_the_same_figures_are_no_regression() -> None:
    assert list(regressions(entry(), entry(), 0.05)) == []
    assert list(regressions(entry(1.04, 1.95), entry(), 0.05)) == []


def test_slower_is_named() -> None:
    assert "seconds a run went from 1.000 to 1.200" in next(regressions(entry(1.2), entry(), 0.05))
    assert "speed-up went from 2.000 to 1.500" in next(regressions(entry(1, 1.5), entry(), 0.05))


def test_what_the_spread_explains_is_not() -> None:
    wide = entry(1.2, 1.5)
    wide["timings"][0]["a"]["wall_s"]["min"] = 0.9
    wide["timings"][0]["speedup"]["high"] = 2.1
    assert list(regressions(wide, entry(), 0.05)) == []


def test_seconds_of_another_machine_do_not_count_but_its_speed_up_does() -> None:
    other = deepcopy(entry(5.0, 1.5))
    other["environment"]["hardware"] = {"cpu": "other"}
    assert not is_same_machine(other, entry())
    (found,) = regressions(other, entry(), 0.05)
    assert "speed-up" in found


def test_a_worse_verdict() -> None:
    worse = entry(verdict="differs")
    assert "the verdict was identical, now it is differs" in next(regressions(worse, entry(), 0.05))
    assert list(regressions(entry(verdict="not explained"), worse, 0.05)) == []
    assert list(regressions(worse, entry(verdict="not explained"), 0.05)) == [
        "the verdict was not explained, now it is differs"
    ]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("name", "prewarm", "comparison"),
        ("jobs", [], "set of jobs"),
        ("common", {"dtype": "bfloat16"}, "setting"),
        ("environment", {"hardware": {}, "model_fingerprint": "g"}, "model"),
    ],
)
def test_what_cannot_be_held_against_each_other(name: str, value: Any, says: str) -> None:
    (found,) = regressions(entry() | {name: value}, entry(), 0.05)
    assert f"the baseline has another {says}" in found


def test_step_counts_of_one_side_only() -> None:
    fewer = entry() | {"timings": []}
    for now, then in ((fewer, entry()), (entry(), fewer)):
        assert list(regressions(now, then, 0.05)) == [
            "reuse vs recompute once, 8 steps: timed in only one of the two"
        ]


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.1", 0.1), (" 12.5 % ", 0.125)])
def test_shares(text: str, share: float) -> None:
    assert read_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "five", "-5%", "5%%"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(UsageError):
        read_share(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(entry() | {"format": 9})])
def test_what_is_no_baseline(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(UsageError):
        read_baseline(tmp_path / "bench.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(tmp_path / "none.json")
