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

import pytest

PHASES = ("encode", "denoise", "decode", "write")
KILLS = int(os.environ.get("KILLS", len(PHASES)))
LINES = [
    {"custom_id": "first", "task": "t2v", "prompt": "a dog", "seed": 1, "steps": 5},
    {"custom_id": "second", "task": "t2v", "prompt": 'a sign "open"', "seed": 2, "steps": 4},
    {"custom_id": "third", "task": "t2v", "prompt": "a dog", "seed": 3, "num_frames": 5},
]
# Runs the command once for each entry of the plan on standard input: [folder, phase, count, delay,
# flags]. In the child the process kills itself `delay` seconds behind the count-th moment of the
# phase, at 0 in the very moment; without a phase it may end. Moments: a prompt is embedded, a
# denoise step is done, a piece of a video is decoded, a film is encoded but not in its place, or in
# its place without its line. Prints the plan's number of denoise steps, an s for each one, then the
# child's status, and an f for each film that stands in its place.
DRIVER = """
import contextlib, io, json, os, signal, sys, threading
from pathlib import Path
import torch, diffusers
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.cli import app
from hyimg_cli.engine.session import Session
from hyimg_cli.media.video import VideoWriter
from hyimg_cli.spec.events import Progress
import hyimg_cli.models.diffusers_video.hunyuan_video15
from hyimg_cli.models.diffusers_video.model import DiffusersVideo

told, decoded, closed = Session.run, DiffusersVideo.decode_latents, VideoWriter._end_stream
appended = RunFolder.append
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
        if isinstance(event, Progress) and event.done and event.phase == "denoise":
            os.write(1, b"s")
            reached("denoise")
        if isinstance(event, Progress) and event.phase == "embed":
            reached("encode")
        yield event

def decode_latents(self, latents, *tiling):
    for piece in decoded(self, latents, *tiling):
        reached("decode")
        yield piece

def close(self):
    closed(self)
    reached("write")

def append(self, outcome):
    reached("line")
    return appended(self, outcome)

Session.run, DiffusersVideo.decode_latents, VideoWriter._end_stream = run, decode_latents, close
RunFolder.append = append
manifest, options = sys.argv[1], sys.argv[2:]
for folder, wanted, left, wait, flags in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as planned:
        app.run(["plan", manifest, "-o", folder, "--json", *options, *flags])
    steps = sum(group["denoise_steps"] for group in json.loads(planned.getvalue())["groups"])
    print(steps, end=":", flush=True)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        code = app.run(["generate", manifest, "-o", folder, "--progress", "none", "-q", *options,
                        *flags])
        sys.stderr.flush()
        os._exit(code)
    code = os.waitpid(child, 0)[1]
    print(code, "f" * len(list(Path(folder, "outputs").glob("*.mp4"))), sep="", flush=True)
"""


@pytest.mark.thorough
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
    options = ["--checkpoint-every", "1", "--frames", "png"]
    codes = [code for _, code, _, _ in driven(manifest, [(*entry, []) for entry in plan], options)]
    assert (codes[0], codes[-1]) == (0, 0)
    assert set(codes) <= {0, 9}
    in_phase = dict(zip(PHASES, codes[1:], strict=False))
    assert in_phase == dict.fromkeys(PHASES, 9), "every phase is killed in"
    whole, killed = _files(tmp_path / "whole"), _files(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []
    assert not list((tmp_path / "killed").rglob("*.tmp"))
    assert not (tmp_path / "killed" / "latents").exists()


@pytest.mark.thorough
def test_what_is_denoised_is_only_decoded_wherever_a_kill_comes(
    write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    """Behind a step, and the last one; in the decode, when a piece of the film is encoded; when all
    are; when the film is in its place without its line; then to the end.
    """
    manifest = write_manifest({"size": "48x32", "num_frames": 17} | LINES[0])
    kills = (("denoise", 3), ("denoise", 3), ("decode", 2), ("write", 1), ("line", 1), ("", 0))
    plan: list[Entry] = [("whole", "", 0, 0.0, [])]
    plan += [("killed", phase, count, 0.0, ["--checkpoint-every", "2"]) for phase, count in kills]
    ran = driven(manifest, plan, [])
    assert ran == [
        (5, 0, 5, 1), (5, 9, 3, 0), (3, 9, 3, 0), (0, 9, 0, 0), (0, 9, 0, 0), (0, 9, 0, 1),
        (0, 0, 0, 1),
    ]  # fmt: skip
    assert not list((tmp_path / "killed").rglob("*.tmp"))
    assert _files(tmp_path / "killed") == _files(tmp_path / "whole")
    (line,) = (tmp_path / "killed" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["denoise_steps"] == 0
    assert "all 5 steps were denoised before" in line
    assert not (tmp_path / "killed" / "latents").exists()


Entry = tuple[str, str, int, float, list[str]]


def driven(
    manifest: Path, plan: list[Entry], options: list[str]
) -> list[tuple[int, int, int, int]]:
    """Planned steps, exit status and denoise steps of each entry of the plan, and films in their
    places behind it; its folders stand beside the manifest.
    """
    place = manifest.parent
    options = [*options, "--no-prewarm", "--cache-dir", str(place / "cache")]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(manifest), *options],
        input=json.dumps([(str(place / name), *rest) for name, *rest in plan]),
        capture_output=True,
        text=True,
        check=True,
    )
    sys.stderr.write(ran.stderr)
    told = ran.stdout.split()
    return [
        (int(steps), int(line.strip("sf")), line.count("s"), line.count("f"))
        for steps, line in (one.split(":") for one in told)
    ]


def _files(folder: Path) -> dict[str, bytes]:
    """Every output file's bytes by name."""
    outputs = folder / "outputs"
    files = (path for path in outputs.rglob("*") if path.is_file())
    return {str(path.relative_to(outputs)): path.read_bytes() for path in files}
