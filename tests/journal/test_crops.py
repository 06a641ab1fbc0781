"""Files of an edit that was drawn from a crop of its source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal.conftest import in_mode
from PIL import ExifTags, Image, ImageCms

from hyimg_cli.journal.job_pictures import Drawing, finish, keep_redraws
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.media.images import on_white, read_view
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import KeepOutside, Region, TextSampling

BOX, CROP = (150, 90, 190, 130), (120, 64, 216, 160)


def photograph() -> Image.Image:
    """Upright: smooth, with a grain and a disc, 300 x 220."""
    y, x = np.mgrid[:220, :300]
    noise = np.random.default_rng(0).normal(0, 4, (220, 300, 3))
    levels = np.stack([x / 2 + 40, y / 2 + 60, 200 - x / 3], -1) + noise
    levels[np.hypot(y - 110, x - 170) < 16] = (200, 60, 50)
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def edited(path: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The disc of a file becomes blue in its crop, drawn at 64 x 64."""
    job = ImageJob(
        custom_id="a", task="it2i", prompt="blue", images=(str(path),), model="tiny-image",
        seed=0, size=SizeRequest(64, 64), num_inference_steps=1, guidance_scale=1.0, flow_shift=1.0,
        bot_task="none", text=TextSampling(0.0, 0, 1.0, 1),
        outside=KeepOutside(region=Region(",".join(map(str, BOX)))), crops=(CROP,),
    )  # fmt: skip
    shown = on_white(read_view(job.kept_view).pixels)
    assert shown.shape == (64, 64, 3)
    y, x = np.mgrid[:64, :64]
    drawn = shown.copy()
    drawn[np.hypot(y - 30.5, x - 33.5) < 10] = (40, 60, 210)
    with RunFolder(folder) as run:
        edit = keep_redraws(run, job, [Drawing(drawn, shown)], None)
        file = finish(run, job, [Drawing(drawn, shown)], edit, OutputConfig(folder))
    return folder / file.path, edit


def confirm(source: Image.Image, path: Path, edit: dict[str, Any]) -> np.ndarray:
    """The result is the upright source outside the region; returns the result."""
    with Image.open(path) as image:
        own, found = np.array(source), np.array(image.convert(source.mode))
    assert found.shape == own.shape
    left, top, right, bottom = BOX
    middle = found[110, 170].copy()
    found[top:bottom, left:right] = own[top:bottom, left:right]
    assert np.array_equal(found, own)
    assert (edit["kind"], edit["outside_differing_pixels"], edit["unseen"]) == ("local", 0, 0)
    assert edit["crop"]["box"] == [*CROP]
    assert left <= edit["box"][0] < edit["box"][2] <= right
    return middle


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
def test_a_crop_goes_back_to_a_source_of_any_kind(tmp_path: Path, mode: str) -> None:
    image = in_mode(photograph(), mode, clear=40)
    image.save(tmp_path / "in.png")
    path, edit = edited(tmp_path / "in.png", tmp_path / "out")
    source = image.convert("RGBA" if mode == "RGBA" else "RGB")
    assert int(confirm(source, path, edit)[2]) > 120, "the disc is blue"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_crop_counts_in_the_upright_picture(tmp_path: Path, orientation: int) -> None:
    upright, exif = photograph(), Image.Exif()
    turned = {
        1: [], 2: [0], 3: [3], 4: [1], 5: [5], 6: [2], 7: [6], 8: [4],
    }[orientation]  # fmt: skip
    stored = upright
    for turn in turned:
        stored = stored.transpose(Image.Transpose(turn))
    exif[ExifTags.Base.Orientation] = orientation
    stored.save(tmp_path / "in.png", exif=exif)
    path, edit = edited(tmp_path / "in.png", tmp_path / "out")
    assert int(confirm(upright, path, edit)[2]) > 120, "the disc is blue"


def test_a_profile_stays(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    photograph().save(tmp_path / "in.png", icc_profile=profile)
    path, edit = edited(tmp_path / "in.png", tmp_path / "out")
    confirm(photograph(), path, edit)
    with Image.open(path) as image:
        assert image.info["icc_profile"] == profile
