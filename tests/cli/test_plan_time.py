"""How long: told by earlier runs or by a measurement, never by anything else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cache.disk import RATES
from hyimg_cli.engine.timing.machine import Processors

Run = Callable[..., Any]
Write = Callable[..., Path]
LINES = [{"custom_id": f"job-{n}", "prompt": "a circle", "seed": n} for n in range(6)]
UNKNOWN = "time: unknown; run with --measure"
pytestmark = pytest.mark.usefixtures("fake_session", "alone")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else computes: a fake run is too short for the system's ticks to tell."""
    monkeypatch.setattr(Processors, "others_since", lambda *_: 0.0)


@pytest.fixture
def cache(tmp_path: Path) -> tuple[str, Path]:
    return "--cache-dir", tmp_path / "kept"


def time_of(ran: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = ran.json_lines[0]["time"]
    return found


def line_of(ran: Any) -> str:
    (line,) = [line for line in ran.out.splitlines() if line.startswith("time: ")]
    return str(line)


def test_it_is_unknown_until_a_run_has_left_its_rates(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES)
    assert line_of(run_cli("plan", manifest, *cache)) == UNKNOWN
    assert time_of(run_cli("plan", manifest, *cache, "--json")) is None
    for runs in (1, 2):
        assert run_cli("generate", manifest, *cache, "-o", f"out-{runs}").code == 0
        said = line_of(run_cli("plan", manifest, *cache))
        assert said.startswith("time: about ")
        assert said.endswith(f", from {runs} earlier run{'s' if runs > 1 else ''}")
    found = time_of(run_cli("plan", manifest, *cache, "--json"))
    assert found is not None
    assert found["runs"] == 2
    assert 0 < found["low"] < found["seconds"] < found["high"]
    parts = sum(one["middle"] for one in found["phases"].values())
    assert parts == pytest.approx(found["seconds"])
    # Of the fake's six jobs a quarter of a second each.
    assert found["phases"]["denoise"]["middle"] == pytest.approx(6 * 0.25, rel=0.3)


def test_what_is_done_takes_no_time(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache, "--limit", "4")
    of_two = time_of(run_cli("plan", manifest, *cache, "--json"))
    of_six = time_of(run_cli("plan", manifest, *cache, "--json", "-o", "elsewhere"))
    assert of_two is not None
    assert of_six is not None
    denoise = [found["phases"]["denoise"]["middle"] for found in (of_two, of_six)]
    assert denoise[1] == pytest.approx(3 * denoise[0], rel=0.3)
    run_cli("generate", manifest, *cache)
    assert line_of(run_cli("plan", manifest, *cache)) == "time: nothing is left to run"


@pytest.mark.parametrize("other", [("--dtype", "bfloat16"), ("--quantization", "fp8")])
def test_rates_of_other_settings_are_none_of_its_own(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path], other: tuple[str, ...]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache)
    assert line_of(run_cli("plan", manifest, *cache, *other, "-o", "new")) == UNKNOWN
    # What decides no speed by itself changes nothing.
    alike = run_cli("plan", manifest, *cache, "--batching-max-size", "2", "-o", "new")
    assert line_of(alike) != UNKNOWN


def test_without_a_disk_cache_nothing_is_kept(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache, "--no-disk-cache")
    assert not cache[1].exists()
    run_cli("generate", manifest, *cache, "-o", "again")
    assert len(list((cache[1] / RATES).iterdir())) == 1
    assert line_of(run_cli("plan", manifest, "--no-disk-cache", "-o", "new")) == UNKNOWN


