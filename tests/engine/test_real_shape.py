"""The benchmark at real shapes: its whole way at a small scale, and what it counts at the real."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hyimg_cli.models.hunyuan_image3.attention import pieces, visibility

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "real_shape.py"
pytestmark = pytest.mark.skipif(
    not SCRIPT.is_file(), reason="the benchmarks are not part of this copy"
)
PER_LAYER = {
    "denoise step, 2 rows",
    "denoise step, 2 rows, skewed routing",
    "AR decode, 1 row",
    "AR decode, 1 row, graph",
    "AR decode, 3 rows",
    "AR decode, 3 rows, graph",
    "prefill",
    "first step without reuse",
}
WHOLE = {
    "whole denoise step, 2 rows",
    "a token's choice, 1 row",
    "a token's choice, 3 rows",
    "source image encoded",
    "VAE decode, untiled",
    "VAE decode, tiled",
    *(
        f"attention, {rows}, length {name}"
        for rows in ("1 row", "17 rows")
        for name in ("seen", "new")
    ),
}


def _ran(out: Path, *arguments: str) -> dict[str, Any]:
    """The script as a command, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        common = [str(SCRIPT), "--scale", "tiny", "--layers", "2", "--out", str(out)]
        patch.setattr(sys, "argv", [*common, *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _ran(tmp_path_factory.mktemp("measured") / "kept" / "tiny.json")


def test_every_row_of_both_formats_is_there(measured: dict[str, Any]) -> None:
    rows = {(row["name"], row["form"]): row for row in measured["rows"]}
    expected = {(name, form) for name in PER_LAYER | WHOLE for form in ("dense", "fp8")}
    assert rows.keys() == expected
    for (name, _), row in rows.items():
        took = row["timed"]
        assert 0 < took["least"] <= took["median"] <= took["most"]
        assert (took["runs"], took["warmups"], row["layers"]) == (3, 2, 2)
        # Two layers of four: what is said of all of them is not measured as it is.
        assert not row["is_whole"]
        assert (row["per_layer"] is not None) == (name in PER_LAYER)
        if name in PER_LAYER:
            assert row["per_layer"] == pytest.approx(took["median"] / 2)
            assert row["of_32_layers"] == pytest.approx(32 * row["per_layer"])
            assert row["floor"] > 0
            assert row["of_floor"] == pytest.approx(row["per_layer"] / row["floor"])


def test_floors_and_circumstances_stand_beside_them(measured: dict[str, Any]) -> None:
    assert measured["floors"]["tflops"] > 0
    assert measured["floors"]["copy_tb_s"] > 0
    assert {"date", "hardware", "versions", "scale", "minutes", "notes"} < measured.keys()
    assert [built["form"] for built in measured["building"]] == ["dense", "fp8"]
    assert any("random weights" in note for note in measured["notes"])


def test_the_skewed_row_is_skewed(measured: dict[str, Any]) -> None:
    def share(name: str) -> int:
        (row,) = (r for r in measured["rows"] if (r["name"], r["form"]) == (name, "dense"))
        return int(row["note"].rsplit("has ", 1)[1].split(" %")[0])

    assert share("denoise step, 2 rows, skewed routing") > share("denoise step, 2 rows") + 5


def test_requests_run_whole_and_together(measured: dict[str, Any]) -> None:
    served = {each["name"]: each for each in measured["requests"]}
    assert list(served) == [
        "1 request, 3 steps, CFG",
        "1 request, 2 steps, no CFG",
        "1 request, 2 steps, no CFG, no graphs",
        "3 requests, 2 steps, no CFG",
        "3 requests, 3 steps, CFG",
    ]
    for name, each in served.items():
        count = int(name.split()[0])
        sizes = each["thinking"], each["drawing"]
        assert (each["finished"], sizes, each["failed"]) == (count, (count, count), [])
        assert not each["is_cut"]
        assert each["events"]["ThinkToken"] == 6 * count
        assert each["seconds_each"] == pytest.approx(each["seconds"] / count)
        assert each["planned_bytes"] > 0
    left_out = {(each["name"], each["form"]) for each in measured["left_out"]}
    assert left_out == {("requests", "dense")}


def test_what_time_does_not_allow_is_named(tmp_path: Path) -> None:
    kept = _ran(tmp_path / "cut.json", "--minutes", "0", "--forms", "fp8")
    assert kept["rows"] == kept["requests"] == []
    assert len(kept["left_out"]) == 9 + 5
    assert {each["why"] for each in kept["left_out"]} == {"out of time"}


def test_chosen_rows_alone(tmp_path: Path) -> None:
    kept = _ran(
        tmp_path / "some.json", "--forms", "fp8", "--only", "prefill", "1 request, 2*", "--profile"
    )
    assert [row["name"] for row in kept["rows"]] == ["prefill"]
    assert [each["name"] for each in kept["requests"]] == [
        "1 request, 2 steps, no CFG",
        "1 request, 2 steps, no CFG, no graphs",
    ]
    assert len(kept["profiles"]["prefill, fp8"]) == 12


def test_the_real_scale_measures_nothing_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GPU"):
        _ran(tmp_path / "none.json", "--scale", "real")
    assert not (tmp_path / "none.json").exists()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_real_scale_has_the_released_numbers(parts: None, tmp_path: Path) -> None:
    from shapes.scale import REAL, workload

    load = workload(tmp_path, REAL, 32)
    assert (load.layout.live_start, load.live) == (6793, 3953)
    card = load.prompter.card
    assert card.loaded_bytes("bfloat16") / 1e9 == pytest.approx(168.6, abs=0.2)
    assert card.loaded_bytes("bfloat16", "fp8") / 1e9 == pytest.approx(91.4, abs=0.2)


def test_floors_are_those_of_the_known_shapes(parts: None, tmp_path: Path) -> None:
    """By the speeds of a card that is known: about 10 ms, 0.18 ms and 1.15 ms a layer."""
    from shapes.floors import Floors, work
    from shapes.scale import REAL, workload

    load = workload(tmp_path, REAL, 32)
    known = Floors(tflops=760.0, tflops_fp8=1500.0, copy_tb_s=4.18)

    def floor(rows: int, pairs: int, slots: int, read: float, form: str = "dense") -> float:
        sizes = {"rows": rows, "pairs": pairs, "kv_slots": slots, "experts_read": read}
        return known.milliseconds(work(load.arch, form, width_bytes=2, **sizes), form)

    step = 2 * 3953, 2 * 3953 * 10746, 2 * 10746, 64.0
    assert floor(*step) == pytest.approx(10.0, rel=0.05)
    assert floor(1, 7000, 7000, 8.0) == pytest.approx(0.183, rel=0.05)
    assert floor(16, 16 * 7000, 16 * 7000, 56.4) == pytest.approx(1.15, rel=0.05)
    assert floor(*step, form="fp8") < 0.75 * floor(*step)


def test_pairs_are_those_of_the_mask(parts: None) -> None:
    from shapes.rows import _pairs

    for spans in ((), ((3, 9),), ((2, 5), (7, 12))):
        parts_of = pieces(0, 14, spans)
        assert _pairs(parts_of) == int(visibility(parts_of, 14).sum())
