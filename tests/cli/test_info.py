"""`hyimg info`: records of files in order, and errors for files without one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pngs import write_png

RECORD = {
    "format": 2,
    "version": "0.1.0",
    "job": {"custom_id": "cat", "prompt": "a \x1b[31mred\x1b[0m cat\nasleep", "images": ["a.png"]},
    "size": "64x64",
    "cot_text": "<think>red</think>",
    "model_fingerprint": "ab" * 32,
    "source_sha256": ["cd" * 32],
    "settings": {"device": "cpu", "dtype": "float32"},
    "packages": {"torch": "2.11.0"},
}
Run = Callable[..., Any]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    texts = {
        "ours.png": {"hyimg": json.dumps(RECORD), "parameters": "a red cat"},
        "other.png": {"parameters": "a dog\nSteps: 20, Sampler: \x1b]0;Euler"},
        "silent.png": {},
    }
    for name, text in texts.items():
        write_png(tmp_path / name, pixels, text)
    return {name.partition(".")[0]: tmp_path / name for name in texts}


def test_what_ours_says(run_cli: Run, files: dict[str, Path]) -> None:
    ran = run_cli("info", files["ours"])
    assert (ran.code, ran.err) == (0, "")
    for told in (
        "ours.png: made by hyimg 0.1.0",
        "custom_id: cat",
        "text before the picture: <think>red</think>",
        f"sha256 of source image 1: {'cd' * 32}",
        "made with: device cpu, dtype float32",
        "by: torch 2.11.0",
    ):
        assert told in ran.out


def test_nothing_steers_the_terminal(run_cli: Run, files: dict[str, Path]) -> None:
    ran = run_cli("info", files["ours"], files["other"])
    assert "\x1b" not in ran.out
    assert r"prompt: a \u001b[31mred\u001b[0m cat\nasleep" in ran.out
    assert "not made by hyimg; its parameters:\n  a dog\n  Steps: 20" in ran.out


def test_json_is_an_object_a_file(run_cli: Run, files: dict[str, Path]) -> None:
    ran = run_cli("info", files["ours"], files["other"], "--json")
    ours, other = ran.json_lines
    assert ours["record"] == RECORD
    assert (ours["file"], ours["kind"]) == (str(files["ours"]), "png")
    assert "record" not in other
    assert other["parameters"].startswith("a dog")


def test_a_silent_file_does_not_hide_the_others(run_cli: Run, files: dict[str, Path]) -> None:
    ran = run_cli("info", files["silent"], "gone.png", files["ours"])
    assert ran.code == 2
    assert "error[metadata.none]: the picture has no record of how it was made" in ran.err
    assert "error[metadata.missing]" in ran.err
    assert "made by hyimg" in ran.out


def test_a_damaged_picture_is_an_error(run_cli: Run, files: dict[str, Path]) -> None:
    files["ours"].write_bytes(files["ours"].read_bytes()[:-30])
    ran = run_cli("info", files["ours"])
    assert (ran.code, ran.out) == (1, "")
    assert "error[source.truncated]" in ran.err


def test_no_torch_is_imported(files: dict[str, Path]) -> None:
    code = (
        "import sys; from hyimg_cli.cli import app; code = app.run(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'diffusers'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "info", str(files["ours"])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
