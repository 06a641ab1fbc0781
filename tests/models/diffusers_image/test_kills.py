"""SIGKILL and Ctrl-C in every phase of an edit, then the same command again, in a folder that was
moved and by other processes: the same files, and nothing made twice that was kept.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_editors
from models.diffusers_image.classic import Checkpoint, Line, line
from PIL import Image

STEPS = 3
MOMENTS = ("embed", "step", "decode", "write", "line")
KILLS = int(os.environ.get("KILLS", "12"))
# Runs the command once for each entry of the plan on standard input: [folder, moment, count,
# signal, flags]; without a moment in this process, which has everything imported then, else in a
# child that signals itself at the count-th such moment: something is encoded and kept, a denoise
# step is done, a picture is decoded, a file of it is in its place, its line is to be written.
# Prints what its plan counted beforehand, the status, or the signal below 0, and what was made: t
# for a run of the text encoder, v for one of the VAE's, s for a denoise step, d for a decode.
DRIVER = """
import contextlib, io, json, os, sys
import torch, diffusers
from hyimg_cli.cli import app
from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import JobFolder, RunFolder
from hyimg_cli.models.diffusers_image.model import BlockEncoder, LatentImageModel
from hyimg_cli.spec.events import Progress

torch.set_num_threads(1)
wanted, left, number = None, 0, 9

def reached(moment):
    global left
    left -= moment == wanted
    if moment == wanted and left == 0:
        os.kill(os.getpid(), number)

def around(owner, name, moment, told=lambda *given: b""):
    inner = getattr(owner, name)
    def method(self, *given, **named):
        if moment == "line":
            reached(moment)
        made = inner(self, *given, **named)
        os.write(1, told(*given))
        if moment not in ("", "line"):
            reached(moment)
        return made
    setattr(owner, name, method)

around(BlockEncoder, "encode", "", lambda one: one.stage[:1].encode())
around(LatentImageModel, "decode_latents", "decode", lambda *_: b"d")
around(JobFolder, "save", "write")
around(RunFolder, "append", "line")
told = Session.run

def run(self, *given):
    for event in told(self, *given):
        if isinstance(event, Progress) and event.done:
            if event.phase == "denoise":
                os.write(1, b"s")
            reached({"denoise": "step"}.get(event.phase, event.phase))
        yield event

Session.run = run
manifest, *options = sys.argv[1:]
for folder, wanted, left, number, flags in json.load(sys.stdin):
    given = [manifest, "-o", folder, *options, *flags]
    with contextlib.redirect_stdout(io.StringIO()) as counted:
        app.run(["plan", *given, "--json"])
    found = json.loads(counted.getvalue())["total"]
    names = {"t": "prompt_encodes", "v": "image_encodes", "s": "denoise_steps"}
    print("".join(made * found[name] for made, name in names.items()), end=" ", flush=True)
    command = ["generate", *given, "--no-report", "-q"]
    if wanted is None:
        code = app.run(command)
    elif child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    else:
        code = app.run(command)
        sys.stderr.flush()
        os._exit(code)
    print("", code, flush=True)
    if folder.endswith("first"):
        os.rename(folder, folder.replace("first", "moved"))
