"""Regions that are drawn at the photograph's own resolution, from a manifest line to files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import thorough_but
from PIL import Image, ImageDraw

from hyimg_cli.cli import app
from hyimg_cli.media.images import Pixels

Run = Callable[..., Any]
WIDTH, HEIGHT = 420, 300
BOX = [190, 120, 226, 150]
EDIT = {"prompt": "a blue circle", "images": ["photo.png"], "seed": 3, "num_inference_steps": 2}
EDIT |= {"bot_task": "none"}
FLAGS = ("--device", "cpu", "--no-prewarm")
# What each line adds; each is drawn beside the others, and `alone` by itself.
LINES: dict[str, dict[str, Any]] = {
    "box": {"region": BOX},
    "mask": {"region": "mask.png"},
    "other": {"region": [20, 40, 50, 66]},
    "corner": {"region": [0, 270, 36, HEIGHT]},
    "fit": {"region": BOX, "region_size": "fit"},
    "whole": {"keep_outside": True},
    "wide": {"region": BOX, "region_context": 2},
    "given": {"region": BOX, "crop": [150, 80, 260, 190]},
    "second": {"region": BOX, "images": ["small.png", "photo.png"], "kept_source": 2},
    "think": {"region": BOX, "bot_task": "think", "max_new_tokens": 4},
    "rethink": {"region": [20, 40, 50, 66], "bot_task": "think", "max_new_tokens": 4},
}


def photograph() -> Image.Image:
    rng = np.random.default_rng(1)
    cells = np.kron(rng.random((15, 21, 3)), np.ones((20, 20, 1))) * 180
    levels = (cells + rng.random((HEIGHT, WIDTH, 3)) * 40).astype(np.uint8)
    image = Image.fromarray(levels)
    ImageDraw.Draw(image).ellipse(BOX, fill=(220, 30, 30))
    return image


def write(home: Path, **lines: dict[str, Any]) -> Path:
    path = home / "jobs.jsonl"
    texts = [json.dumps({"custom_id": name} | EDIT | more) for name, more in lines.items()]
    path.write_text("\n".join(texts))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and a run of all lines together; tests only read it."""
    home = tmp_path_factory.mktemp("made")
    pictures(home)
    command = ["generate", str(write(home, **LINES)), "-o", str(home / "run"), *FLAGS, "-q"]
    assert app.run([*command, "--cache-dir", str(home / "cache")]) == 0
    return home


def pictures(home: Path) -> None:
    image = photograph()
    image.save(home / "photo.png")
    image.resize((70, 50)).save(home / "small.png")
    mask = Image.new("L", image.size)
    mask.paste(255, tuple(BOX))
    mask.save(home / "mask.png")


def results(run: Path) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (run / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in lines}


