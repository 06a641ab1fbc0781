"""The benchmark of the kernels takes every way through on any machine."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyimg_cli.kernels import expert_table
from hyimg_cli.kernels.expert_table import ExpertRow
from hyimg_cli.kernels.experts import plain_experts

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


def _rows(script: dict[str, Any], form: str, *names: str) -> list[Any]:
    return [
        script["Row"]("experts, even", form, count, name, 1.0, 1.0, 1.0, 7, 0, 0)
        for count in (1, 6793)
        for name in names
    ]


def test_a_format_whose_library_is_missing_keeps_its_reckoned_row(tmp_path: Path) -> None:
    """NF4 without bitsandbytes: ours alone ran, and no format's rows are lost for it."""
    script, table = runpy.run_path(str(SCRIPT)), tmp_path / "experts.json"
    rows = _rows(script, "dense", "decode", "grouped") + _rows(script, "nf4", "decode")
    script["_decide"](rows, table)
    assert list(json.loads(table.read_text())["CPU"]) == ["none"]


def test_what_was_measured_before_a_fault_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out, table = runpy.run_path(str(SCRIPT)), tmp_path / "a.json", tmp_path / "b.json"
    run = script["main"].__globals__

    def experts(form: str, *_: Any) -> Any:
        yield from _rows(script, form, "grouped")
        if form == "fp8":
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(run, "_experts", experts)
    for part in ("_floors", "_attention", "_rowwise"):
        monkeypatch.setitem(run, part, lambda *_: [])
    given = [str(SCRIPT), "--small", "--out", str(out), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", given)
    script["main"]()
    assert (
        "experts, fp8: the rest is left out, OutOfMemoryError: ['no room']"
        in capsys.readouterr().out
    )
    assert len(json.loads(out.read_text())["rows"]) == 6
    assert list(json.loads(table.read_text())["CPU"]) == ["nf4", "none"]


def test_groups_of_fp8_rows_are_padded_where_that_is_quicker() -> None:
    script = runpy.run_path(str(SCRIPT))
    for padded, tight, many in ((2.0, 1.9, "scaled_1"), (1.9, 2.0, "scaled")):
        rows = [
            script["Row"]("experts, even", "fp8", count, name, ms, ms, ms, 7, 0, 0)
            for count in (1, 6793)
            for name, ms in (("grouped", 3.0), ("scaled", padded), ("scaled_1", tight))
        ]
        assert script["decided"](rows, "fp8")[0] == ExpertRow(many, many, 0)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return pytest.importorskip("block_scaled")


def test_blocks_stand_for_their_numbers(blocks: Any) -> None:
    """Exact where a scale is a power of two and so are they; elsewhere e4m3 keeps four bits."""
    exact = 2.0 ** torch.randint(-5, 3, (2, 256, 384))
    exact[:, ::128, ::128] = 448 / 64
    found = blocks.Blocks.of(exact, 128)
    assert (found.values.shape, found.scale.shape) == (exact.shape, (2, 2, 3))
    assert torch.equal(found.dense(), exact)
    rows = torch.randn(5, 256) * torch.tensor([1e-3, 1, 10, 1e4, 0])[:, None]
    near = blocks.Blocks.of(rows, 1)
    assert near.scale.shape == (5, 2)
    assert ((near.dense() - rows).norm(dim=1) <= 0.04 * rows.norm(dim=1)).all()


def test_the_twin_of_deep_gemm_is_near_the_weights_it_was_made_of(
    blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the library is given what its twin computes from: rows, blocks, each row's group."""
    torch.manual_seed(0)
    stacks = torch.randn(4, 512, 128) * 0.1, torch.randn(4, 128, 256) * 0.1
    x, (weight, index) = torch.randn(9, 128), torch.rand(9, 4).topk(2, dim=1)
    index[index == 2] = 3
    held = blocks.block_stack(stacks[0]), blocks.block_stack(stacks[1])
    found = blocks.block_experts(x, weight, index, stacks=held, product=blocks.plain_product)
    expected = plain_experts(x, weight, index, *stacks)
    assert 0 < (found - expected).norm() / expected.norm() < 0.08

    def grouped(a: Any, b: Any, out: torch.Tensor, group_R: torch.Tensor) -> None:
        assert group_R.dtype == torch.int32
        assert [len(a[0]) % 128, a[1].shape[1] * 128] == [0, a[0].shape[1]]
        tiles = group_R.view(-1, 128)
        assert (tiles == tiles[:, :1]).all(), "a tile is one group's"
        rows, weights = blocks.Blocks(*a, 1), blocks.Blocks(*b, 128)
        out.copy_(blocks.plain_product(rows, weights, group_R))

    library = SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=grouped)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    ours = blocks.block_experts(x, weight, index, stacks=held, product=blocks.deep_product)
    assert (ours - found).norm() / found.norm() < 0.02