"""
Entry = tuple[str, str | None, int, int, list[str]]


def driven(
    manifest: Path, model: Path, plan: list[Entry], *more: str
) -> list[tuple[str, int, str]]:
    """What was planned of each entry, its exit status, and what it made."""
    place = manifest.parent
    options = ["--model", str(model), "--cache-dir", str(place / "cache"), *more]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(manifest), *options],
        input=json.dumps([(str(place / name), *rest) for name, *rest in plan]),
        capture_output=True,
        text=True,
        check=True,
    )
    sys.stderr.write(ran.stderr)
    told = [row.split(" ") for row in ran.stdout.splitlines()]
    return [(planned, int(code), made) for planned, made, code in told]


def notes_of(folder: Path) -> dict[str, list[str]]:
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    # A job that was killed also notes where it went on.
    return {
        one["custom_id"]: [text for text in one.get("notes", []) if "saved latents" not in text]
        for one in lines
    }


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "outputs").iterdir()}


def an_edit(custom_id: str, *images: str, **more: Any) -> Line:
    made = line(custom_id, "red", *images, num_inference_steps=STEPS, **more)
    del made["size"]
    return made


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (
            [("embed", 1, 9), ("step", 2, 9), ("decode", 1, 9), ("", 0, 0)],
            [
                ("tvvvssssss", -9, "t"), ("vvvssssss", -9, "vvvss"), ("ssss", -9, "sd"),
                ("sss", 0, "dsssd"), ("ssssss", 0, "sssdsssd"),
            ],
        ),
        pytest.param(
            [
                ("embed", 1, 9), ("embed", 2, 2), ("step", 2, 9), ("decode", 1, 9), ("line", 1, 9),
                ("step", 2, 2), ("write", 2, 9), ("", 0, 0),
            ],
            [
                ("tvvvssssss", -9, "t"), ("vvvssssss", 130, "v"), ("vvssssss", -9, "vvss"),
                ("ssss", -9, "sd"), ("sss", -9, "d"), ("sss", 130, "dss"), ("s", -9, "sd"),
                ("", 0, "d"), ("ssssss", -9, "sssd"), ("sss", 0, "dsssd"),
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["few", "many"],
)  # fmt: skip
def test_a_killed_edit_goes_on_where_it_stood(
    write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    stops: list[tuple[str, int, int]], expected: list[tuple[str, int, str]],
) -> None:  # fmt: skip
    # A note on the transparent source is kept with its latents.
    with Image.open(tmp_path / sources[1]) as opened:
        opened.convert("LA").point(lambda value: value // 2).save(tmp_path / sources[1])
    # The kept source is encoded in its own size too: that in which its edit is drawn.
    manifest = write_manifest(
        an_edit("plain", *sources), an_edit("kept", sources[0], seed=8, keep_outside=True)
    )
    plan: list[Entry] = [("whole", None, 0, 0, ["--no-disk-cache"])]
    # Behind the first kill the folder has another name.
    plan += [
        ("moved" if at else "first", *stop, ["--checkpoint-every", "1"])
        for at, stop in enumerate(stops)
    ]
    # What is encoded is on disk by then.
    plan += [("seldom", *stop, ["--checkpoint-every", "0"]) for stop in stops[3:9:4]]
    ran = driven(manifest, checkpoint("klein"), plan)
    assert ran == [("tvvvssssss", 0, "tvvvsssdsssd"), *expected]
    for name in {name for name, *_ in plan[2:]}:
        assert files_of(tmp_path / name) == files_of(tmp_path / "whole")
        assert notes_of(tmp_path / name) == notes_of(tmp_path / "whole")
        assert notes_of(tmp_path / name)["plain"]
        assert not list((tmp_path / name).rglob("*.tmp"))
        assert not (tmp_path / name / "latents").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", tiny_editors.PIPELINES)
def test_killed_anywhere_the_same_files(
    write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str], kind: str
) -> None:
    """At random moments, the last ones by two replicas."""
    edits = kind in ("klein", "klein-base", "flux2-dev", "flux3", "kontext") or "edit" in kind
    lines = [line(f"{seed}", "red", *sources[:edits], seed=seed, num_inference_steps=STEPS)
             for seed in range(3)]  # fmt: skip
    refused = {"longcat-edit": "size", "qwen-image-2.1-turbo": "num_inference_steps"}
    for one in lines:
        one.pop(refused.get(kind, ""), None)
    manifest, chance = write_manifest(*lines), random.Random(kind)
    plan: list[Entry] = [("whole", None, 0, 0, ["--no-disk-cache"])]
    plan += [
        ("killed", chance.choice(MOMENTS), chance.randrange(1, 5), 9,
         ["--checkpoint-every", chance.choice("01")])
        for _ in range(KILLS)
    ]  # fmt: skip
    plan += [("killed", "", 0, 0, ["--replicas", "2"])]
    ran = driven(manifest, checkpoint(kind), plan)
    codes = [code for _, code, _ in ran]
    assert (codes[0], codes[-1]) == (0, 0)
    for planned, code, made in ran[:-1]:  # replicas encode for themselves
        assert code or sorted(planned) == sorted(made.replace("d", ""))
    assert set(codes) <= {0, -9}
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.tmp"))
