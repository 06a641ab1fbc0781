"""Runs: phases add up, text is decided, a process of its own gives the same pictures."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from measure.bench.conftest import ONE_EDIT

from hyimg_cli.engine.runner import make_plan
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench.harness import Bench
from hyimg_cli.measure.bench.runs import Lifetime, RunResult, load_model, runs_of
from hyimg_cli.measure.bench.scenario import SCENARIOS, Scenario, read_scenario
from hyimg_cli.measure.bench.verdict import Findings
from hyimg_cli.models import registry
from hyimg_cli.quality.metrics import PIXEL_METRICS
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import Job

JOBS = [
    replace(job, num_inference_steps=2)
    for job in make_plan(read_manifest(SCENARIOS / "edits.jsonl")).jobs
]
CONFIG = RunConfig(
    OutputConfig(Path()),
    model=ModelChoice(device="cpu"),
    batch=BatchConfig(max_size=1, prewarm=False),
)


@pytest.fixture
def quick(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load", lambda choice, **_: loaded)


def run_once(
    jobs: Sequence[Job],
    folder: Path,
    texts: Mapping[str, Sequence[int]] | None = None,
    lifetime: Lifetime = "session",
) -> RunResult:
    with runs_of(lifetime, CONFIG, texts or {}, registry.load) as run:
        return run(jobs, folder)


def _digests(result: Any) -> dict[str, str]:
    return {one.custom_id: one.outputs[0].pixel_sha256 for one in result.outcomes}


@pytest.mark.usefixtures("processor_clock")
def test_phases_are_disjoint_and_add_up(quick: None, tmp_path: Path) -> None:
    with runs_of("session", CONFIG, {}, registry.load) as run:
        # The first one digests the checkpoint's files.
        run(JOBS, tmp_path / "first")
        result = run(JOBS, tmp_path / "second")
    assert sum(result.phases_s.values()) == pytest.approx(result.wall_s)
    assert min(result.phases_s.values()) >= 0
    assert result.phases_s["unattributed"] < 0.1 * result.wall_s
    assert len(result.outcomes) == len(JOBS)
    assert not result.failures


def test_text_can_be_decided(quick: None, tmp_path: Path) -> None:
    """Forced to its own text a job writes the same; forced to another's, that one's."""
    result = run_once(JOBS, tmp_path / "free")
    texts = {one.custom_id: one.cot_token_ids or () for one in result.outcomes}
    again = run_once(JOBS, tmp_path / "own", texts)
    assert _digests(again) == _digests(result)
    swapped = {JOBS[0].custom_id: texts[JOBS[2].custom_id]}
    other = run_once(JOBS[:1], tmp_path / "other", swapped)
    by_id = {one.custom_id: one for one in result.outcomes}
    assert other.outcomes[0].cot_token_ids == by_id[JOBS[2].custom_id].cot_token_ids
    assert other.outcomes[0].cot_token_ids != by_id[JOBS[0].custom_id].cot_token_ids


def test_a_model_is_loaded_once_for_all_that_ask_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fresh(choice: Any, *, is_batch_invariant: bool) -> Any:
        asked.append((choice, is_batch_invariant))
        return object()

    monkeypatch.setattr(registry, "load", fresh)
    load, rounded = cache(load_model), replace(CONFIG.model, quantization="fp8")
    first = load(CONFIG.model, is_batch_invariant=True)
    assert load(CONFIG.model, is_batch_invariant=True) is first
    load(rounded, is_batch_invariant=True)
    load(CONFIG.model, is_batch_invariant=False)
    assert asked == [(CONFIG.model, True), (rounded, True), (CONFIG.model, False)]


@pytest.mark.thorough
def test_a_process_of_its_own_draws_the_same(quick: None, tmp_path: Path) -> None:
    here = run_once(JOBS[:1], tmp_path / "here")
    there = run_once(JOBS[:1], tmp_path / "there", lifetime="process-per-job")
    assert _digests(there) == _digests(here)
    assert there.processes == 1
    assert there.phases_s["start"] > 0
    assert there.phases_s["load"] > 0
    assert sum(there.phases_s.values()) == pytest.approx(there.wall_s)


def test_every_row_of_the_review_is_there(bench: Callable[..., Findings], small: Scenario) -> None:
    other = {'"edit"': '"other"', "make the circle blue": "make it a green square"}
    lines = ONE_EDIT + re.sub("|".join(other), lambda found: other[found[0]], ONE_EDIT)
    found = bench(replace(small, repeats=2), lines)
    rows = {row.name: row for row in found.rows}
    assert set(rows) == {
        "reuse twice",
        "recompute once twice",
        "reuse vs recompute once, 2 steps",
        "reuse, other seed",
    }
    assert rows["reuse twice"].is_identical
    assert rows["recompute once twice"].is_identical
    assert not rows["reuse, other seed"].unchanged
    assert found.verdict.name in ("identical", "equal")
    assert len(list((found.kept / "A").iterdir())) == len(list((found.kept / "B").iterdir())) == 2


@pytest.mark.thorough
def test_videos_are_compared_frame_by_frame(tmp_path: Path) -> None:
    """A note says so. The prompt cache changes no frame."""
    scenario = read_scenario("prompt-cache")
    (tmp_path / "jobs.jsonl").write_text(
        '{"task": "t2v", "prompt": "a dog", "size": "32x32", "num_frames": 5, "seed": 1, "n": 2}\n'
    )
    found = Bench(
        replace(scenario, steps=(2,), main_steps=2, repeats=2),
        read_manifest(tmp_path / "jobs.jsonl"),
        {"device": "cpu", "video_model": "tiny-video", "batch_invariant": False},
        folder=tmp_path / "out",
        metrics=tuple(PIXEL_METRICS.values()),
        tell=lambda text: None,
    ).run()
    assert found.verdict.name == "identical"
    rows = {row.name: row for row in found.rows}
    pair = rows["cached vs embedded each time, 2 steps"]
    assert len(pair.distances) == 2 * 5
    assert len(list((found.kept / "A").iterdir())) == 10
    assert not rows["cached, other seed"].unchanged
    ignored, by_frames = found.notes[:2]
    whom = "models that draw jobs together only"
    assert ignored == f"--no-batch-invariant applies to {whom}; this manifest has none"
    assert "videos: compared by frames" in by_frames
    embedded = [
        runs[0].phases_s["embed"] for runs in (found.worst.timed[0].a, found.worst.timed[0].b)
    ]
    assert embedded[0] > 0
