"""The benchmark at real shapes: its whole way at a small scale, and what it counts at the real."""

import importlib
import json
import re
import runpy
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu.device import fake_gpu
from masks import visibility

from hyimg_cli.models.common.spans import query_spans

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
LAYERS = PER_LAYER | {"whole denoise step, 2 rows"}
LAYOUTS = ("", ", channels last")
COMPUTED = {
    *(
        f"VAE {side}, {kind}{on}"
        for side, kind, on in product(
            ("encode", "decode"), ("float32", "fp16 autocast", "bfloat16"), LAYOUTS
        )
    ),
    *(
        f"convolution, {kind}{on}{how}"
        for kind, on, how in product(
            ("float32", "float16", "bfloat16"), LAYOUTS, ("", ", searched")
        )
    ),
}
APART = COMPUTED | {
    "a token's choice, 1 row",
    "a token's choice, 3 rows",
    "source image encoded",
    "VAE decode, float32, tiled",
    *(
        f"attention, {rows}, {which}"
        for rows in ("1 row", "17 rows", "17 rows, slot by slot")
        for which in ("first length", "second length", "new lengths")
    ),
}
REQUESTS = [
    "1 request, 3 steps, CFG",
    "1 request, 2 steps, no CFG",
    "1 request, 2 steps, no CFG, no graphs",
    "3 requests, 2 steps, no CFG",
    "3 requests, 3 steps, CFG",
]


