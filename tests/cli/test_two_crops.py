"""A region of two parts that are far apart: each is drawn at its own resolution, in a crop."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import thorough_but
from PIL import Image

from hyimg_cli.cli import app
from hyimg_cli.media.images import Pixels
from tests.cli.test_crops import FLAGS, photograph, resolved, results, write
from tests.engine.test_chain_kills import DRIVER, KILLS, files_of
from tests.engine.test_picture_latents import end_behind

Run = Callable[..., Any]
LEFT, RIGHT = (24, 40, 60, 76), (352, 220, 390, 258)
BOTH = "24,40,60,76;352,220,390,258"
# Lines of one run, with the steps that each takes. The first two are drawn in the same two crops.
LINES: dict[str, tuple[dict[str, Any], int]] = {
    "boxes": ({"region": [[*LEFT], [*RIGHT]]}, 4),
    "mask": ({"region": "mask.png"}, 4),
    "cases": ({"region": BOTH, "n": 2, "seed": 7}, 4),
    "near": ({"region": "24,40,60,76;60,40,70,76"}, 2),
    "think": ({"region": BOTH, "bot_task": "think", "max_new_tokens": 4}, 2),
}


def pictures(home: Path) -> None:
    photograph().save(home / "photo.png")
    mask = Image.new("L", photograph().size)
    for box in (LEFT, RIGHT):
        mask.paste(255, box)
    mask.save(home / "mask.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of all lines, and of each part alone; tests only read it."""
    home = tmp_path_factory.mktemp("made")
    pictures(home)
    manifest = write(home, **{name: line for name, (line, _) in LINES.items()})
    command = ["generate", str(manifest), "-o", str(home / "run"), *FLAGS, "-q"]
    assert app.run([*command, "--cache-dir", str(home / "cache")]) == 0
    crops = resolved(home / "run")["boxes"]["crop"].split(";")
    parts = zip(("left", "right"), (LEFT, RIGHT), crops, strict=True)
    alone = write(home, **{name: {"region": [*box], "crop": crop} for name, box, crop in parts})
    command = ["generate", str(alone), "-o", str(home / "alone"), *FLAGS, "--no-report", "-q"]
    assert app.run([*command, "--cache-dir", str(home / "cache")]) == 0
    return home


def picture(path: Path) -> Pixels:
    return np.asarray(Image.open(path).convert("RGB"))


def test_each_part_is_drawn_as_if_it_were_alone_and_nothing_else_changes(made: Path) -> None:
    out, lines, alone = made / "run" / "outputs", results(made / "run"), results(made / "alone")
    for name in ("boxes", "mask"):
        expected = np.array(photograph())
        for part, (left, top, right, bottom), mark in (("left", LEFT, ""), ("right", RIGHT, "-2")):
            inside = slice(top, bottom), slice(left, right)
            own = picture(made / "alone" / "outputs" / f"{part}.png")
            assert not np.array_equal(own[inside], expected[inside])
            expected[inside] = own[inside]
            for kind in ("redraw", "reference"):
                files = out / f"{name}.{kind}{mark}.png", made / f"alone/outputs/{part}.{kind}.png"
                assert np.array_equal(*map(picture, files)), (name, part, kind)
        assert np.array_equal(picture(out / f"{name}.png"), expected)
        edit, parts = lines[name]["edit"], [alone[part]["edit"] for part in ("left", "right")]
        assert (edit["kind"], edit["outside_differing_pixels"]) == ("local", 0)
        assert edit["area"] == pytest.approx(sum(part["area"] for part in parts), abs=2e-5)
        for own, part in zip(edit["crop"], parts, strict=True):
            assert own.items() >= (part["crop"] | {"scale": part["scale"]}).items()
            assert own["seam"] == part["seam"]
        assert edit["seam"] in [part["seam"] for part in parts]
        crops = [",".join(map(str, crop["box"])) for crop in edit["crop"]]
        assert f"drawn: the parts {' and '.join(crops)}, at 64x64" in lines[name]["notes"]