def test_it_can_be_measured_without_a_folder(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path], tmp_path: Path, fake_session: Any
) -> None:
    manifest = write_manifest(*LINES, {"custom_id": "long", "prompt": "x", "steps": 30})
    closed: list[Path] = []
    fake_session.meanwhile["close"] = closed.append
    ran = run_cli("plan", manifest, *cache, "--measure", "--progress", "plain")
    assert ran.code == 0
    assert line_of(ran).endswith(", from a measurement")
    # A few steps of all that work together, then two of each shape as they are.
    full = [f"trial-0-{n}" for n in range(7)]
    assert fake_session.ran == [*full, "job-0", "job-1", "long"]
    assert len(closed) == 1
    assert not (tmp_path / "runs").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.jsonl", "kept"]
    # It is kept, and a run adds to it.
    assert line_of(run_cli("plan", manifest, *cache)).endswith(", from a measurement")
    run_cli("generate", manifest, *cache)
    both = line_of(run_cli("plan", manifest, *cache, "-o", "new"))
    assert both.endswith(", from a measurement and 1 earlier run")


def test_a_measurement_needs_no_cache(run_cli: Run, write_manifest: Write) -> None:
    ran = run_cli("plan", write_manifest(*LINES), "--measure", "--no-disk-cache", "--json", "-q")
    found = time_of(ran)
    assert found is not None
    assert (found["runs"], found["measurements"], ran.err) == (0, 1, "")


def test_what_fails_while_measuring_is_told(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest({"prompt": "fail"}, *LINES)
    ran = run_cli("plan", manifest, "--measure", "--progress", "none")
    assert ran.code == 0
    assert "failed[job.fake]: it was told to fail" in ran.err
    assert line_of(ran).startswith("time: about")
    nothing = run_cli("plan", write_manifest({"prompt": "fail"}), "--measure", "--no-disk-cache")
    assert (nothing.code, line_of(nothing)) == (0, UNKNOWN)


def test_a_signal_ends_a_measurement(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    ran = run_cli("plan", write_manifest({"prompt": "SIGINT"}), "--measure")
    assert ran.code == 130
    assert not list(tmp_path.glob("runs*"))


def test_damaged_rates_are_told_and_begun_anew(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache)
    (entry,) = (cache[1] / RATES).iterdir()
    entry.write_bytes(entry.read_bytes()[:-5])
    ran = run_cli("plan", manifest, *cache, "-o", "new")
    assert line_of(ran) == UNKNOWN
    assert "a damaged entry of the disk cache (rates) was removed" in ran.err
    assert run_cli("generate", manifest, *cache, "-o", "new").code == 0
    assert line_of(run_cli("plan", manifest, *cache, "-o", "newer")) != UNKNOWN


def test_the_cache_knows_and_clears_them(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    run_cli("generate", write_manifest(*LINES), *cache)
    listed = run_cli("cache", "list", *cache, "--json").json_lines
    assert {"kind": RATES, "entries": 1}.items() <= next(
        one for one in listed if one["kind"] == RATES
    ).items()
    assert run_cli("cache", "clear", "--kind", RATES, *cache).code == 0
    assert line_of(run_cli("plan", write_manifest(*LINES), *cache, "-o", "new")) == UNKNOWN


def test_an_interrupted_run_leaves_what_it_has_seen(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES, {"custom_id": "stop", "prompt": "SIGINT"})
    assert run_cli("generate", manifest, *cache).code == 130
    assert line_of(run_cli("plan", manifest, *cache)).endswith(", from 1 earlier run")
    (kept,) = (cache[1] / RATES).iterdir()
    facts = json.loads(kept.read_bytes().split(b"\n", 1)[1])
    assert facts["groups"][0]["jobs"] == len(LINES)
    assert "rest" not in facts["groups"][0]["phases"]


def test_replicas_divide_the_jobs(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache)
    one, two = (
        time_of(run_cli("plan", manifest, *cache, "-o", "new", "--json", "--replicas", count))
        for count in (1, 2)
    )
    assert one is not None
    assert two is not None
    assert two["phases"]["decode"] == one["phases"]["decode"]
    assert two["phases"]["denoise"]["low"] < one["phases"]["denoise"]["low"]
