"""`check` names every fault and `plan` promises counts; neither runs anything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import processor_s
from released import released_folder

from hyimg_cli.cli.commands import LazyCommand

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
    ran = run_cli("check", write_manifest(*lines, {"prompt": "one that can run"}), "--json")
    codes = [line["fault"]["code"] for line in ran.json_lines[:-1]]
    assert (ran.code, codes) == (1, ["source.missing", "source.empty", "source.not-an-image"])


def test_a_missing_model_exits_3(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    ran = run_cli("check", write_manifest({"prompt": "x"}), "--model", tmp_path / "nowhere")
    assert ran.code == 3
    assert "error[checkpoint." in ran.err


def test_ten_thousand_lines_are_checked_in_two_seconds(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest(*({"prompt": "a red circle", "seed": n} for n in range(10_000)))
    run_cli("check", write_manifest({"prompt": "warm"}, name="warm.jsonl"))

    def checked() -> None:
        assert run_cli("check", manifest).code == 0

    assert processor_s(checked, 2) < 2


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
    assert plan["memory"]["tiny-image"]["kv"] > 0
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


EVERY_FLAG = (
    "-o out --no-resume --retry-failed --force --fail-fast --max-retries 1 --skip-invalid "
    "--dry-run --no-metadata --no-kv-reuse --allow-recompute --batching-max-size 2 "
    "--no-batch-invariant --prefix-cache-mb 1 --prefix-cache-host-mb 1 --cache-dir kept "
    "--no-disk-cache --disk-cache-mb 1 --no-prewarm --select *a --limit 1 --shard 1/1 "
    "--model tiny-image --video-model tiny-video --num-frames 5 --fps 8 --negative-prompt blur "
    "--no-prompt-cache --checkpoint-every 2 --frames png "
    "--revision main --device cuda:1 --dtype float32 --quantization fp8 --steps 3 "
    "--guidance-scale 2 --flow-shift 2 --seed 1 --size 1:1 --bot-task none --drop-think "
    "--use-system-prompt custom --system-prompt hello --ar-seed 1 --temperature 0 --top-k 1 "
    "--top-p 0.5 --max-new-tokens 9 --assume-think 9 --progress none -v"
)


def test_the_three_commands_take_the_same_flags() -> None:
    taken = [
        [parameter.opts for parameter in LazyCommand(name).load_command().params]
        for name in ("generate", "plan", "check")
    ]
    assert taken[0] == taken[1] == taken[2]


@pytest.mark.parametrize("command", ["check", "plan"])
def test_each_reads_a_command_line_of_generate(
    run_cli: Run, write_manifest: Write, tmp_path: Path, command: str
) -> None:
    manifest = write_manifest({"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "y"})
    ran = run_cli(command, manifest, *EVERY_FLAG.split(), "--json")
    (told,) = ran.json_lines
    counts = told["summary"] if command == "check" else told["total"]
    assert (ran.code, counts["jobs"]) == (0, 1)
    assert counts.get("denoise_steps", 3) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]


def test_check_reads_the_files_of_what_is_selected(run_cli: Run, write_manifest: Write) -> None:
    lines = [{"custom_id": name, "prompt": "x", "images": [f"{name}.png"]} for name in "ab"]
    can_run = {"custom_id": "b2", "prompt": "x"}
    ran = run_cli("check", write_manifest(*lines, can_run), "--select", "b*", "--json")
    (fault, last) = ran.json_lines
    assert (ran.code, last["summary"]) == (1, {"jobs": 2, "faults": 1})
    assert "b.png" in fault["fault"]["where"]


def test_check_names_the_faults_before_a_pattern_without_jobs(
    run_cli: Run, write_manifest: Write
) -> None:
    manifest = write_manifest({"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": ""})
    ran = run_cli("check", manifest, "--select", "b")
    assert ran.code == 2
    assert "jobs.jsonl:2" in ran.err
    assert "--select 'b' matches none" in ran.err


def test_one_fault_of_many_lines_is_told_once(run_cli: Run, write_manifest: Write) -> None:
    same = {"prompt": "x", "bot_task": "none", "max_new_tokens": 5}
    manifest = write_manifest(*[same] * 30, {"prompt": ""})
    ran = run_cli("check", manifest)
    assert ran.code == 2
    assert ran.err.count("error[manifest.unconsumed]") == 1
    assert ran.err.count("  --> jobs.jsonl:") == 10 + 1
    assert "  --> jobs.jsonl:10: max_new_tokens\n  --> and 20 more; hyimg check --json" in ran.err
    assert ran.err.endswith("\n0 jobs, 31 faults\n")
    assert len(run_cli("check", manifest, "--json").json_lines) == 31 + 1
    refused = run_cli("generate", manifest)
    assert refused.code == 2
    assert refused.err.count("error[manifest.unconsumed]") == 1
    assert "error[manifest]: 31 faults in the manifest\n  --> jobs.jsonl\n" in refused.err


def test_faults_that_differ_are_each_told(run_cli: Run, write_manifest: Write) -> None:
    ran = run_cli("check", write_manifest({"prompt": "x", "promt": 1}, {"prompt": "x", "seeed": 1}))
    assert ran.err.count("error[") == 2


def test_a_plan_takes_no_text_to_be_longer_than_it_may_be(
    run_cli: Run, write_manifest: Write
) -> None:
    lines = [{"prompt": "x", "bot_task": "think", "max_new_tokens": n} for n in (7, 4000)]
    (plan,) = run_cli("plan", write_manifest(*lines), "--assume-think", "50", "--json").json_lines
    assert plan["total"]["think_rows"] == 7 + 50


def test_a_checkpoint_without_its_weights_can_be_planned(
    run_cli: Run, write_manifest: Write, write_picture: Write, tmp_path: Path
) -> None:
    """The small files of the released model on a laptop; making pictures names what is missing."""
    write_picture("in.png")
    folder, out = released_folder(tmp_path / "released"), tmp_path / "out"
    manifest = write_manifest(
        {"prompt": "\u4e00\u53ea\u732b \U0001f431", "bot_task": "think_recaption"},
        {"prompt": "warmer", "images": ["in.png"] * 3, "size": "16:9"},
    )
    given = (manifest, "--model", folder, "-o", out)
    assert run_cli("check", manifest, "--model", folder).code == 0
    ran = run_cli("plan", *given, "--json")
    assert ran.code == 0, ran.err
    (plan,) = ran.json_lines
    assert plan["memory"][str(folder)]["weights"] > 160e9
    ran = run_cli("generate", *given)
    assert (ran.code, "32 of 32 shards missing: model-0.safetensors" in ran.err) == (3, True)
    assert not out.exists() or not list(out.glob("outputs/*"))
