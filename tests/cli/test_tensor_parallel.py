"""--tensor-parallel-size through the command: one process's pictures, and what is refused."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_process import started
from parallel.test_when_ranks_fail import gone_within
from PIL import Image

Run = Callable[..., Any]
Write = Callable[..., Path]
TP, CFG = "--tensor-parallel-size", "--cfg-parallel-size"
LINE = {"custom_id": "a", "prompt": "a red circle", "num_inference_steps": 3, "seed": 4}
# The largest difference of a level out of 255: sums over ranks round in another order.
MOST_LEVELS = 1


@pytest.mark.thorough
def test_two_ranks_make_the_picture_of_one_process_and_end_with_it(
    run_cli: Run, write_manifest: Write, tmp_path: Path
) -> None:
    """Stopped by a signal in its second job, and gone on with."""
    short = LINE | {"bot_task": "think"}
    manifest = write_manifest(short, LINE | {"custom_id": "b", "num_inference_steps": 300})
    running = started(manifest, tmp_path, TP, "2", "--no-report", "--batching-max-size", "1")
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    members = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    assert len(members) == 1 or not children.exists()
    os.kill(running.pid, signal.SIGTERM)
    running.go_on()
    out, messages = running.ended()
    assert running.returncode == 128 + signal.SIGTERM, messages
    assert gone_within(members, 60)
    assert "2 ranks" in messages
    assert f"--json {TP} 2" in messages, "the line that goes on has the ranks"

    alone = run_cli(
        "generate",
        manifest,
        "-o",
        "alone",
        "--select",
        "a",
        "--no-prewarm",
        "--no-report",
        "--json",
    )
    assert alone.code == 0, alone.err
    one, two = alone.json_lines[0], json.loads(out.splitlines()[0])
    assert one["parallel"] is None
    spread = {"branch_ranks": 1, "tensor_ranks": 2, "context_ranks": 1, "decode": None}
    assert two["parallel"] == spread
    assert two["cot_token_ids"] == one["cot_token_ids"]
    assert two["kv_reuse"] == one["kv_reuse"]
    pictures = [
        np.asarray(Image.open(tmp_path / folder / "outputs" / "a.png")).astype(int)
        for folder in ("alone", "out")
    ]
    assert np.abs(pictures[0] - pictures[1]).max() <= MOST_LEVELS
    assert _files(tmp_path / "alone") == _files(tmp_path / "out")
    flags = json.loads((tmp_path / "out" / "run.json").read_text())["flags"]
    assert flags["tensor_parallel_size"] == {"value": 2, "origin": "flag"}
    # Rounding is part of the key: one folder has one way of adding.
    assert one["key"] != two["key"]
    again = run_cli("generate", manifest, "-o", "out", TP, "2", "--select", "a", "--json")
    assert again.json_lines[-1]["summary"]["skipped"] == 1
    other = run_cli("generate", manifest, "-o", "out", TP, "4")
    assert (other.code, "--force" in other.err) == (2, True)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ((TP, "3"), "2 kv heads with 3 query heads each cannot be split over 3 ranks"),
        ((TP, "2", "--device", "balanced"), "cannot be used with 2 processes"),
        ((CFG, "2", "--device", "balanced"), f"one GPU each, counted from the first --> {CFG}"),
        ((TP, "2", "--quantization", "nf4"), "nf4 needs rows that are multiples of 64 weights"),
        ((TP, "0"), "out of range"),
    ],
)
def test_what_cannot_be_split_is_refused_by_every_command(
    run_cli: Run, write_manifest: Write, flags: tuple[str, ...], what: str
) -> None:
    manifest = write_manifest(LINE)
    for command in ("check", "plan", "generate"):
        ran = run_cli(command, manifest, *flags)
        assert (ran.code, ran.out) == (2, "")
        # A message may be wrapped.
        assert what in " ".join(ran.err.split())


def test_videos_are_not_split(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest({"task": "t2v", "prompt": "a dog", "num_frames": 1})
    ran = run_cli("check", manifest, TP, "3")
    assert ran.code == 0
    assert f"{TP} applies to pictures only" in ran.err


def test_the_plan_says_bytes_by_rank(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest(LINE)
    (plain,) = run_cli("plan", manifest, "--json").json_lines
    (plan,) = run_cli("plan", manifest, TP, "4", "--json").json_lines
    assert "memory_by_rank" not in plain
    assert plan["memory"] == plain["memory"]
    whole, (first, *others) = plan["memory"]["tiny-image"], plan["memory_by_rank"]["tiny-image"]
    assert [one["rank"] for one in others] == [1, 2, 3]
    assert others[0]["weights"] < first["weights"] < whole["weights"]
    # Two kv heads over four ranks: each has one of them.
    assert first["kv"] == others[0]["kv"] == whole["kv"] // 2
    text = run_cli("plan", manifest, TP, "4").out
    assert "rank 3: " in text
    (both,) = run_cli("plan", manifest, TP, "2", CFG, "2", "--json").json_lines
    (split,) = run_cli("plan", manifest, TP, "2", "--json").json_lines
    rank_0, rank_1 = split["memory_by_rank"]["tiny-image"]
    # Each branch has all layers and all K/V on its ranks; the rest is rank 0's.
    others = [rank_1 | {"rank": number} for number in (1, 2, 3)]
    assert both["memory_by_rank"]["tiny-image"] == [rank_0, *others]