def _run(*arguments: str) -> None:
    """The script as a command, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")


def _ran(out: Path, *arguments: str) -> dict[str, Any]:
    """Two layers of the tiny network, and what is kept of them."""
    _run("--scale", "tiny", "--layers", "2", "--out", str(out), *arguments)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every row, by one run behind one that does not count: less than half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        rows, timing = (importlib.import_module(f"shapes.{name}") for name in ("run", "timing"))
        once = timing.Pace(warmups=1, least=1, most=1)
        inner = timing.timed
        patch.setattr(rows, "timed", lambda *a, **more: inner(*a, **more | {"pace": once}))
        return _ran(tmp_path_factory.mktemp("measured") / "kept" / "tiny.json")


@pytest.mark.thorough
def test_every_row_of_both_formats_is_there(measured: dict[str, Any]) -> None:
    rows = {(row["name"], row["form"]): row for row in measured["rows"]}
    expected = {*product(LAYERS, ("dense", "fp8")), *((name, "any") for name in APART)}
    assert rows.keys() == expected
    for (name, form), row in rows.items():
        took = row["timed"]
        assert 0 < took["least"] <= took["median"] <= took["most"]
        assert row["layers"] == (None if form == "any" else 2)
        assert not row["fault"]
        # Two layers of four: what is said of all of them is not measured as it is.
        assert not row["is_whole"]
        assert (row["per_layer"] is not None) == (name in PER_LAYER)
        assert (row["floor"] is not None) == (name in PER_LAYER | COMPUTED)
        assert (took["runs"], took["warmups"]) == (1, 1)
        if name in PER_LAYER:
            assert row["per_layer"] == pytest.approx(took["median"] / 2)
            assert row["of_floor"] == pytest.approx(row["per_layer"] / row["floor"])
        if name in COMPUTED:
            assert row["of_floor"] == pytest.approx(took["median"] / row["floor"])


@pytest.mark.thorough
def test_the_users_format_comes_first_and_what_runs_no_layer_once(
    measured: dict[str, Any],
) -> None:
    forms = [row["form"] for row in measured["rows"]]
    assert forms.index("dense") > max(i for i, form in enumerate(forms) if form != "dense")
    names = [row["name"] for row in measured["rows"]]
    assert names.index("VAE decode, float32") < names.index("first step without reuse")


@pytest.mark.thorough
def test_floors_and_circumstances_stand_beside_them(measured: dict[str, Any]) -> None:
    assert measured["floors"]["tflops"] > 0
    assert measured["floors"]["copy_tb_s"] > 0
    facts = {"date", "hardware", "versions", "environment", "scale", "minutes", "notes"}
    assert facts < measured.keys()
    built = [(b["form"], b["layers"], b["of_layers"]) for b in measured["building"]]
    assert built == [("fp8", 2, 4), ("dense", 2, 4)]
    assert any("random weights" in note for note in measured["notes"])


@pytest.mark.thorough
def test_a_length_that_is_new_has_its_first_call_told(measured: dict[str, Any]) -> None:
    rows = [row for row in measured["rows"] if row["shows_first"]]
    assert {row["name"].rsplit(", ", 1)[1] for row in rows} == {"first length", "second length"}
    assert all(row["timed"]["first_ms"] > 0 for row in rows)
    # No other row attends over so many keys: 177 is a whole sequence.
    assert {row["note"] for row in rows} == {"178 keys", "179 keys"}


@pytest.mark.thorough
def test_the_skewed_row_is_skewed(measured: dict[str, Any]) -> None:
    def share(name: str) -> int:
        (row,) = (r for r in measured["rows"] if (r["name"], r["form"]) == (name, "dense"))
        return int(row["note"].rsplit("has ", 1)[1].split(" %")[0])

    assert share("denoise step, 2 rows, skewed routing") > share("denoise step, 2 rows") + 5


@pytest.mark.thorough
def test_requests_run_whole_and_together(measured: dict[str, Any]) -> None:
    served = {each["name"]: each for each in measured["requests"]}
    assert list(served) == REQUESTS
    for name, each in served.items():
        count = int(name.split()[0])
        sizes = each["thinking"], each["drawing"]
        assert (each["finished"], sizes, each["failed"]) == (count, (count, count), [])
        assert (each["form"], each["layers"], each["is_whole"]) == ("fp8", 2, False)
        assert not each["is_cut"]
        # Of so few words one may end a text by chance.
        assert 3 * count < each["events"]["think"] <= 6 * count
        assert each["seconds_each"] == pytest.approx(each["seconds"] / count)
        assert each["planned_bytes"] > 0
    left_out = {(each["name"], each["form"]) for each in measured["left_out"]}
    assert left_out == {("requests", "dense")}


def test_what_time_does_not_allow_is_named(tmp_path: Path) -> None:
    kept = _ran(tmp_path / "cut.json", "--minutes", "0", "--forms", "fp8")
    assert kept["rows"] == kept["requests"] == []
    names = [each["name"] for each in kept["left_out"]]
    assert set(names) == {*LAYERS, *APART, *REQUESTS}
    assert len(names) == len(set(names))
    assert {each["why"] for each in kept["left_out"]} == {"out of time"}


def test_chosen_rows_alone_and_against_a_result_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "some.json", tmp_path / "again.json"
    chosen = ("--forms", "fp8", "--only", "prefill", "1 request, 2*")
    kept = _ran(old, *chosen, "--profile")
    (row,) = kept["rows"]
    assert row["name"] == "prefill"
    assert (row["timed"]["warmups"], row["timed"]["runs"] >= 3) == (2, True)
    assert [each["name"] for each in kept["requests"]] == REQUESTS[1:3]
    assert len(kept["profiles"]["prefill, fp8"]) == 12
    _ran(new, *chosen)
    capsys.readouterr()
    # Nothing is measured, so no GPU is asked for.
    _run("--compare", str(old), str(new))
    lines = capsys.readouterr().out.splitlines()
    told = lines[next(n for n, line in enumerate(lines) if line.startswith("before: ")) :]
    assert [" ".join(line.split()[:3]) for line in told[3:]] == [
        "prefill fp8 " + f"{kept['rows'][0]['per_layer']:.3f}",
        "1 request, 2",
        "1 request, 2",
    ]


def test_as_many_layers_as_memory_has_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fewer.json"
    _run("--scale", "tiny", "--memory-gb", "0.044", "--only", "prefill", "--out", str(out))
    kept = json.loads(out.read_text())
    rows = {row["form"]: (row["layers"], row["is_whole"]) for row in kept["rows"]}
    assert rows == {"fp8": (3, False), "dense": (2, False)}
    assert [b["layers"] for b in kept["building"]] == [3, 2]
    told = capsys.readouterr().out
    assert "fp8: 3 of 4 layers" in told
    assert "dense: 2 of 4 layers" in told


def test_a_checkpoint_is_written_loaded_and_run(tmp_path: Path) -> None:
    wanted = ("--parts", "checkpoint", "--only", "checkpoint *", "3 jobs, prewarmed*")
    folder = tmp_path / "checkpoint"
    kept = _ran(tmp_path / "loading.json", *wanted, "--checkpoint", str(folder))
    assert kept["left_out"] == []
    rows = {row["name"]: row for row in kept["rows"]}
    assert list(rows) == [
        "checkpoint written",
        "checkpoint loaded, fp8",
        "checkpoint loaded, dense",
        *(f"3 jobs, prewarmed: {part}" for part in ("load", "prewarm", "pictures")),
        "checkpoint read from disk",
    ]
    shards = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert len(shards) == 3
    for name in ("checkpoint written", "checkpoint loaded, fp8", "3 jobs, prewarmed: load"):
        moved = 1e6 * rows[name]["gb_s"] * rows[name]["timed"]["median"]
        # Headers are in the files alone.
        assert moved == pytest.approx(sum(shards.values()), rel=0.01)
    assert all(row["timed"]["median"] > 0 and not row["fault"] for row in rows.values())
    late = _ran(tmp_path / "late.json", *wanted, "--minutes", "0")
    assert [each["name"] for each in late["left_out"]] == list(rows)
    # A folder that holds one already is left as it is.
    again = _ran(tmp_path / "again.json", *wanted, "--checkpoint", str(folder))
    assert "holds a checkpoint already" in again["left_out"][0]["why"]
    assert {path.name: path.stat().st_size for path in folder.glob("*.safetensors")} == shards


def test_the_real_scale_measures_nothing_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GPU"):
        _ran(tmp_path / "none.json", "--scale", "real")
    assert not (tmp_path / "none.json").exists()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_real_scale_has_the_released_numbers(parts: None, tmp_path: Path) -> None:
    from workload import REAL, workload

    load = workload(tmp_path, REAL, 32)
    assert (load.layout.live_start, load.live) == (6793, 3953)
    card = load.prompter.card
    assert card.loaded_bytes("bfloat16") / 1e9 == pytest.approx(168.6, abs=0.2)
    assert card.loaded_bytes("bfloat16", "fp8") / 1e9 == pytest.approx(91.4, abs=0.2)


def test_floors_are_those_of_the_known_shapes(parts: None, tmp_path: Path) -> None:
    """By the speeds of a card that is known: about 10 ms, 0.18 ms and 1.15 ms a layer."""
    from shapes.floors import Floors, work
    from workload import REAL, workload

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
        parts_of = query_spans(0, 14, spans)
        assert _pairs(parts_of) == int(visibility(parts_of, 14).sum())


def test_the_hours_commands_name_what_there_is(
    parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_shape
    from shapes import checkpoint, serving
    from shapes.rows import groups
    from workload import REAL, workload

    page = (FOLDER / "gpu.md").read_text()
    commands = re.findall(r"python benchmarks/real_shape\.py ([^\n`]+)", page)
    assert len(commands) >= 6
    names = {name for group in groups(workload(tmp_path, REAL, 1)) for name in group.names}
    names |= {*serving.names(REAL), *checkpoint.names(REAL, torch.device("cuda:0"))}
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["real_shape.py", *shlex.split(command)])
        for pattern in real_shape._arguments().only:
            assert any(fnmatch(name, pattern) for name in names), pattern
    for named in re.findall(r"^\| `([^|]+)` \|", page, re.MULTILINE):
        for start in named.split("`, `"):
            assert any(name.startswith(start.split(",")[0]) for name in names), start


def test_a_result_stays_where_a_lent_machine_keeps_it(
    parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_shape

    def out(*given: str) -> Path | None:
        monkeypatch.setattr(sys, "argv", ["real_shape.py", *given])
        found: Path | None = real_shape._arguments().out
        return found

    monkeypatch.delenv("OUT", raising=False)
    assert out() is None
    monkeypatch.setenv("OUT", str(tmp_path))
    assert out() == tmp_path / "real-shape.json"
    assert out("--out", "own.json") == Path("own.json")


def test_layers_that_fit_by_what_is_free(parts: None, tmp_path: Path) -> None:
    from shapes.network import layers_that_fit
    from workload import REAL, workload

    folders = [tmp_path / name for name in ("whole", "fewer")]
    for folder in folders:
        folder.mkdir()
    load, fewer = (workload(folder, REAL, n) for folder, n in zip(folders, (32, 18), strict=True))

    def fits(free_gb: float) -> tuple[int, int]:
        fp8, dense = (layers_that_fit(load, form, 1e9 * free_gb) for form in ("fp8", "dense"))
        return fp8, dense

    # An H200, an H100 of 80 GB, a card of 48 and one on which nothing fits.
    assert [fits(free) for free in (149.5, 84.5, 48, 16)] == [(32, 22), (18, 10), (7, 4), (1, 1)]
    # By the plan's own counting, of a network of so many.
    card = fewer.prompter.card
    kv = 16 * fewer.layout.live_stop * card.kv_bytes_per_token
    held = card.loaded_bytes("bfloat16", "fp8") + kv + 3 * card.vae_bytes(832 * 1216, "cuda")
    assert held < 84.5e9 < held * 19 / 18
    # No more than were asked for.
    assert layers_that_fit(fewer, "fp8", 149.5e9) == 18


@pytest.mark.thorough
def test_the_vae_in_another_dtype_and_layout_draws_the_same(parts: None, tmp_path: Path) -> None:
    from random_network import build
    from shapes import pictures
    from workload import TINY, workload

    torch.manual_seed(0)
    load = workload(tmp_path, TINY, 1)
    vae = build(load.arch, "dense", torch.device("cpu"), torch.float32).vae
    latents = torch.randn(1, load.arch.vae.latent_channels, 4, 4)

    def drawn(kind: str, *, is_last: bool) -> Any:
        own = pictures._as(vae, kind, is_last=is_last)
        of_five = [weight for weight in own.state_dict().values() if weight.dim() == 5]
        layout = torch.channels_last_3d if is_last else torch.contiguous_format
        assert all(weight.is_contiguous(memory_format=layout) for weight in of_five)
        half = kind == "bfloat16"
        assert {w.dtype for w in of_five} == {torch.bfloat16 if half else torch.float32}
        has_autocast = kind == "fp16 autocast"
        return pictures._call(own, "decode", latents, has_autocast=has_autocast)()

    plain = drawn("float32", is_last=False)
    assert torch.equal(plain, vae.decode(latents))
    spread = plain.std()
    for is_last in (False, True):
        for kind, dtype, near in (
            ("float32", torch.float32, 1e-4),
            ("fp16 autocast", torch.float16, 0.02),
            ("bfloat16", torch.bfloat16, 0.1),
        ):
            found = drawn(kind, is_last=is_last)
            assert found.dtype == dtype
            assert (found.float() - plain).std() < near * spread


@pytest.mark.thorough
def test_cases_are_made_on_a_gpu_too(
    parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one without memory or time: devices, dtypes and names agree."""
    pytest.importorskip("triton")
    from random_network import build
    from shapes import lengths, rows
    from shapes.cases import Subject
    from shapes.floors import Floors
    from workload import TINY, workload

    from hyimg_cli.kernels.choice import decode_attention
    from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
    from hyimg_cli.models.hunyuan_image3.graphs import DecodeGraphs

    gpu = torch.device("cuda:0")
    monkeypatch.setattr(
        rows, "graphs_of", lambda network, _: DecodeGraphs(network, decode_attention(gpu), None)
    )
    monkeypatch.setattr(rows, "routing", lambda _network, call: (call() is None, 0.25))
    monkeypatch.setattr(lengths, "profiled", lambda _call, _device: [("cudnn_sdpa", 1.0, 1)])
    # Autocast looks for a GPU itself.
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    load = workload(tmp_path, TINY, 2)
    with fake_gpu():
        network = build(load.arch, "fp8", gpu, torch.bfloat16)
        subject = Subject("fp8", 2, Floors(760.0, 1500.0, 4.2))
        bench = rows.Bench(HunyuanImage3(network, load.prompter), load, subject)
        groups = rows.groups(load)
        for group in (groups[0], *(group for group in groups if group.is_apart)):
            made = list(group.cases(bench))
            assert tuple(case.name for case in made) == group.names
            for case in made:
                case.call()
            kernels = [case.kernel() for case in made if case.kernel is not None]
            assert set(kernels) <= {("cudnn_sdpa", "")}


