"""The benchmark of the kernels takes every way through on any machine."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from hyimg_cli.kernels import expert_table
from hyimg_cli.kernels.expert_table import ExpertRow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "expert_kernels.py"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="the benchmarks are not part of this copy")
def test_small_shapes_go_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kept" / "kernels.json"
    table = tmp_path / "experts.json"
    given = [str(SCRIPT), "--small", "--out", str(out), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", given)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    # What it writes is what is read: with torch's product alone there is nothing to choose.
    rows = expert_table._measured(table)["CPU"]
    assert rows == dict.fromkeys(("none", "fp8", "nf4"), ExpertRow("grouped", "grouped", 0))
    kept = json.loads(out.read_text())
    assert {row["format"] for row in kept["rows"]} == {"dense", "fp8", "nf4"}
    assert all(row["milliseconds"] > 0 and row["runs"] == 7 for row in kept["rows"])
    assert {"hardware", "versions", "date", "shape"} < kept.keys()


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        # By rows: ours and the libraries'.
        ({1: (1.0, 3.0, 2.9), 8: (2.0, 3.0, 2.9), 16: (4.0, 3.0, 2.9)}, ("decode", "quack", 8)),
        # Within a twentieth is no win.
        ({1: (1.0, 1.04, 2.0), 8: (2.0, 3.0, 2.9), 16: (4.0, 3.0, 2.9)}, ("grouped", "quack", 1)),
        ({1: (3.0, 1.0, 2.0), 8: (3.0, 1.0, 2.0), 16: (3.0, 1.0, 2.0)}, ("grouped", "grouped", 0)),
    ],
)
def test_a_kernel_of_ours_stays_where_it_wins(
    took: dict[int, tuple[float, float, float]], expected: tuple[str, str, int]
) -> None:
    script = runpy.run_path(str(SCRIPT))
    rows = [
        script["Row"]("experts, even", "dense", count, name, ms, ms, ms, 7, 0, 0)
        for count, each in took.items()
        for name, ms in zip(("decode", "grouped", "quack"), each, strict=True)
    ]
    row, _ = script["decided"](rows, "dense")
    assert row == ExpertRow(*expected)


def test_groups_of_fp8_rows_are_padded_where_that_is_quicker() -> None:
    script = runpy.run_path(str(SCRIPT))
    for padded, tight, many in ((2.0, 1.9, "scaled_1"), (1.9, 2.0, "scaled")):
        rows = [
            script["Row"]("experts, even", "fp8", count, name, ms, ms, ms, 7, 0, 0)
            for count in (1, 6793)
            for name, ms in (("grouped", 3.0), ("scaled", padded), ("scaled_1", tight))
        ]
        assert script["decided"](rows, "fp8")[0] == ExpertRow(many, many, 0)
