"""Run time estimates: only from earlier runs with the same settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cache.disk import RATES

Run = Callable[..., Any]
Write = Callable[..., Path]
LINES = [{"custom_id": f"job-{n}", "prompt": "a circle", "seed": n} for n in range(6)]
UNKNOWN = "time: unknown, no earlier run of tiny-image had these settings and kinds of jobs"
pytestmark = pytest.mark.usefixtures("fake_session")


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
    ran = run_cli("plan", manifest, *cache)
    assert line_of(ran) == UNKNOWN
    assert "to measure it, run a few jobs with --limit 4, then plan again" in ran.out
    assert time_of(run_cli("plan", manifest, *cache, "--json")) is None
    for runs in (1, 2):
        assert run_cli("generate", manifest, *cache, "-o", f"out-{runs}").code == 0
        said = line_of(run_cli("plan", manifest, *cache))
        assert said.startswith("time: about ")
        assert said.endswith(f", from {runs} earlier run{'s' if runs > 1 else ''}")
    found = time_of(run_cli("plan", manifest, *cache, "--json"))
    assert found is not None
    assert found["runs"] == 2
    assert found["stages"].keys() == {"load", "prompts", "pictures", "text", "denoise", "decode"}
    assert 0 < found["seconds"] == pytest.approx(sum(found["stages"].values()))


def test_what_is_done_takes_no_time(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache, "--limit", "4")
    of_two = time_of(run_cli("plan", manifest, *cache, "--json"))
    of_six = time_of(run_cli("plan", manifest, *cache, "--json", "-o", "elsewhere"))
    assert of_two is not None
    assert of_six is not None
    denoise = [found["stages"]["denoise"] for found in (of_two, of_six)]
    assert denoise[1] == pytest.approx(3 * denoise[0])
    run_cli("generate", manifest, *cache)
    assert line_of(run_cli("plan", manifest, *cache)) == "time: nothing left to run"


@pytest.mark.parametrize(
    "other",
    [
        ("--dtype", "bfloat16"),
        ("--quantization", "fp8"),
        ("--batching-max-size", "2"),
        ("--replicas", "2"),
    ],
)
def test_rates_of_other_settings_are_none_of_its_own(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path], other: tuple[str, ...]
) -> None:
    manifest = write_manifest(*LINES)
    run_cli("generate", manifest, *cache)
    assert line_of(run_cli("plan", manifest, *cache, *other, "-o", "new")) == UNKNOWN
    # What no picture reads, and what is done about failures, changes nothing.
    alike = run_cli("plan", manifest, *cache, "--max-retries", "2", "--frames", "png", "-o", "new")
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


def test_a_quiet_run_leaves_its_rates_and_one_that_made_nothing_leaves_none(
    run_cli: Run, write_manifest: Write, cache: tuple[str, Path]
) -> None:
    manifest = write_manifest({"prompt": "fail"})
    assert run_cli("generate", manifest, *cache, "-q").code == 1
    assert line_of(run_cli("plan", manifest, *cache, "-o", "new")) == UNKNOWN
    manifest = write_manifest(*LINES)
    assert run_cli("generate", manifest, *cache, "-q", "-o", "out").code == 0
    (entry,) = (cache[1] / RATES).iterdir()
    (rates,) = json.loads(entry.read_bytes().split(b"\n", 1)[1])
    assert rates.keys() == {"load", "prompts", "text", "denoise", "decode"}
    assert line_of(run_cli("plan", manifest, *cache)).endswith(", from 1 earlier run")
