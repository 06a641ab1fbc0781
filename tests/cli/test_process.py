"""The command as a process with the embedded checkpoint: killed by a signal, resumed, complete."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from held import Held

LINES = (
    {"custom_id": "short", "prompt": "a red circle", "num_inference_steps": 2, "bot_task": "none"},
    {"custom_id": "long", "prompt": "a red circle", "num_inference_steps": 6, "bot_task": "none"},
)


def started(manifest: Path, folder: Path, *flags: str) -> Held:
    """The run at its second job, with the line of its first."""
    process = Held(folder, "generate", str(manifest), "-o", "out", "--json", *flags)
    results = folder / "out" / "results.jsonl"
    process.wait_until(lambda: results.is_file() and results.read_bytes().endswith(b"\n"))
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_a_stopped_run_resumes(
    write_manifest: Callable[..., Path],
    read_lines: Callable[[Path], list[dict[str, Any]]],
    run_cli: Callable[..., Any],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    manifest, results = write_manifest(*LINES), tmp_path / "out" / "results.jsonl"
    stopped = started(manifest, tmp_path)
    os.kill(stopped.pid, number)
    stopped.go_on()
    _, messages = stopped.ended()
    if number is signal.SIGKILL:
        assert stopped.returncode == -number
    else:
        assert stopped.returncode == 128 + number
        assert "to resume: hyimg generate" in messages
    assert [line["custom_id"] for line in read_lines(results)] == ["short"]

    resumed = run_cli("generate", manifest, "-o", "out", "--json")
    assert resumed.code == 0, resumed.err
    long, last = resumed.json_lines
    # Its steps were done when the run stopped, and its latents saved.
    assert (long["custom_id"], long["denoise_steps"]) == ("long", 0)
    assert "all 6 steps were denoised before; decoded from saved latents" in long["notes"]
    assert (last["summary"]["done"], last["summary"]["skipped"]) == (1, 1)
    pictures = sorted(path.name for path in (tmp_path / "out" / "outputs").iterdir())
    assert pictures == ["long.png", "short.png"]


@pytest.mark.thorough
def test_a_journal_that_is_removed_stops_the_run_and_goes_on_where_it_is_put_back(
    write_manifest: Callable[..., Path],
    read_lines: Callable[[Path], list[dict[str, Any]]],
    run_cli: Callable[..., Any],
    tmp_path: Path,
) -> None:
    last = LINES[0] | {"custom_id": "last"}
    manifest, results = write_manifest(*LINES, last), tmp_path / "out" / "results.jsonl"
    stopped = started(manifest, tmp_path, "--batching-max-size", "1", "--no-prewarm")
    there = read_lines(results.rename(tmp_path / "gone.jsonl"))
    stopped.go_on()
    _, messages = stopped.ended()
    assert stopped.returncode == 3, messages
    assert "error[storage.journal]: results.jsonl was removed" in messages
    assert "to resume: hyimg generate" in messages
    assert not results.exists()

    (tmp_path / "gone.jsonl").rename(results)
    resumed = run_cli("generate", manifest, "-o", "out", "--json")
    lines = read_lines(results)
    assert (resumed.code, lines[: len(there)]) == (0, there)
    assert resumed.json_lines[-1]["summary"]["skipped"] == len(there)
    assert [line["custom_id"] for line in read_lines(results)] == ["short", "long", "last"]


def test_pictures_need_nothing_of_films_or_distances(
    write_manifest: Callable[..., Path], write_picture: Callable[..., Path], tmp_path: Path
) -> None:
    lines = (LINES[0], LINES[0] | {"custom_id": "edit", "images": [str(write_picture())]})
    arguments = ["generate", str(write_manifest(*lines)), "-o", str(tmp_path / "out")]
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('av', 'diffusers', 'lpips', 'scipy', 'skimage'))\n"
        # They take longer to import than a small picture to draw.
        "sys.modules |= dict.fromkeys(('torch._dynamo', 'torchvision', 'transformers'))\n"
        "from hyimg_cli.cli.app import run\n"
        f"sys.exit(run({arguments!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
