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
