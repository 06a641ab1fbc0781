"""SIGKILL at random moments of every phase, then the same command again: the same files.

The children of one process that has imported everything are killed, so that a kill costs about a
second. KILLS=40 in the environment kills more often.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KILLS = int(os.environ.get("KILLS", "4"))
LINES = [
    {"custom_id": "first", "task": "t2v", "prompt": "a dog", "seed": 1, "steps": 5},
    {"custom_id": "second", "task": "t2v", "prompt": 'a sign "open"', "seed": 2, "steps": 4},
    {"custom_id": "third", "task": "t2v", "prompt": "a dog", "seed": 3, "num_frames": 5},
]
# Runs the command once for each entry of the plan on standard input: [folder, event, delay]. In
# the child the process kills itself `delay` seconds behind its event-th event; -1: it may end.
DRIVER = """
import json, os, signal, sys, threading
import torch, diffusers
from hyimg_cli.cli import app
from hyimg_cli.engine.session import Session
from hyimg_cli.models import registry
import hyimg_cli.models.diffusers_video.loading, hyimg_cli.models.diffusers_video.hunyuan_video15

told = Session.run

def run_to(target, delay):
    def run(self, plan, folder=None):
        for count, event in enumerate(told(self, plan, folder)):
            if count == target:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            yield event
    return run

manifest, options = sys.argv[1], sys.argv[2:]
for folder, target, delay in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        Session.run = run_to(target, delay)
        code = app.run(["generate", manifest, "-o", folder, "--progress", "none", "-q", *options])
        sys.stderr.flush()
        os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
def test_killed_anywhere_the_same_files(
    write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    import random

    manifest = write_manifest(*({"size": "48x32", "num_frames": 9} | line for line in LINES))
    chance = random.Random(6)
    # A whole run tells about thirty events; later ones are only reached by what a kill left to do.
    kills = [("killed", chance.randrange(26), chance.choice((0, 0.01, 0.05))) for _ in range(KILLS)]
    plan = [("whole", -1, 0), *kills, ("killed", -1, 0)]
    options = ["--checkpoint-every", "1", "--frames", "png", "--no-prewarm"]
    options += ["--cache-dir", str(tmp_path / "cache")]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(manifest), *options],
        input=json.dumps([(str(tmp_path / name), *rest) for name, *rest in plan]),
        capture_output=True,
        text=True,
        check=True,
    )
    codes = [int(line) for line in ran.stdout.split()]
    assert (codes[0], codes[-1]) == (0, 0), ran.stderr
    assert set(codes) <= {0, 9}, ran.stderr
    assert 9 in codes
    whole, killed = _files(tmp_path / "whole"), _files(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []
    assert not list((tmp_path / "killed").rglob("*.tmp"))
    assert not list((tmp_path / "killed" / "latents").iterdir())
    steps = [_line(tmp_path / "killed", line["custom_id"])["denoise_steps"] for line in LINES]
    assert all(step >= 1 for step in steps)


def _files(folder: Path) -> dict[str, bytes]:
    """Every output file's bytes by name."""
    outputs = folder / "outputs"
    files = (path for path in outputs.rglob("*") if path.is_file())
    return {str(path.relative_to(outputs)): path.read_bytes() for path in files}


def _line(folder: Path, custom_id: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    found: dict[str, Any] = [line for line in lines if line["custom_id"] == custom_id][-1]
    return found
