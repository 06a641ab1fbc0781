"""Ten edits, each of the result before it, killed between and within: the same files and lines."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.measure.outside import outside_of
from hyimg_cli.media.carried import history_of_file
from hyimg_cli.spec.options import KeepOutside

KILLS = int(os.environ.get("KILLS", 12))
LINKS = 10
SOURCE = Path(__file__).parents[2] / "recipes" / "quickstart" / "red-circle.png"
COLOURS = ("green", "blue", "yellow", "purple", "orange")
# Runs the command once for each entry on standard input, [folder, count, delay]: a child that kills
# itself `delay` seconds after a file of its run was given its name for the count-th time; with a
# count of 0 it may end.
DRIVER = """
import json, os, signal, sys, threading
import torch
from hyimg_cli.cli import app
import hyimg_cli.engine.session

torch.set_num_threads(1)
left, wait, replace = 0, 0.0, os.replace

def replace_and_count(*given, **named):
    global left
    replace(*given, **named)
    left -= 1
    if left == 0:
        threading.Timer(wait, os.kill, (os.getpid(), signal.SIGKILL)).start()

os.replace = replace_and_count
manifest, *options = sys.argv[1:]
for folder, left, wait in json.load(sys.stdin):
    child = os.fork()
    if not child:
        os._exit(app.run(["generate", manifest, "-o", folder, *options, "--no-report", "-q"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def files_of(folder: Path) -> dict[str, Any]:
    files = folder.glob("outputs/*.png")
    return {file.name: np.asarray(Image.open(file)) for file in files}


@pytest.mark.thorough
def test_ten_links_killed_anywhere_are_those_of_an_undisturbed_run(
    write_manifest: Any, tmp_path: Path
) -> None:
    common = {"keep_outside": True, "bot_task": "none"}
    lines = [
        {"custom_id": f"link-{n}", "prompt": f"make it {COLOURS[n % 5]}", "seed": n} | common
        | {"images": [f"@link-{n - 1}" if n else str(SOURCE)]}
        for n in range(LINKS)
    ]  # fmt: skip
    chance, out, whole = random.Random(KILLS), tmp_path / "out", tmp_path / "whole"
    stops = [(str(out), chance.randrange(1, 25), chance.random() / 4) for _ in range(KILLS)]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(write_manifest(*reversed(lines))), "--device", "cpu"],
        input=json.dumps([(str(whole), 0, 0.0), *stops, (str(out), 0, 0.0)]),
        capture_output=True,
        text=True,
        check=True,
    )
    codes = [*map(int, ran.stdout.split())]
    assert codes[0] == codes[-1] == 0, ran.stderr
    assert -9 in codes[1:-1]
    expected, found = files_of(whole), files_of(out)
    assert expected.keys() == found.keys()
    for name, pixels in expected.items():
        assert np.array_equal(pixels, found[name]), name
    results, again = RunFolder(whole).results(), RunFolder(out).results()
    assert results.keys() == again.keys()
    for name, line in results.items():
        assert again[name]["key"] == line["key"]
        assert again[name]["edit"] == line["edit"]
        assert again[name]["outputs"] == line["outputs"]
    written = (out / "results.jsonl").read_text().splitlines()
    done = [one["custom_id"] for one in map(json.loads, written) if one["status"] == "done"]
    assert sorted(done) == sorted(results), "nothing was drawn twice"
    # What no edit touched is the first source's, and what each one did not is its own source's.
    last = whole / "outputs" / f"link-{LINKS - 1}.png"
    measured = outside_of(SOURCE, last, KeepOutside())
    assert measured["outside_differing_pixels"] == 0
    assert measured["outside_pixels"] > 5000
    history = history_of_file(last)
    assert history is not None
    assert history[1]
    edits = [line["edit"] for line in results.values()]
    assert history[0].links == sum(edit["kind"] != "none" for edit in edits)
    before = np.asarray(Image.open(SOURCE).convert("RGB"))
    for n in range(LINKS):
        pixels = expected[f"link-{n}.png"][..., :3]
        free = expected[f"link-{n}.mask.png"] == 0
        assert np.array_equal(pixels[free], before[free])
        before = pixels


@pytest.mark.thorough
def test_links_of_a_large_photograph_are_drawn_as_crops_and_finished_again(
    run_cli: Any, write_manifest: Any, tmp_path: Path
) -> None:
    y, x = np.mgrid[:300, :400]
    photo = np.stack([x / 4 + 60, y / 3 + 70, 180 - x / 5], -1)
    for column in (100, 300):
        photo[np.hypot(y - 150, x - column) < 30] = (200, 40, 40)
    Image.fromarray(photo.astype(np.uint8)).save(tmp_path / "photo.png")
    boxes = ("60,110,140,190", "260,110,340,190", "60,110,140,190")
    common = {"prompt": "make it green", "seed": 1, "bot_task": "none", "num_inference_steps": 8}
    lines: list[dict[str, Any]] = [
        {"custom_id": f"link-{n}", "region": box, "images": [f"@link-{n - 1}"]} | common
        for n, box in enumerate(boxes)
    ]
    lines[0]["images"] = ["photo.png"]
    command = ("generate", write_manifest(*lines), "-o", tmp_path / "out", "--no-prewarm")
    assert run_cli(*command).code == 0
    made = RunFolder(tmp_path / "out").results()
    assert all("crop" in line["edit"] for line in made.values())
    assert "3 skipped" in run_cli(*command).err
    # No metadata: finished again, in order, and the history is next to the pictures.
    again = run_cli(*command, "--no-metadata")
    assert "3 edits finished again from the saved redraws" in again.err
    last = tmp_path / "out" / "outputs" / "link-2.png"
    shown = run_cli("info", last)
    assert shown.code == 0
    assert "an edit by hyimg, without metadata" in shown.out
    assert outside_of(tmp_path / "photo.png", last, KeepOutside())["outside_by"] == "touched"
    # Another first link is another source for those after it, which the run says first.
    lines[0] |= {"region": "60,110,141,190", "region_mode": "instead"}
    refused = run_cli("generate", write_manifest(*lines), "-o", tmp_path / "out")
    assert refused.code == 2
    assert "of 3 jobs differ" in refused.err