def test_a_hoppers_lost_kernel_is_told(parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from shapes import lengths

    found = [("triton_norm", 3.0, 1), ("flash_fwd_kernel", 2.0, 1)]
    monkeypatch.setattr(lengths, "profiled", lambda _call, _device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    gpu = torch.device("cuda:0")
    name, fault = lengths.attention_kernel(lambda: None, gpu)
    assert name == "flash_fwd_kernel"
    assert "not cuDNN's kernel" in fault
    found[1] = ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 2.0, 1)
    assert lengths.attention_kernel(lambda: None, gpu) == (found[1][0], "")
    found[1] = ("flash_fwd_kernel", 2.0, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    assert lengths.attention_kernel(lambda: None, gpu) == ("flash_fwd_kernel", "")


def test_a_row_that_fails_leaves_the_others(parts: None, tmp_path: Path) -> None:
    from shapes.cases import Case, Subject
    from shapes.kept import Kept
    from shapes.run import Run
    from shapes.timing import Deadline
    from workload import TINY

    def broken() -> None:
        raise RuntimeError("no such kernel")

    def cases() -> Iterator[Case]:
        yield Case("first", broken)
        yield Case("second", lambda: None)
        broken()

    asked = Namespace(scale=TINY, profile=False)
    kept = Kept(tmp_path / "kept.json", {})
    run = Run(asked, torch.device("cpu"), Deadline(60), kept)
    run.rows(("first", "second", "third"), cases, Subject("fp8", 1))
    assert [row.name for row in kept.rows] == ["second"]
    why = "RuntimeError: no such kernel"
    assert kept.left_out == [{"name": n, "form": "fp8", "why": why} for n in ("first", "third")]
    assert json.loads(kept.out.read_text())["rows"] == [asdict(kept.rows[0])]


def test_results_of_other_machines_and_layers_are_held_against_each_other(parts: None) -> None:
    from shapes.compare import compared

    def result(gpu: str, layers: int, took: float, *more: dict[str, Any]) -> dict[str, Any]:
        timed = {"median": took, "least": 0.9 * took, "most": 1.1 * took, "first_ms": 60.0}
        row = {"form": "fp8", "layers": layers, "timed": timed, "per_layer": None}
        return {
            "date": "2026-01-01",
            "hardware": {"gpus": [gpu]},
            "versions": {"torch": "2.11.0"},
            "building": [{"form": "fp8", "layers": layers}],
            "requests": [],
            "rows": [
                row | {"name": "denoise", "per_layer": took / layers},
                row | {"name": "whole", "shows_first": True},
                *more,
            ],
        }

    alone = {"name": "new", "form": "any", "layers": None, "per_layer": None}
    alone["timed"] = {"median": 1.0, "least": 1.0, "most": 1.0, "first_ms": 1.0}
    lines = compared(result("H100", 18, 180.0), result("H200", 32, 256.0, alone))
    assert lines == [
        "before: H100; torch 2.11.0; fp8 18 layers; 2026-01-01",
        "now:    H200; torch 2.11.0; fp8 32 layers; 2026-01-01",
        "    ! hardware differ: gpus ['H100'] and ['H200']",
        f"{'':48} {'':6} {'before':>12} {'now':>12}  now / before",
        f"{'denoise':48} fp8    {'10.000':>12} {'8.000':>12}     0.800"
        " (a layer's time, of 18 and 32)",
        f"{'whole':48} fp8    {'180.000':>12} {'256.000':>12}     1.422"
        " (NOT of as many layers: 18 and 32)",
        f"{'whole, first call':48} fp8    {'60.000':>12} {'60.000':>12}     1.000"
        " (NOT of as many layers: 18 and 32; within the spread)",
        "now alone: new (any)",
    ]
    (within,) = compared(result("H200", 32, 256.0), result("H200", 32, 250.0))[3:4]
    assert within.endswith("0.977 (within the spread)")
