"""Edits at the photograph's own resolution without a region: a draft of the whole finds it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from hyimg_cli.engine.run import run_manifest
from hyimg_cli.errors import ManifestError
from hyimg_cli.finishing.crops import crop_of
from hyimg_cli.models.registry import EMBEDDED, model_card
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec.job import Size

Run = Callable[..., Any]
EDIT = {"images": ["photo.png"], "seed": 1, "num_inference_steps": 6, "bot_task": "none"}
NATIVE = EDIT | {"keep_outside": True, "region_size": "native"}
LINES = (
    NATIVE | {"custom_id": "part", "prompt": "make the circle blue"},
    NATIVE | {"custom_id": "whole", "prompt": "a green background"},
    EDIT
    | {"custom_id": "given", "prompt": "make the circle green", "region": [200, 200, 440, 440]},
)
CIRCLE = (230, 230, 410, 410)


@pytest.fixture
def manifest(tmp_path: Path, write_manifest: Run) -> Path:
    image = Image.new("RGB", (640, 640), (248, 248, 248))
    ImageDraw.Draw(image).ellipse(CIRCLE, fill=(220, 40, 40))
    image.save(tmp_path / "photo.png")
    return Path(write_manifest(*LINES))


def test_a_draft_finds_the_part_that_is_drawn(
    run_cli: Run, manifest: Path, read_lines: Run, tmp_path: Path
) -> None:
    flags = (str(manifest), "-o", "out", "--device", "cpu", "--no-prewarm")
    assert run_cli("check", str(manifest)).code == 0
    # Two drafts of two steps, and three edits of six: at most two crops of two of them.
    before = run_cli("plan", *flags)
    assert "5 jobs, 34 denoise steps" in before.out
    assert "2 drafts will find regions" in before.err
    assert run_cli("generate", *flags).code == 0
    out = tmp_path / "out"
    drafts = read_lines(out / "regions" / "manifest.resolved.jsonl")
    assert [(one["custom_id"], one["num_inference_steps"]) for one in drafts] == [
        ("part", 2), ("whole", 2),
    ]  # fmt: skip
    lines = {one["custom_id"]: one for one in read_lines(out / "manifest.resolved.jsonl")}
    results = {one["custom_id"]: one for one in read_lines(out / "results.jsonl")}
    part, edit = lines["part"], results["part"]["edit"]
    region = tuple(int(side) for side in part["region"].split(","))
    # The line is an ordinary one: the region is the draft's box, grown.
    assert 150 < min(region[:2]) <= max(region[:2]) < CIRCLE[0]
    assert CIRCLE[2] < min(region[2:]) <= max(region[2:]) < 490
    crop = crop_of(region, Size(640, 640), model_card(EMBEDDED).crop_sizes())
    assert crop is not None
    assert edit["crop"]["box"] == [*crop.box]
    assert edit["kind"] == "local"
    assert results["part"]["notes"][0] == f"a draft changed 1 part in {part['region']}"
    source, made = (
        np.asarray(Image.open(path).convert("RGB"))
        for path in (tmp_path / "photo.png", out / results["part"]["outputs"][0]["path"])
    )
    left, top, right, bottom = region
    differs = (source != made).any(2)
    assert differs[top:bottom, left:right].any()
    differs[top:bottom, left:right] = False
    assert not differs.any()
    # An edit of everything is drawn as a whole, with all of its steps, and says why.
    assert "crop" not in lines["whole"]
    assert lines["whole"]["num_inference_steps"] == 6
    assert results["whole"]["notes"][0].startswith("a draft changed the whole picture (drift")
    # What a selection leaves out needs no draft.
    assert run_cli("generate", *flags, "--select", "given").code == 0
    # The same command finds all of it done, and so does a plan.
    again = run_cli("generate", *flags)
    assert again.code == 0
    assert "0 done, 0 failed, 3 skipped" in again.err
    assert "3 already done" in run_cli("plan", *flags).out
    assert len(read_lines(out / "results.jsonl")) == 3


def test_what_cannot_draw_drafts_asks_for_a_region(
    run_cli: Run, manifest: Path, tmp_path: Path
) -> None:
    """The library call, and a run of candidates."""
    config = RunConfig(output=OutputConfig(folder=tmp_path / "run"))
    with pytest.raises(ManifestError) as found:
        run_manifest(manifest, config)
    assert [one.code for one in found.value.faults] == ["manifest.missing-field"] * 2
    flags = ("--score", "outside", "--pick", "1", "--n", "2")
    for command in ("check", "plan", "generate"):
        ran = run_cli(command, str(manifest), *flags, "--json")
        assert ran.code == 2
        assert "the region's own resolution needs a region" in ran.out + ran.err
    refused = run_cli("plan", str(manifest), "--shard", "1/2")
    assert refused.code == 2
    assert "usage.regions" in refused.err


@pytest.mark.thorough
def test_changes_far_apart_are_drawn_in_two_crops_and_take_what_the_plan_says(
    run_cli: Run, tmp_path: Path, write_manifest: Run, read_lines: Run
) -> None:
    image, circles = Image.new("RGB", (640, 640), (248, 248, 248)), ((40,) * 2, (500,) * 2)
    for left, top in circles:
        ImageDraw.Draw(image).ellipse((left, top, left + 100, top + 100), fill=(220, 40, 40))
    image.save(tmp_path / "photo.png")
    line = NATIVE | {"custom_id": "two", "prompt": "make the circle blue"}
    flags = (str(write_manifest(line)), "-o", "out", "--device", "cpu", "--no-prewarm")
    assert "2 jobs, 14 denoise steps" in run_cli("plan", *flags).out
    assert run_cli("generate", *flags).code == 0
    runs = tmp_path / "out" / "regions", tmp_path / "out"
    (draft,), (made,) = (read_lines(run / "results.jsonl") for run in runs)
    assert (draft["denoise_steps"], made["denoise_steps"]) == (2, 12)
    (job,) = read_lines(tmp_path / "out" / "manifest.resolved.jsonl")
    regions = [tuple(map(int, box.split(","))) for box in job["region"].split(";")]
    files = tmp_path / "photo.png", tmp_path / "out/outputs/two.png"
    source, found = (np.array(Image.open(path).convert("RGB")) for path in files)
    for (x, y), (left, top, right, bottom), crop in zip(
        circles, regions, made["edit"]["crop"], strict=True
    ):
        assert left <= x < x + 100 <= right
        assert top <= y < y + 100 <= bottom
        assert crop["kind"] == "local"
        inside = slice(top, bottom), slice(left, right)
        assert (source[inside] != found[inside]).any()
        found[inside] = source[inside]
    assert np.array_equal(source, found)
    assert made["notes"][0] == f"a draft changed 2 parts in {job['region']}"
    assert "1 already done" in run_cli("plan", *flags).out
