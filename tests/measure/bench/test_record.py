"""Results of a comparison: three files, pictures, and an exit code."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure.bench.conftest import ONE_EDIT, bench_in
from report.browser import needs_browser, seen_in

from hyimg_cli.cli import app
from hyimg_cli.measure.bench import record
from hyimg_cli.measure.bench.runs import RUN_PHASES
from hyimg_cli.measure.bench.scenario import Scenario
from hyimg_cli.models import registry

LPIPS = "LPIPS was not measured: <no weights>"


@pytest.fixture(scope="module")
def written(
    loaded: Any, small: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    with pytest.MonkeyPatch.context() as patch:
        bench = bench_in(tmp_path_factory.mktemp("written"), loaded, small, patch)
        found = bench(replace(small, repeats=2))
    command, flags = "hyimg bench --compare kv-reuse", {"device": "cpu"}
    return record.write(found, command=command, lpips=LPIPS, flags=flags), found.kept


@needs_browser
def test_the_page_of_a_comparison_works_in_a_browser(
    written: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    seen = seen_in((written[1] / "report.html").read_text(), tmp_path)
    assert seen["errors"] == []
    assert seen["requests"] == []
    assert len(seen["sliders"]) == 1
    assert all(width > 0 for width in seen["pictures"])


def test_bench_json_says_everything_in_plain_values(
    written: tuple[dict[str, Any], Path],
) -> None:
    entry, folder = written
    text = (folder / "bench.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(entry))
    assert (entry["verdict"]["name"], entry["verdict"]["exit_code"]) == ("identical", 0)
    first, *others = entry["verdict"]["reasons"]
    assert first == "every value of 1 pairs of pictures is the same"
    # A busy machine has a second one.
    assert all(one.startswith("time: not resolved, runs of re") for one in others)
    assert entry["timings"][0]["is_resolved"] == (not others)
    rows = {row["name"]: row for row in entry["precision"]}
    assert rows["reuse vs recompute once, 2 steps"]["psnr_min"] == "inf"
    assert isinstance(rows["reuse, other seed"]["psnr_min"], float)
    timing = entry["timings"][0]
    for side in ("a", "b"):
        assert list(timing[side]["phases_s"]) == list(RUN_PHASES)
        medians = [spread["median"] for spread in timing[side]["phases_s"].values()]
        assert sum(medians) == pytest.approx(timing[side]["wall_s"]["median"], rel=0.2)
    declared = sum(timing["gain_by_phase_s"][phase] for phase in ("prefill", "kv_handoff"))
    assert timing["explained_s"] == pytest.approx(declared)
    assert entry["environment"]["model"] == "tiny-image"
    assert str(folder) not in text, "no path of this machine"


def test_bench_md_has_both_tables(written: tuple[dict[str, Any], Path]) -> None:
    text = (written[1] / "bench.md").read_text()
    assert text.startswith("# kv-reuse: identical\n")
    assert "| reuse twice | 1 | inf |" in text
    assert "| 2 |" in text


@pytest.mark.thorough
def test_the_command(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "load", lambda choice, **_: loaded)
    # As on a machine without LPIPS weights: said, not silent, and no reason to fail.
    monkeypatch.setitem(sys.modules, "lpips", None)
    (tmp_path / "jobs.jsonl").write_text(ONE_EDIT)
    out = tmp_path / "out"
    line = ["bench", "--compare", "kv-reuse", "--manifest", str(tmp_path / "jobs.jsonl")]
    line += ["--steps", "1", "--repeats", "2", "--device", "cpu", "-o", str(out)]
    assert app.run([*line, "--json"]) == 0
    told = capsys.readouterr()
    entry = json.loads(told.out)
    # Reused rows were decoded one by one, recomputed ones together: a level may round otherwise.
    assert entry["verdict"]["name"] in ("identical", "equal")
    assert [one["steps"] for one in entry["timings"]] == [1, 1, 1], "each two of three variants"
    assert [*entry["variants"]] == ["a", "b", "c"]
    assert "run 2 of 2" in told.err
    names = {path.name for path in out.iterdir()}
    assert names == {"bench.json", "bench.md", "report.html", "A", "B", "C"}
    # Held against itself with all the room there is, then against what nothing can reach.
    again = [*line, "-q", "--baseline", str(out / "bench.json"), "--max-regress", "900%"]
    assert app.run(again) == 0
    faster = json.loads((out / "bench.json").read_text())
    for figure in ("min", "median", "max"):
        faster["timings"][0]["a"]["wall_s"][figure] = 1e-6
    (tmp_path / "faster.json").write_text(json.dumps(faster))
    assert app.run([*line, "-q", "--baseline", str(tmp_path / "faster.json")]) == 1
    assert "recompute once, 1 steps: seconds a run went from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--compare", "kv-resue"], "did you mean kv-reuse?"),
        (["--compare", "kv-reuse", "--steps", "0"], "is not a list of whole numbers"),
        (["--compare", "kv-reuse", "--max-regress", "much"], "is not a share"),
        (["--compare", "kv-reuse", "--baseline", "none.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_runs(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err
