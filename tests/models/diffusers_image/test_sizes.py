"""Sizes of edits: in their source's shape, as asked for, or told; sources that are too narrow."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_editors
import torch
from conftest import thorough_but
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import calculate_dimensions
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as qwen
from models.diffusers_image.classic import Checkpoint, line, pixels_of, results
from PIL import Image

from hyimg_cli.models.diffusers_image.kind import size_by_source
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.models.registry import model_card
from hyimg_cli.spec.job import Size

SOURCES = [
    *(Size(3000, 4000), Size(600, 800), Size(1080, 1920), Size(900, 1411), Size(4000, 6000)),
    *(Size(64, 512), Size(1000, 1000), Size(1333, 750), Size(70, 80), Size(480, 640)),
]
EDITORS = [name for name, kind in KINDS.items() if kind.most]


@pytest.fixture
def small_references() -> None:
    """Here, the library's references have their own sizes."""


def size_in_library(name: str, shown: Size) -> Size:
    """The size to which the library brings a reference of this size, by its own functions."""
    area, ratio = 1024**2, shown.width / shown.height
    if "Qwen" in name:
        width, height, *_ = qwen.calculate_dimensions(area, ratio)
    elif "LongCat" in name:
        width, height = calculate_dimensions(area, ratio)
    elif "Kontext" in name:
        _, width, height = min((abs(ratio - w / h), w, h) for w, h in _PREFERRED)
    else:  # FLUX.2 and 3 shrink what is larger, and cut what is left over of 16
        factor = min(1.0, math.sqrt(area / (shown.width * shown.height)))
        width, height = (int(side * factor) // 16 * 16 for side in (shown.width, shown.height))
    return Size(int(height), int(width))


@pytest.mark.parametrize("name", EDITORS)
def test_the_library_does_not_resize_a_reference_of_the_size_in_which_it_is_kept(name: str) -> None:
    """By the library's own rules: a second resize blurs, and moves the edit."""
    kind = KINDS[name]
    for source in SOURCES:
        drawn = size_by_source(kind, 1024, source)
        # Others bring the kept source to its size by themselves.
        assert size_in_library(name, drawn if kind.fits_kept else source) == drawn, source
        if "Kontext" not in name:
            assert drawn.width / drawn.height == pytest.approx(
                source.width / source.height, rel=0.07
            )


@pytest.mark.parametrize(
    "kind", [kind for kind, name in tiny_editors.PIPELINES.items() if KINDS[name].most]
)
def test_the_library_does_not_resize_a_crop(checkpoint: Checkpoint, kind: str) -> None:
    card = replace(model_card(str(checkpoint(kind))), base_size=1024)
    name, sizes = tiny_editors.PIPELINES[kind], card.crop_sizes()
    for size in sizes:
        assert size_in_library(name, size) == size == card.kept_size(size)
        assert 0.65 * 1024**2 < size.height * size.width < 1.1 * 1024**2
    ratios = [size.height / size.width for size in sizes]
    assert ratios[0] <= 0.57
    assert ratios[-1] >= 1.75
    assert max(b / a for a, b in itertools.pairwise(ratios)) <= 1.17
    # No editor's library leaves larger references alone; FLUX.2's and 3's leave smaller ones alone.
    assert card.crop_sizes(1024**2) == sizes
    assert card.crop_sizes(2 * 1024**2) == ()
    smaller = card.crop_sizes(512**2)
    assert bool(smaller) == (kind.startswith(("klein", "flux2", "flux3")))
    assert all(size_in_library(name, size) == size for size in smaller)


_PREFERRED = PREFERRED_KONTEXT_RESOLUTIONS


@pytest.mark.parametrize("kind", ["klein", "kontext"])
def test_a_kept_source_is_shown_in_the_size_that_is_drawn(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str,
) -> None:  # fmt: skip
    """Other sources keep their own size."""
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (70, 150, 3), np.uint8)).save(
        tmp_path / "wide.png"
    )
    images = ["wide.png"] if kind == "kontext" else ["s0.png", "wide.png"]
    one = line("kept", "red", *images, num_inference_steps=1, keep_outside=True)
    one |= {} if kind == "kontext" else {"kept_source": 2}
    del one["size"]
    seen = []

    def see(module: Any, given: Any) -> None:
        if type(module).__name__ == "Encoder":
            seen.append(given[0].shape[-2:])

    hook = torch.nn.modules.module.register_module_forward_pre_hook(see)
    try:
        model, out = str(checkpoint(kind)), tmp_path / "out"
        run_cli("generate", str(write_manifest(one)), "--model", model, "-o", str(out))
    finally:
        hook.remove()
    with Image.open(out / "outputs" / "kept.reference.png") as shown:
        drawn = shown.size[::-1]
    assert drawn != (70, 150)
    assert set(map(tuple, seen)) == {drawn} | ({(64, 96)} if len(images) > 1 else set())


