"""A small comparison of the embedded model, loaded once for all of them."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure.bench import faults

from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench import harness
from hyimg_cli.measure.bench.scenario import SCENARIOS, Scenario, read_scenario
from hyimg_cli.measure.bench.verdict import Findings
from hyimg_cli.models import registry
from hyimg_cli.quality.metrics import PIXEL_METRICS
from hyimg_cli.settings.run import ModelChoice

ONE_EDIT = (
    '{"custom_id": "edit", "task": "it2i", "prompt": "make the circle blue", "seed": 5, '
    f'"images": ["{SCENARIOS}/images/red-circle.png"], "bot_task": "recaption"}}\n'
)
Bench = Callable[..., Findings]


@pytest.fixture(scope="session")
def loaded() -> Any:
    return registry.load(ModelChoice(device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def small() -> Scenario:
    """kv-reuse over two steps of one edit, its first two variants."""
    found = read_scenario("kv-reuse")
    return replace(found, variants=found.variants[:2], steps=(2,), main_steps=2, repeats=3)


@pytest.fixture
def bench(loaded: Any, small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs a comparison from start to verdict; only loading the weights is left out."""
    return bench_in(tmp_path, loaded, small, monkeypatch)


def bench_in(folder: Path, loaded: Any, small: Scenario, patch: pytest.MonkeyPatch) -> Bench:
    """The same, in a folder of the caller's."""
    patch.setattr(registry, "load", lambda choice, **_: loaded)

    def carried_out(scenario: Scenario = small, lines: str = ONE_EDIT) -> Findings:
        manifest = folder / "jobs.jsonl"
        manifest.write_text(lines)
        return harness.Bench(
            scenario,
            read_manifest(manifest),
            {"device": "cpu"},
            folder=folder / "out",
            metrics=tuple(PIXEL_METRICS.values()),
            tell=lambda text: None,
        ).run()

    return carried_out


@pytest.fixture
def processor_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes while this process works, and while a planted fault sleeps: what other programs
    take of the processor neither hides a sleep nor looks like one.
    """
    slept_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += seconds

    monkeypatch.setattr(faults, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: time.process_time() + slept_s)
