"""Video manifests through the command: check and plan without torch, refusals before anything
loads, and the quickstart on the embedded checkpoint.
"""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest

from hyimg_cli.models import registry

Run = Callable[..., Any]
Write = Callable[..., Path]
BAD = [
    {"num_frames": 0},
    {"num_frames": 2},
    {"num_frames": 6},
    {"num_frames": 1000000},
    {"height": 30, "width": 64},
    {"height": 17, "width": 64},
    {"prompt": "word " * 2000},
    {"negative_prompt": "word " * 2000},
    {"images": ["a.png"]},
    {"bot_task": "think"},
]


def videos(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    base = {"task": "t2v", "prompt": "a dog"}
    return [base | {"custom_id": f"v{n}"} | entry for n, entry in enumerate(entries)]


@pytest.mark.parametrize("command", [["check"], ["plan"], ["cache", "list"]])
def test_no_torch_is_imported(write_manifest: Write, tmp_path: Path, command: list[str]) -> None:
    manifest = [] if command[0] == "cache" else [str(write_manifest(*videos({})))]
    code = (
        "import sys; from hyimg_cli.cli import app; code = app.run(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'av'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, *manifest],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_check_names_every_fault_at_once(run_cli: Run, write_manifest: Write) -> None:
    ran = run_cli("check", write_manifest(*videos(*BAD, {})), "--json")
    faults = [line["fault"] for line in ran.json_lines[:-1]]
    assert ran.code == 2
    assert [int(fault["where"].split(":")[1]) for fault in faults] == list(range(1, len(BAD) + 1))
    assert ran.json_lines[-1]["summary"] == {"jobs": 1, "faults": len(BAD)}
    codes = [fault["code"].removeprefix("manifest.") for fault in faults]
    assert codes == [
        "out-of-range", "frames", "frames", "out-of-range", "size", "size", "prompt-too-long",
        "prompt-too-long", "foreign-field", "foreign-field",
    ]  # fmt: skip
    assert all(fault["hint"] for fault in faults)


def test_generate_refuses_what_check_refuses_and_makes_nothing(
    run_cli: Run, write_manifest: Write, tmp_path: Path
) -> None:
    assert run_cli("generate", write_manifest(*videos({}, {"num_frames": 6}))).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]


def test_the_plan_shows_videos_beside_pictures(run_cli: Run, write_manifest: Write) -> None:
    lines = videos({"size": "320x288"}, {"seed": 2, "size": "320x288"}, {"guidance_scale": 1})
    lines.append({"custom_id": "picture", "prompt": "a red circle"})
    manifest = write_manifest(*lines)
    (plan,) = run_cli("plan", manifest, "--steps", "10", "--num-frames", "5", "--json").json_lines
    tall, _, pictures = plan["groups"]
    assert (tall["custom_ids"], tall["latent_grid"]) == (["v0", "v1"], [2, 18, 20])
    assert (tall["denoise_steps"], tall["denoise_forwards"], tall["prompts"]) == (20, 40, 2)
    assert (tall["tiles"], len(tall["tile_shapes"])) == ([2, 2], 4)
    assert pictures["custom_ids"] == ["picture"]
    assert plan["total"]["jobs"] == 1
    assert tall["denoise_flops"] > 40 * 2 * (2 * 18 * 20) ** 2
    held = plan["weight_bytes"]["tiny-video"]
    assert {"transformer", "vae", "text_encoder"} <= held.keys()
    narrow = run_cli("plan", manifest, "--num-frames", "5", "--dtype", "bfloat16", "--json")
    assert held["vae"] == 2 * narrow.json_lines[0]["weight_bytes"]["tiny-video"]["vae"]
    text = run_cli("plan", manifest, "--num-frames", "5").out
    assert "320x288, 5 frames" in text
    assert "on one H100 or H200" in text


def test_no_room_is_said_before_anything_loads(
    run_cli: Run, write_manifest: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 10**4))
    ran = run_cli("generate", write_manifest(*videos({"size": "832x480"})))
    assert (ran.code, "storage.full" in ran.err) == (3, True)
    assert "loaded" not in ran.err


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_cache_folder_that_is_a_file_is_said_before_anything_loads(
    run_cli: Run, write_manifest: Write, tmp_path: Path, below: str
) -> None:
    (tmp_path / "kept").write_text("a file")
    ran = run_cli("generate", write_manifest(*videos({})), "--cache-dir", f"kept{below}")
    assert (ran.code, "storage.cache" in ran.err, "--no-disk-cache" in ran.err) == (3, True, True)
    assert "loaded" not in ran.err


