"""A picture drawn on a text continues between two denoise steps, as editors and videos do."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_bagel
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint

STEPS = 12
LOSSY = "taylor:interval=2,first=1"
KILLS = int(os.environ.get("KILLS", 3))
EVERY = ("--checkpoint-every", "1")


@pytest.fixture
def manifest(write_manifest: Any, write_picture: Any) -> Path:
    source = str(write_picture("source.png"))
    drawn = {"num_inference_steps": STEPS, "seed": 3}
    own, plain = drawn | {"max_new_tokens": 6, "bot_task": "think"}, drawn | {"bot_task": "none"}
    made: Path = write_manifest(
        {"custom_id": "plain", "prompt": "a red circle"} | plain,
        {"custom_id": "thought", "prompt": "a blue square", "n": 2} | own,
        {"custom_id": "same-text", "prompt": "a blue square", "ar_seed": 3} | own,
        {"custom_id": "edit", "prompt": "make it green", "images": [source]} | own,
        {"custom_id": "kept", "prompt": "make it green", "images": [source], "keep_outside": True}
        | plain,
        {"custom_id": "cached", "prompt": "a red circle", "step_cache": LOSSY} | own,
    )
    return made


def pixels_of(folder: Path) -> dict[str, Any]:
    return {file.stem: np.asarray(Image.open(file)) for file in folder.glob("outputs/*.png")}


def lines_of(folder: Path) -> dict[str, Any]:
    return {line["custom_id"]: line for line in RunFolder(folder).results().values()}


def assert_equal(made: Path, whole: Path) -> None:
    expected, found = pixels_of(whole), pixels_of(made)
    assert expected.keys() == found.keys()
    for name, pixels in expected.items():
        assert np.array_equal(pixels, found[name]), name
    for name, line in lines_of(whole).items():
        for field in ("cot_text", "cot_token_ids", "cot_from", "ratio_index", "step_cache", "size"):
            assert lines_of(made)[name].get(field) == line.get(field), (name, field)


def end_behind(stop: int, patch: pytest.MonkeyPatch) -> None:
    """End the run like Ctrl-C as soon as a picture's latents after `stop` steps are saved."""
    keep = LatentsCheckpoint.keep

    def keep_and_end(self: LatentsCheckpoint, kept: Any) -> None:
        keep(self, kept)
        if kept.step == stop:
            raise KeyboardInterrupt

    patch.setattr(LatentsCheckpoint, "keep", keep_and_end)


OFTEN = [("thought*", 1), ("kept", STEPS), ("cached", 7)]
SELDOM = [("plain", 2), ("thought*", STEPS), ("edit", 3), ("cached", STEPS)]
SELDOM += [("*", 1), ("*", 6), ("*", STEPS)]


@pytest.mark.parametrize(
    ("select", "stop"),
    [*OFTEN, *(pytest.param(*one, marks=pytest.mark.thorough) for one in SELDOM)],
)
@pytest.mark.parametrize("model", ["tiny-image", pytest.param("bagel", marks=pytest.mark.thorough)])
def test_pictures_continue_behind_any_step(
    run_cli: Any, manifest: Path, tmp_path: Path, select: str, stop: int, model: str
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = (*EVERY, "--select", select, "--no-report")
    total = STEPS
    if model == "bagel":
        total = STEPS - 1  # its last noise level begins no step
        stop = min(stop, total)
        tiny_bagel.write(tmp_path / model)
        options = (*options, "--model", str(tmp_path / model))
    assert run_cli("generate", manifest, "-o", whole, *options).code == 0
    with pytest.MonkeyPatch.context() as patch:
        end_behind(stop, patch)
        assert run_cli("generate", manifest, "-o", out, *options).code != 0
    begun = [file.stem for file in (out / "latents").iterdir()]
    again = run_cli("generate", manifest, "-o", out, *options)
    assert again.code == 0, again.err
    assert_equal(out, whole)
    lines = lines_of(out)
    assert begun
    for name in begun:
        assert lines[name]["denoise_steps"] in (total - stop, total - stop + 1)
        assert any("from saved latents" in said for said in lines[name]["notes"])
    assert not (out / "latents").exists() or not [*(out / "latents").iterdir()]


# Runs the command once for each entry on standard input, [folder, count, delay]: a child that kills
# itself `delay` seconds behind the count-th event of a job; with a count of 0 it may end. Prints
# each job and step as its latents are saved and as it is reported, then the child's status. What is
# saved is printed in one go: a kill in between would leave a step that nobody knows of.
DRIVER = """
import json, os, signal, sys, threading
import torch
from hyimg_cli.cli import app
from hyimg_cli.engine.session import Session
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.spec.events import Progress

torch.set_num_threads(1)
left, wait, told = 0, 0.0, Session.run
saving, keep, replace, at_work = threading.Lock(), LatentsCheckpoint.keep, os.replace, []

def keep_and_print(self, kept):
    at_work.append((str(self.path), f"saved {self.path.stem} {kept.step}\\n"))
    keep(self, kept)
    at_work.pop()

def replace_and_print(*given, **named):
    with saving:
        replace(*given, **named)
        for path, text in at_work:
            if str(given[1]) == path:  # pictures are renamed meanwhile, too
                os.write(1, text.encode())

def kill():
    with saving:
        os.kill(os.getpid(), signal.SIGKILL)

LatentsCheckpoint.keep, os.replace = keep_and_print, replace_and_print

def run(self, *given):
    global left
    for event in told(self, *given):
        if isinstance(event, Progress):
            if event.phase == "denoise" and event.done:
                os.write(1, f"told {event.custom_id} {event.done}\\n".encode())
            left -= 1
            if left == 0:
                threading.Timer(wait, kill).start()
        yield event

Session.run = run
manifest, *options = sys.argv[1:]
for folder, left, wait in json.load(sys.stdin):
    child = os.fork()
    if not child:
        code = app.run(["generate", manifest, "-o", folder, *options, "--no-report", "-q"])
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("ended", code, flush=True)
"""


def test_killed_at_any_moment_no_step_is_drawn_twice(manifest: Path, tmp_path: Path) -> None:
    chance, out, whole = random.Random(KILLS), tmp_path / "out", tmp_path / "whole"
    stops = [(str(out), chance.randrange(1, 60), chance.random() / 20) for _ in range(KILLS)]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(manifest), *EVERY, "--batching-max-size", "4"],
        input=json.dumps([(str(whole), 0, 0.0), *stops, (str(out), 0, 0.0)]),
        capture_output=True,
        text=True,
        check=True,
    )
    first, *attempts = ran.stdout.split("ended ")[:-1]
    codes = [int(part.splitlines()[0]) for part in ran.stdout.split("ended ")[1:]]
    assert codes[0] == codes[-1] == 0, ran.stderr
    assert -9 in codes[1:-1]
    # The first line of each attempt's part is the status of the one before it.
    lines = [line for part in attempts for line in part.splitlines()[1:]]
    saved, told = ([one for one in lines if one.startswith(word)] for word in ("saved ", "told "))
    every = [one for one in first.splitlines() if one.startswith("saved ")]
    assert sorted(saved) == sorted(every), "each step once, in all attempts together"
    assert len({*told}) == len(told)
    assert {one.removeprefix("told ") for one in told} <= {
        one.removeprefix("saved ") for one in saved
    }
    assert first.count("told ") == len(every)
    assert_equal(out, whole)
    assert not [*out.rglob("*.tmp")]