def resolved(run: Path) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (run / "manifest.resolved.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in lines}


def pixels_of(run: Path, name: str) -> Pixels:
    return np.asarray(Image.open(run / "outputs" / f"{name}.png").convert("RGB"))


@pytest.mark.parametrize("name", LINES)
def test_what_is_outside_the_region_is_the_source_and_the_line_says_what_was_drawn(
    made: Path, name: str
) -> None:
    line, job = results(made / "run")[name], resolved(made / "run")[name]
    edit, is_whole = line["edit"], name in ("fit", "whole")
    assert ("crop" in job, "crop" in edit) == (not is_whole, not is_whole)
    assert not {"region_size", "region_context", "region_pixels"} & job.keys()
    if name == "whole":
        return
    region = LINES[name]["region"]
    left, top, right, bottom = BOX if region == "mask.png" else region
    own, found = np.asarray(photograph()), pixels_of(made / "run", name).copy()
    assert not np.array_equal(found, own)
    found[top:bottom, left:right] = own[top:bottom, left:right]
    assert np.array_equal(found, own)
    assert edit["outside_differing_pixels"] == 0
    assert edit["kind"] == "local"
    if not is_whole:
        box = [*map(int, job["crop"].split(","))]
        assert edit["crop"].items() >= {"box": box, "drawn": [64, 64]}.items()
        assert edit["crop"]["context"] > 0.3, "a side on which the photograph ends does not count"
        assert box[0] <= left < right <= box[2]
        assert box[1] <= top < bottom <= box[3]
        assert edit["scale"] == pytest.approx((box[2] - box[0]) / 64, rel=0.05)
        assert f"drawn: the part {job['crop']}, at 64x64" in line["notes"]


def test_the_model_sees_the_crop_of_the_kept_source(made: Path) -> None:
    """So the reference looks like it, as far as the toy's codec lets it."""
    lines = resolved(made / "run")
    for name in ("box", "given", "second", "mask"):
        box = tuple(map(int, lines[name]["crop"].split(",")))
        shown = photograph().crop(box).resize((64, 64), Image.Resampling.LANCZOS)
        reference = np.asarray(Image.open(made / "run" / "outputs" / f"{name}.reference.png"))
        whole = np.asarray(photograph().resize((64, 64), Image.Resampling.LANCZOS))
        apart = [np.abs(reference - np.asarray(one, float)).mean() for one in (shown, whole)]
        assert apart[0] < 0.8 * apart[1], (name, apart)
    assert (
        results(made / "run")["second"]["source_sha256"][1]
        == (results(made / "run")["box"]["source_sha256"][0])
    ), "the file's, whatever of it is shown"


def test_no_other_job_changes_a_crop(made: Path, tmp_path: Path, run_cli: Run) -> None:
    """Two crops of one file share no text, rows or reference: each alone has the same pixels."""
    pictures(tmp_path)
    for name in ("rethink", "second"):
        alone = tmp_path / name
        assert run_cli("generate", write(tmp_path, **{name: LINES[name]}), "-o", alone, *FLAGS)
        assert np.array_equal(pixels_of(alone, name), pixels_of(made / "run", name))
        lines = [results(run)[name] for run in (alone, made / "run")]
        assert lines[0]["key"] == lines[1]["key"]
        assert lines[0]["cot_text"] == lines[1]["cot_text"]


def test_without_a_crop_nothing_new_is_in_the_key(made: Path) -> None:
    lines, jobs = results(made / "run"), resolved(made / "run")
    assert lines["fit"]["key"] == lines["whole"]["key"]
    assert len({lines[name]["key"] for name in ("box", "wide", "given", "fit")}) == 4
    assert (
        lines["box"]["key"] != lines["mask"]["key"] or jobs["box"]["crop"] == jobs["mask"]["crop"]
    )


def test_lines_as_resolved_draw_the_same(made: Path, tmp_path: Path, run_cli: Run) -> None:
    """Also those of a whole source, which have its size."""
    command = ("generate", made / "run" / "manifest.resolved.jsonl", "-o", made / "run", *FLAGS)
    ran = run_cli(*command)
    assert (ran.code, f"0 done, 0 failed, {len(LINES)} skipped" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize("name", ["box", pytest.param("fit", marks=pytest.mark.thorough)])
def test_a_result_is_replayed(made: Path, tmp_path: Path, run_cli: Run, name: str) -> None:
    file = made / "run" / "outputs" / f"{name}.png"
    ran = run_cli("replay", file, "-o", tmp_path / "again", "--device", "cpu", "--expect-equal")
    assert (ran.code, "equal: the pixels of" in ran.err) == (0, True), ran.err


def test_a_region_that_moves_keeps_the_drawing_or_says_how(tmp_path: Path, run_cli: Run) -> None:
    pictures(tmp_path)
    out = tmp_path / "out"

    def run(*flags: object, **more: Any) -> Any:
        return run_cli("generate", write(tmp_path, a=more), "-o", out, *FLAGS, *flags)

    assert run(keep_outside=True).code == 0
    # A region that is added later finishes the drawing of the whole again.
    ran = run(region=BOX)
    assert (ran.code, "1 edit finished again from the saved redraws" in ran.err) == (0, True)
    assert "1 edit drawn before from the whole source or one crop; --region-size native" in ran.err
    assert "crop" not in resolved(out)["a"]
    ran = run("--region-size", "native", region=BOX)
    assert ran.code == 2
    assert "crop: 1" in ran.err
    assert "hint: --region-size fit keeps the drawings of the whole source" in ran.err
    assert run("--region-size", "native", "--force", region=BOX).code == 0
    crop = resolved(out)["a"]["crop"]
    ran = run(region=BOX, region_mode="instead")
    assert (ran.code, "1 edit finished again" in ran.err) == (0, True)
    ran = run(region=[20, 40, 50, 66])
    assert (ran.code, f"hint: crop {crop} keeps the drawing" in ran.err) == (2, True)
    inner = [BOX[0] + 9, BOX[1], BOX[2], BOX[3] - 9]
    ran = run(region=inner, crop=crop)
    assert (ran.code, "1 edit finished again" in ran.err) == (0, True)
    own, found = np.asarray(photograph()), pixels_of(out, "a").copy()
    found[inner[1] : inner[3], inner[0] : inner[2]] = own[inner[1] : inner[3], inner[0] : inner[2]]
    assert np.array_equal(found, own)


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"crop": [0, 0, 500, 200], "region": BOX}, "crop", "crop"),
    ({"crop": [0, 0, 200, 200], "region": BOX}, "crop", "crop"),
    ({"crop": [0, 0, 200, 200], "region": "mask.png"}, "crop", "crop"),
    ({"crop": [0, 0, WIDTH, HEIGHT], "region": BOX}, "crop", "crop"),
    ({"crop": [0, 0, 200, 200], "keep_outside": True}, "crop", "crop"),
    ({"crop": [0, 0, 200, 200]}, "unconsumed", "crop"),
    ({"crop": [9, 9, 9, 200], "region": BOX}, "bad-value", "crop"),
    ({"crop": "a.png", "region": BOX}, "bad-value", "crop"),
    ({"crop": [99, 99, 299, 299], "region": BOX, "size": "64x32"}, "conflict", "size"),
    ({"crop": [99, 99, 299, 299], "region": BOX, "region_size": "fit"}, "unconsumed", None),
    ({"region": BOX, "size": "64x32"}, "conflict", "size"),
    ({"region": BOX, "region_size": "fit", "region_context": 1}, "unconsumed", None),
    ({"region": BOX, "region_pixels": 4}, "out-of-range", "region_pixels"),
    ({"region": BOX, "region_context": 5}, "out-of-range", "region_context"),
    ({"region": BOX, "region_size": "whole"}, "bad-value", "region_size"),
    ({"keep_outside": True, "region_context": 1}, "unconsumed", "region_context"),
    ({"region_size": "native"}, "unconsumed", "region_size"),
]


@pytest.mark.parametrize("case", thorough_but(REFUSED[1:16:4], REFUSED))
def test_check_and_plan_refuse_what_generate_refuses(
    tmp_path: Path, run_cli: Run, case: tuple[dict[str, Any], str, str | None]
) -> None:
    more, code, field = case
    pictures(tmp_path)
    path = write(tmp_path, a=more)
    said = [run_cli("check", path), run_cli("plan", path)]
    said.append(run_cli("generate", path, "-o", tmp_path / "out", *FLAGS))
    assert [ran.code for ran in said] == [2, 2, 2]
    first = {ran.err.split("\n  hint")[0] for ran in said}
    assert len(first) == 1
    (text,) = first
    assert f"error[manifest.{code}]" in text
    assert field is None or text.endswith(f"jobs.jsonl:1: {field}")
    if "region_pixels" in more:
        assert "hint: remove it: it draws 0.0039\n" in said[0].err
    assert not (tmp_path / "out").exists()
