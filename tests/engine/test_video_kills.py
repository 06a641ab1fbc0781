"""SIGKILL in every phase, then at random moments, then the same command again: the same files.

The children of one process that has imported everything are killed, so that a kill costs about a
second. The first kills are one in each phase; KILLS=40 in the environment kills more often.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PHASES = ("encode", "denoise", "decode", "write")
KILLS = int(os.environ.get("KILLS", len(PHASES)))
LINES = [
    {"custom_id": "first", "task": "t2v", "prompt": "a dog", "seed": 1, "steps": 5},
    {"custom_id": "second", "task": "t2v", "prompt": 'a sign "open"', "seed": 2, "steps": 4},
    {"custom_id": "third", "task": "t2v", "prompt": "a dog", "seed": 3, "num_frames": 5},
]
# Runs the command once for each entry of the plan on standard input: [folder, phase, count, delay].
# In the child the process kills itself `delay` seconds behind the count-th moment of the phase, at
# 0 in the very moment; without a phase it may end. Moments: a prompt is embedded, a denoise step is
# done, a piece of a video is decoded, a film is encoded but not in its place.
DRIVER = """
import json, os, signal, sys, threading
import torch, diffusers
from hyimg_cli.cli import app
from hyimg_cli.engine.session import Session
from hyimg_cli.media.video import _Film
from hyimg_cli.spec.events import DenoiseStep, PromptEmbedded
import hyimg_cli.models.diffusers_video.loading, hyimg_cli.models.diffusers_video.hunyuan_video15
from hyimg_cli.models.diffusers_video.model import DiffusersVideo

told, decoded, closed = Session.run, DiffusersVideo.decode_latents, _Film.close
wanted, left, wait = None, 0, 0

def reached(phase):
    global left
    left -= phase == wanted
    if phase == wanted and left == 0:
        if wait:
            threading.Timer(wait, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

def run(self, plan, folder=None):
    for event in told(self, plan, folder):
        if isinstance(event, DenoiseStep):
            reached("denoise")
        if isinstance(event, PromptEmbedded):
            reached("encode")
        yield event

def decode_latents(self, latents):
    for piece in decoded(self, latents):
        reached("decode")
        yield piece

def close(self):
    closed(self)
    reached("write")

Session.run, DiffusersVideo.decode_latents, _Film.close = run, decode_latents, close
manifest, options = sys.argv[1], sys.argv[2:]
for folder, wanted, left, wait in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
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
    # One inside each phase: of what the kill before it left, the next phase is reached.
    kills: list[tuple[str, str, int, float]] = [
        ("killed", phase, 2 if phase == "denoise" else 1, 0) for phase in PHASES
    ]
    # Later moments are only reached by what a kill left to do.
    kills += [
        ("killed", chance.choice(PHASES), chance.randrange(1, 5), chance.choice((0, 0.01, 0.05)))
        for _ in range(KILLS - len(PHASES))
    ]
    plan = [("whole", "", 0, 0.0), *kills, ("killed", "", 0, 0.0)]
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
    in_phase = dict(zip(PHASES, codes[1:], strict=False))
    assert in_phase == dict.fromkeys(PHASES, 9), "every phase is killed in"
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
