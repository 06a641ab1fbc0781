"""How long a comparison says it takes: before its first run, and while it runs."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure.bench.conftest import ONE_EDIT

from hyimg_cli.engine.eta import KeptRates
from hyimg_cli.engine.runner import make_plan
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench import record
from hyimg_cli.measure.bench.duration import RunTime, TimeLeft, of_bench, of_plan
from hyimg_cli.measure.bench.harness import Bench
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import Scenario, read_scenario
from hyimg_cli.models import registry
from hyimg_cli.quality.metrics import PIXEL_METRICS
from hyimg_cli.settings.config import build_run_config, settle


def took(wall_s: float, **phases_s: float) -> RunResult:
    return RunResult(Path(), wall_s, 0.0, dict.fromkeys(RUN_PHASES, 0.0) | phases_s, ())


def test_runs_that_ended_tell_how_long_the_others_take() -> None:
    left = TimeLeft([("a", 8), ("a", 8), ("b", 8), ("b", 16)], {})
    assert str(left) == "time unknown until the first run ends"
    # The model stays loaded: 4 s a run, of them 2 s for 8 steps.
    left.end_run("session", took(9.0, load=5.0, denoise_rest=2.0))
    assert left.seconds == 4 + 4 + 6
    assert str(left) == "about 14 s left"
    left.end_run("session", took(4.0, denoise_rest=2.0))
    left.end_run("process", took(60.0, start=3.0, load=5.0, denoise_rest=8.0))
    assert str(left) == "about 1 min 8 s left"


def test_what_ran_here_replaces_an_estimate() -> None:
    known = {label: [RunTime(8, 30.0, 1.0)] for label in ("a", "b")}
    left = TimeLeft([("a", 8), ("a", 8), ("b", 8)], known, ", by a guess")
    assert str(left) == "about 1 min 30 s, by a guess"
    left.end_run("session", took(2.0))
    assert str(left) == "about 32 s left"


def test_a_session_says_little_about_a_variant_that_starts_processes() -> None:
    left = TimeLeft([("a", 8), ("a", 8)], {"a": [RunTime(8, 30.0, 1.0)]}, ", by a guess")
    left.end_run("process", took(2.0))
    assert str(left) == "about 30 s left"
    left = TimeLeft([("a", 8), ("a", 8), ("a", 8)], {})
    left.end_run("process", took(2.0))
    assert str(left) == "about 4.0 s left"
    left.end_run("process", took(20.0, start=3.0))
    assert str(left) == "about 20 s left"


def test_the_rates_of_earlier_runs_give_an_estimate(tmp_path: Path) -> None:
    """The same that `hyimg plan` uses. A session's model stays loaded, each process loads one."""
    (tmp_path / "jobs.jsonl").write_text(ONE_EDIT + ONE_EDIT.replace('"edit"', '"other"'))
    plan = make_plan(read_manifest(tmp_path / "jobs.jsonl"))
    config = build_run_config(settle({"device": "cpu"}, {}, {}), tmp_path, tmp_path / "cache")
    processes = read_scenario("persistent")
    session = replace(processes.variants[0], label="a session", lifetime="session")
    three = replace(processes, variants=(session, *processes.variants), main_steps=8)
    assert of_plan(three, [plan.jobs] * 3, config).seconds is None
    rates = {"load": 5.0, "prompts": 0.5, "text": 0.01, "denoise": 0.001, "decode": 1e-6}
    KeptRates(config).keep(plan, {plan.groups[0].model: rates})
    found = of_plan(three, [plan.jobs] * 3, config)
    walls = [runs[0].wall_s for runs in found.known.values()]
    assert walls[0] > 2 * 2 * 0.5
    assert [wall - walls[0] for wall in walls] == pytest.approx([0, 5, 10])
    # Without a cache between steps, denoising takes longer: its rows are those of whole sequences.
    _, reuse_and_every, _ = read_scenario("kv-reuse").pairs
    kinds = of_plan(reuse_and_every, [plan.jobs] * 2, config).known
    (plain,), (whole,) = kinds.values()
    assert 3 < whole.denoise_s / plain.denoise_s < 8
    assert whole.wall_s - plain.wall_s == pytest.approx(whole.denoise_s - plain.denoise_s)
    found.ahead = [("a session", 8)]
    assert str(found).endswith(", from 1 earlier run of the model")


@pytest.mark.thorough
@pytest.mark.usefixtures("processor_clock")
def test_a_second_bench_takes_about_as_long_as_it_says(
    loaded: Any, small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a factor of two, in processor time."""
    monkeypatch.setattr(registry, "load", lambda choice, **_: loaded)
    (tmp_path / "jobs.jsonl").write_text(ONE_EDIT)
    manifest = read_manifest(tmp_path / "jobs.jsonl")
    said: list[tuple[float, str]] = []

    def compared(*earlier: dict[str, Any]) -> dict[str, Any]:
        said.clear()
        found = Bench(
            replace(small, repeats=1),
            manifest,
            {"device": "cpu"},
            folder=tmp_path / "out",
            metrics=tuple(PIXEL_METRICS.values()),
            tell=lambda text: said.append((time.perf_counter(), text)),
            earlier=earlier,
        ).run()
        return record.write(found, command="", lpips="", flags={"device": "cpu"})

    entry = compared()
    runs = "2 variants, 1 job, 2 steps: 6 runs, "
    assert said[0][1] == f"{runs}time unknown until the first run ends"
    assert [text.split(";")[0] for _, text in said[1:]] == [
        "reuse writes the text for all",
        "2 steps: warm-up",
        "2 steps: run 1 of 1",
        "control: other seed",
        "measuring distances",
    ]
    assert all(re.search("; about .* s left$", text) for _, text in said[2:-1])
    compared(entry)
    (began, first), *_, (ended, _) = said
    told = re.fullmatch(re.escape(runs) + "about (.*) s, as long as the earlier bench here", first)
    assert told is not None
    assert 0.5 < float(told[1]) / (ended - began) < 2
    jobs = make_plan(manifest).jobs
    assert of_bench(entry, small, jobs) is not None
    for part in ({"jobs": []}, {"environment": entry["environment"] | {"hardware": {}}}):
        assert of_bench(entry | part, small, jobs) is None