def test_an_edit_in_its_sources_shape_is_a_setting_of_every_editor(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> None:
    """Kontext's default is a square, which is told."""
    square = line("square", "red", "s0.png", num_inference_steps=1)
    del square["size"]
    aligned = square | {"custom_id": "aligned", "infer_align_image_size": True}
    model, out = str(checkpoint("kontext")), tmp_path / "out"
    manifest = str(write_manifest(square, aligned))
    run_cli("generate", manifest, "--model", model, "-o", str(out))
    shapes = {name: pixels.shape[:2] for name, pixels in pixels_of(out).items()}
    assert shapes == {"square": (96, 96), "aligned": (80, 112)}
    said = results(out)
    what = "an edit of a 96x64 source is drawn as a 96x96 square; infer_align_image_size gives"
    assert said["square"]["warnings"][0].startswith(what)
    assert said["aligned"]["warnings"] == []
    for command in ("check", "plan"):
        assert f"note: {what}" in run_cli(command, manifest, "--model", model).err
    flag = run_cli(
        "check", str(write_manifest(square)), "--model", model, "--infer-align-image-size"
    )
    assert "square" not in flag.err


@pytest.mark.parametrize(
    "kind",
    thorough_but(["klein"], ["qwen-image-edit-plus", "qwen-image-2.1", "klein", "longcat-edit"]),
)
def test_other_editors_keep_the_shape_anyhow(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str], kind: str
) -> None:
    """So the setting changes nothing; with a size in the line, one of the two is wrong."""
    plain = line("a", "red", "s0.png")
    del plain["size"]
    model = ("--model", str(checkpoint(kind)))
    aligned = plain | {"infer_align_image_size": True}
    totals = [
        run_cli("plan", str(write_manifest(one)), *model, "--json").json_lines[0]["total"]
        for one in (plain, aligned)
    ]
    assert totals[0] == totals[1]
    both = run_cli("check", str(write_manifest(aligned | {"size": "64x64"})), *model, "--json")
    codes = [one["fault"]["code"] for one in both.json_lines if "fault" in one]
    assert codes[0] == "manifest.conflict"


@pytest.mark.parametrize(
    ("kind", "size", "is_taken"),
    [
        ("kontext", (15, 15), False),
        ("kontext", (400, 15), False),
        ("kontext", (15, 400), False),
        ("kontext", (16, 3200), True),
        ("qwen-image-edit", (1, 164), False),
        ("qwen-image-edit", (328, 2), False),
        ("qwen-image-edit", (1, 163), True),
        ("qwen-image-edit-plus", (1, 199), True),
        ("qwen-image-2.1", (1, 36), False),
        ("qwen-image-2.1", (36, 1), False),
        ("qwen-image-2.1", (1, 35), True),
        ("klein", (64, 513), False),
        ("longcat-edit", (1, 200), True),
        ("flux3", (15, 64), False),
        ("flux3", (16, 3000), True),
    ],
)
def test_a_source_that_is_too_narrow_is_refused_by_check(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, kind: str,
    size: tuple[int, int], is_taken: bool,
) -> None:  # fmt: skip
    Image.new("RGB", size, "red").save(tmp_path / "narrow.png")
    one = line("a", "red", "narrow.png")
    del one["size"]
    found = run_cli("check", str(write_manifest(one)), "--model", str(checkpoint(kind)), "--json")
    codes = [one["fault"]["code"] for one in found.json_lines if "fault" in one]
    assert codes == ([] if is_taken else ["manifest.source-size"])
