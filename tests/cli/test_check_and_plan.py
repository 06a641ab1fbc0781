"""`check` names every fault and `plan` promises counts; neither runs anything."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Write = Callable[..., Path]


def test_a_good_manifest_exits_0(run_cli: Run, write_manifest: Write, write_picture: Write) -> None:
    write_picture("in.png")
    manifest = write_manifest({"prompt": "a"}, {"prompt": "b", "images": ["in.png"]})
    ran = run_cli("check", manifest)
    assert (ran.code, ran.out) == (0, "")
    assert run_cli("check", manifest, "-q").err == ""


def test_every_fault_of_lines_and_files_is_named(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest(
        {"prompt": ""},
        {"prompt": "x", "promt": "y"},
        {"prompt": "x", "images": ["missing.png"]},
        "not json",
    )
    ran = run_cli("check", manifest, "--json")
    assert ran.code == 2
    *faults, last = ran.json_lines
    places = [fault["fault"]["where"] for fault in faults]
    for line in range(1, 5):
        assert any(place.startswith(f"jobs.jsonl:{line}") for place in places)
    assert last["summary"] == {"jobs": 1, "faults": 4}
    assert all(fault["fault"]["message"] and fault["fault"]["code"] for fault in faults)


def test_faults_of_files_alone_exit_1(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("not a picture")
    lines = [{"prompt": "x", "images": [name]} for name in ("gone.png", "empty.png", "text.png")]
    ran = run_cli("check", write_manifest(*lines), "--json")
    codes = [line["fault"]["code"] for line in ran.json_lines[:-1]]
    assert (ran.code, codes) == (1, ["source.missing", "source.empty", "source.not-an-image"])


def test_a_missing_model_exits_3(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    ran = run_cli("check", write_manifest({"prompt": "x"}), "--model", tmp_path / "nowhere")
    assert ran.code == 3
    assert "error[checkpoint." in ran.err


def test_ten_thousand_lines_are_checked_in_two_seconds(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest(*({"prompt": "a red circle", "seed": n} for n in range(10_000)))
    run_cli("check", write_manifest({"prompt": "warm"}, name="warm.jsonl"))
    started = time.perf_counter()
    assert run_cli("check", manifest).code == 0
    assert time.perf_counter() - started < 2


def test_the_plan_counts_what_generate_will_do(
    run_cli: Run, write_manifest: Write, write_picture: Write
) -> None:
    write_picture("in.png")
    manifest = write_manifest(
        {"custom_id": "a", "prompt": "x", "num_inference_steps": 3},
        {"custom_id": "b", "prompt": "y", "images": ["in.png"], "num_inference_steps": 7},
    )
    (plan,) = run_cli("plan", manifest, "--json").json_lines
    assert (plan["total"]["jobs"], plan["total"]["denoise_steps"]) == (2, 10)
    assert plan["total"]["image_encodes"] >= 1
    assert plan["total"]["kv_bytes_peak"] > 0
    assert plan["weight_bytes"]["tiny-image"] > 0
    planned = [name for group in plan["groups"] for name in group["custom_ids"]]
    assert sorted(planned) == ["a", "b"]


def test_the_plan_leaves_out_what_is_done(
    run_cli: Run, write_manifest: Write, fake_session: Any
) -> None:
    manifest = write_manifest({"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "y"})
    run_cli("generate", manifest, "--limit", "1")
    (plan,) = run_cli("plan", manifest, "--json").json_lines
    assert (plan["skipped"], plan["total"]["jobs"]) == (["a"], 1)


def test_the_plan_as_text_is_data_on_stdout(run_cli: Run) -> None:
    ran = run_cli("plan", "quickstart")
    assert (ran.code, ran.err) == (0, "")
    assert "9 jobs" in ran.out


@pytest.mark.parametrize("command", ["check", "plan"])
def test_neither_writes_anything(run_cli: Run, tmp_path: Path, command: str) -> None:
    run_cli(command, "quickstart")
    assert not list(tmp_path.iterdir())
