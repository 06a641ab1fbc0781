"""The benchmark of the kernels takes every way through on any machine."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "expert_kernels.py"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="the benchmarks are not part of this copy")
def test_small_shapes_go_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kept" / "kernels.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--small", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    kept = json.loads(out.read_text())
    assert {row["format"] for row in kept["rows"]} == {"dense", "fp8", "nf4"}
    assert all(row["milliseconds"] > 0 and row["runs"] == 7 for row in kept["rows"])
    assert {"hardware", "versions", "date", "shape"} < kept.keys()