def test_parts_share_a_crop_where_that_loses_little_or_a_text_is_written(made: Path) -> None:
    lines, jobs = results(made / "run"), resolved(made / "run")
    for name, (_, steps) in LINES.items():
        for one in [name] if name != "cases" else ["cases-0", "cases-1"]:
            assert lines[one]["denoise_steps"] == steps, one
            assert (";" in jobs[one].get("crop", "")) == (steps == 4), one
    assert jobs["boxes"]["crop"] == jobs["cases-0"]["crop"] == jobs["cases-1"]["crop"]
    assert lines["boxes"]["key"] == lines["mask"]["key"], "of the same crops"
    files = [picture(made / f"run/outputs/cases-{n}.redraw-2.png") for n in range(2)]
    assert not np.array_equal(*files)


def test_the_run_is_done_planned_finished_again_and_replayed(
    made: Path, tmp_path: Path, run_cli: Run
) -> None:
    out = tmp_path / "run"
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    resolved_lines = out / "manifest.resolved.jsonl"
    again = run_cli("generate", resolved_lines, "-o", out, *FLAGS)
    assert (again.code, "0 done, 0 failed, 6 skipped" in again.err) == (0, True), again.err
    planned = run_cli("plan", resolved_lines, "-o", tmp_path / "new", *FLAGS)
    assert f"6 jobs, {4 + 4 + 2 * 4 + 2 * 2} denoise steps" in planned.out
    # From both saved redraws, or by drawing again if one is gone.
    line = LINES["boxes"][0] | {"max_seam": 0.0}
    ran = run_cli("generate", write(tmp_path, boxes=line), "-o", out, *FLAGS)
    assert (ran.code, "1 edit finished again" in ran.err) == (1, True), ran.err
    edit = results(out)["boxes"]["edit"]
    assert len(edit["crop"]) == 2
    assert edit["gates"][0].startswith("max_seam 0: the difference at the seam is ")
    files = [home / "run/outputs/boxes.png" for home in (tmp_path, made)]
    assert np.array_equal(*map(picture, files))
    (out / "outputs/boxes.redraw-2.png").unlink()
    line["max_seam"] = 100.0
    ran = run_cli("generate", write(tmp_path, boxes=line), "-o", out, *FLAGS)
    assert (ran.code, "finished again" in ran.err) == (0, False), ran.err
    assert (out / "outputs/boxes.redraw-2.png").exists()


@pytest.mark.parametrize(
    "name",
    ["boxes.redraw-2", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("mask", "cases-1"))],
)
def test_a_result_and_a_second_redraw_are_replayed(
    made: Path, tmp_path: Path, run_cli: Run, name: str
) -> None:
    file = made / "run" / "outputs" / f"{name}.png"
    ran = run_cli("replay", file, "-o", tmp_path / "again", "--device", "cpu", "--expect-equal")
    assert (ran.code, "equal: the pixels of" in ran.err) == (0, True), ran.err
    assert name in ran.err.rsplit("equal: ", 1)[1]


@pytest.mark.thorough
def test_a_drawing_in_one_crop_is_kept(tmp_path: Path, run_cli: Run) -> None:
    """As earlier versions drew it, around both: folders of theirs go on with their keys."""
    image = photograph().resize((840, 600))
    image.save(tmp_path / "photo.png")
    both = "24,40,60,76;300,220,340,258"

    def run(region: str) -> tuple[Any, dict[str, Any]]:
        ran = run_cli("generate", write(tmp_path, a={"region": region}), "-o", "out", *FLAGS)
        return ran, results(tmp_path / "out")["a"]

    ran, before = run("24,40,340,258")
    assert (ran.code, isinstance(before["edit"]["crop"], dict)) == (0, True), ran.err
    ran, after = run(both)
    assert (ran.code, after["key"]) == (0, before["key"]), ran.err
    assert after["edit"]["crop"]["box"] == before["edit"]["crop"]["box"]
    assert "1 edit finished again" in ran.err
    ran = run_cli("generate", tmp_path / "jobs.jsonl", "-o", "new", *FLAGS)
    assert len(results(tmp_path / "new")["a"]["edit"]["crop"]) == 2


