"""Regions that are drawn at the photograph's own resolution, by each editor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import thorough_but
from models.diffusers_image.classic import Checkpoint, line, pixels_of, results
from PIL import Image

from hyimg_cli.models.diffusers_image.record import EditorFolder
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest, View
from hyimg_cli.spec.options import KeepOutside, TextSampling

EDITORS = ["qwen-image-edit", "qwen-image-edit-plus", "klein", "klein-kv", "flux2-dev", "kontext"]
EDITORS += ["longcat-edit", "qwen-image-2.1", "flux3"]
# Models that see no source, and draw in a region of one.
DRAWING = ["qwen-image", "z-image", "flux-dev", "krea2", "longcat"]
BOXES = {"one": (190, 120, 226, 150), "two": (30, 60, 70, 86)}


@pytest.mark.parametrize("kind", thorough_but(["klein", "z-image"], [*EDITORS, *DRAWING]))
def test_two_crops_of_one_photograph_share_nothing_that_differs(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, kind: str
) -> None:
    """Each is drawn as by a run of its own, and everything else is the photograph's."""
    source = np.random.default_rng(1).integers(0, 256, (300, 420, 3), np.uint8)
    Image.fromarray(source).save(tmp_path / "photo.png")
    lines = {name: line(name, "red", "photo.png", region=[*box]) for name, box in BOXES.items()}
    for one in lines.values():
        del one["size"]
        one |= {"region_mode": "inpaint"} if kind in DRAWING else {}
    command = ("generate", "--model", str(checkpoint(kind)))
    together, alone = tmp_path / "together", tmp_path / "alone"
    run_cli(*command, str(write_manifest(*lines.values())), "-o", str(together))
    run_cli(*command, str(write_manifest(lines["two"])), "-o", str(alone))
    made, done = pixels_of(together), results(together)
    assert np.array_equal(made["two"], pixels_of(alone)["two"])
    for name, (left, top, right, bottom) in BOXES.items():
        edit, found = done[name]["edit"], made[name].copy()
        assert not np.array_equal(found, source)
        found[top:bottom, left:right] = source[top:bottom, left:right]
        assert np.array_equal(found, source)
        with Image.open(together / edit["plain"]) as redraw:
            assert [*redraw.size] == edit["crop"]["drawn"]


def test_limits_of_a_source_are_those_of_its_crop(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A narrow photograph has regions that are not; and each crop has an encoding of its own."""
    Image.new("RGB", (1200, 100)).save(tmp_path / "narrow.png")
    folder = EditorFolder(checkpoint("klein"), "klein")
    defaults, path = folder.card.defaults, str(tmp_path / "narrow.png")
    job = ImageJob(
        custom_id="a", task="it2i", prompt="red", model="", images=(path,), seed=7,
        size=SizeRequest(96, 96), text=TextSampling(), outside=KeepOutside(),
        num_inference_steps=2, guidance_scale=1.0, flow_shift=defaults.flow_shift,
    )  # fmt: skip
    found = []
    for left in (0, 100):
        cropped = replace(job, crops=((left, 0, left + 100, 100),))
        folder.check(cropped)
        assert cropped.views == (View(path, cropped.crops[0], Size(96, 96)),)
        (_, item) = folder.encodings(cropped, ["digest"])[-1]
        found.append(item)
    assert found[0] != found[1]


def test_a_size_that_was_chosen_for_a_crop_may_be_given(checkpoint: Checkpoint) -> None:
    """As a resolved line gives it, whatever area was asked for."""
    card = replace(EditorFolder(checkpoint("klein"), "klein").card, base_size=1024)
    for pixels in (None, 1 << 18, 1 << 19, 1 << 20):
        sizes = card.crop_sizes(pixels)
        assert sizes
        assert all(map(card.sees_unresized, sizes))
    assert not card.sees_unresized(Size(1184, 1184))
    assert not card.sees_unresized(Size(1000, 1000))
