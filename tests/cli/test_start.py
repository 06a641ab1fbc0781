"""What each command imports: a start costs what its modules do (see benchmarks/README.md)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Of a run's libraries; `torch._dynamo` brings sympy and half of torch.
HEAVY = ("torch", "transformers", "diffusers", "torchvision", "scipy", "skimage", "av", "lpips")
OF_PICTURES = (*HEAVY[1:], "torch._dynamo", "sympy", "peft", "accelerate", "ray")
# Where bitsandbytes is installed, peft imports it.
OF_VIDEOS = ("skimage", "lpips", "ray", "datasets", "onnx", "sklearn", "matplotlib")
SHORT = {"prompt": "a red circle", "num_inference_steps": 1, "seed": 1}
VIDEO = SHORT | {"task": "t2v", "size": "32x32", "num_frames": 5}
SCRIPT = """
import json, sys
from hyimg_cli.cli import app
for words, heavy in json.loads(sys.argv[1]):
    code = app.run(words)
    assert code == 0, (words, code)
    found = set(heavy) & set(sys.modules)
    assert not found, (words, found)
"""


def run(folder: Path, *commands: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    """Runs commands in a process of their own, each with what is not to be imported by then."""
    words = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_no_library_of_a_run_is_imported_without_one(
    run_cli: Any, write_manifest: Any, tmp_path: Path
) -> None:
    write_manifest(SHORT | {"custom_id": "a", "size": "64x64"})
    assert run_cli("generate", "jobs.jsonl", "-o", "out", "--device", "cpu").code == 0
    write_manifest(VIDEO, name="videos.jsonl")
    picture = str(next((tmp_path / "out").rglob("a*.png")))
    commands = (
        *(("check", name) for name in ("jobs.jsonl", "videos.jsonl")),
        *(("plan", name) for name in ("jobs.jsonl", "videos.jsonl")),
        ("info", picture),
        ("report", "out"),
        ("export", "out", "-o", "tars", "--format", "webdataset", "--allow-licence", "unknown"),
        ("eval", "psnr", picture, picture),
    )
    run(tmp_path, *((words, HEAVY) for words in commands))


@pytest.mark.thorough
@pytest.mark.parametrize(("line", "heavy"), [(SHORT, OF_PICTURES), (VIDEO, OF_VIDEOS)])
def test_a_run_imports_libraries_of_its_models_alone(
    line: dict[str, Any], heavy: tuple[str, ...], write_manifest: Any, tmp_path: Path
) -> None:
    write_manifest(line)
    run(tmp_path, (("generate", "jobs.jsonl", "-o", "out", "--device", "cpu"), heavy))