def test_a_run_that_ends_between_the_two_does_not_draw_the_first_again(
    made: Path, tmp_path: Path, run_cli: Run
) -> None:
    pictures(tmp_path)
    manifest, out = write(tmp_path, boxes=LINES["boxes"][0]), tmp_path / "out"
    command = ("generate", manifest, "-o", out, *FLAGS, "--batching-max-size", 1)
    with pytest.MonkeyPatch.context() as patch:
        end_behind(2, patch)
        assert run_cli(*command).code != 0
    assert [file.name for file in (out / "latents").iterdir()] == ["boxes+1.safetensors"]
    assert "1 job, 2 denoise steps" in run_cli("plan", manifest, "-o", out, *FLAGS).out
    assert run_cli(*command).code == 0
    line = results(out)["boxes"]
    assert line["denoise_steps"] == 2
    assert "all 2 steps were denoised before; decoded from saved latents" in line["notes"]
    assert not (out / "latents").exists()
    for name in ("boxes", "boxes.redraw", "boxes.redraw-2", "boxes.mask"):
        files = [home / "outputs" / f"{name}.png" for home in (out, made / "run")]
        assert np.array_equal(*map(picture, files)), name


@pytest.mark.thorough
def test_a_run_killed_anywhere_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    pictures(tmp_path)
    names = [f"edit-{n}" for n in range(6)]
    lines = {name: {"region": BOTH, "seed": n, "num_inference_steps": 4}
             for n, name in enumerate(names)}  # fmt: skip
    manifest, chance = write(tmp_path, **lines), random.Random(KILLS)
    whole, out = tmp_path / "whole", tmp_path / "out"
    stops = [(str(out), chance.randrange(1, 30), chance.random() / 4) for _ in range(KILLS)]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(manifest), "--batching-max-size", "1", *FLAGS[:2]],
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
    assert len(expected) == 6 * len(names)
    assert all(np.array_equal(found[name], one) for name, one in expected.items())
    for name, line in results(whole).items():
        assert results(out)[name]["edit"] == line["edit"]
    written = (out / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(one)["custom_id"] for one in written) == names


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"crop": "0,0,100,100;0,0,120,100"}, "crop", "does not contain the region (352,220,390,258)"),
    ({"crop": "0,0,110,110;0,0,400,290"}, "crop", ""),
    ({"crop": "0,0,410,280;300,0,420,200"}, "crop", "no part of the region is in the crop"),
    ({"crop": "0,0,100,100;300,200,500,300"}, "crop", "extends beyond the source"),
    ({"crop": "0,0,9,9;0,0,8,8;0,0,7,7"}, "bad-value", "is not a crop"),
    ({"crop": [[0, 0, 100, 100], [320, 200, 320, 290]]}, "bad-value", "is empty"),
    ({"region": "24,40,60,76;352,220,390,358"}, "region", "extends beyond the source"),
    ({"region": "24,40,60,76;"}, "bad-value", "is not a region"),
    ({"region": [[24, 40, 60, 76], [1, 2, 3]]}, "bad-value", "is not a region"),
    (
        {"crop": "0,0,100,100;320,200,420,300", "bot_task": "think", "max_new_tokens": 4},
        "crop", "the text before the picture is written for one crop only",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", thorough_but(REFUSED[::3], REFUSED))
def test_check_refuses_crops_that_do_not_share_the_region_out(
    tmp_path: Path, run_cli: Run, case: tuple[dict[str, Any], str, str]
) -> None:
    more, code, what = case
    pictures(tmp_path)
    ran = run_cli("check", write(tmp_path, a={"region": BOTH} | more))
    if not what:
        assert ran.code == 0, ran.err
        return
    assert (ran.code, f"error[manifest.{code}]" in ran.err, what in ran.err) == (2, True, True), (
        ran.err
    )


def test_a_schema_takes_what_a_line_does(run_cli: Run) -> None:
    import jsonschema

    schema = json.loads(run_cli("schema", "line").out)
    for value in (BOTH, [[*LEFT], [*RIGHT]], [*LEFT], "24,40,60,76"):
        line = {"custom_id": "a", "prompt": "b", "images": ["c.png"]}
        jsonschema.validate(line | {"region": value, "crop": value}, schema)