def test_a_plan_says_what_a_whole_decode_takes_and_which_prompt_is_missing(
    run_cli: Run, write_manifest: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"task": "t2v", "prompt": "a dog", "size": "272x48", "num_frames": 1}
    manifest = write_manifest(line, line | {"negative_prompt": "blur"})
    tiled, whole = (
        run_cli("plan", manifest, *flags, "--json").json_lines[0]["groups"][0]
        for flags in ((), ("--no-vae-use-tiling",))
    )
    assert (tiled["tiles"], whole["tiles"]) == ([1, 2], [1, 1])
    assert tiled["memory"]["decode"]["work"] != whole["memory"]["decode"]["work"]
    assert tiled["without_negative"] == 0, "HunyuanVideo is made for guidance without one"
    card_of = registry.video_card
    monkeypatch.setattr(
        registry, "video_card", lambda *model: replace(card_of(*model), wants_negative=True)
    )
    said = run_cli("plan", manifest).out
    assert "1 job with guidance but no negative prompt" in said
    assert "by GPU memory: 12 GB as is, 16 GB as is, 24 GB as is, 48 GB as is" in said


@pytest.mark.parametrize("flag", [("--frames", "jpg"), ("--checkpoint-every", "-1"),
                                  ("--fps", "0"), ("--num-frames", "x")])  # fmt: skip
def test_flags_are_checked(run_cli: Run, write_manifest: Write, flag: tuple[str, str]) -> None:
    assert run_cli("check", write_manifest(*videos({})), *flag).code == 2


def test_the_quickstart_runs_and_a_second_run_loads_no_encoder(
    run_cli: Run, tmp_path: Path
) -> None:
    first = run_cli("generate", "quickstart-video", "-o", "first", "--json")
    assert first.code == 0, first.err
    *lines, last = first.json_lines
    assert (last["summary"]["done"], len(lines)) == (6, 6)
    assert max(line["cache"]["encoder_runs"]["text_encoder"] for line in lines) == 7
    for line in lines:
        with av.open(str(tmp_path / "first" / line["outputs"][0]["path"])) as container:
            count = sum(1 for _ in container.decode(video=0))
        assert count == line["outputs"][0]["num_frames"]
    again = run_cli("generate", "quickstart-video", "-o", "second", "--json", "--no-prewarm")
    assert [line["cache"]["encoder_runs"] for line in again.json_lines[:-1]] == [{}] * 6
    cold = run_cli(
        "generate", "quickstart-video", "-o", "cold", "--json", "--no-prewarm",
        "--no-prompt-cache", "--no-disk-cache",
    )  # fmt: skip
    digests = [
        {line["custom_id"]: line["outputs"][0]["sha256"] for line in ran.json_lines[:-1]}
        for ran in (first, again, cold)
    ]
    assert digests[0] == digests[1] == digests[2]
    assert run_cli("generate", "quickstart-video", "-o", "first", "--json").json_lines == [
        {"summary": json.loads(json.dumps(_nothing_left(last))), "output_dir": "first"}
    ]


def _nothing_left(last: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run that found everything done."""
    counts = dict.fromkeys(last["summary"], 0) | {"skipped": 6}
    times = {name: 0.0 for name in counts if name.endswith("_s")}
    return counts | times | {"seconds_per_picture": None}
