"""Two drawings of one edit: each in its own parts of the region, and the worst of both is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal.test_job_pictures import job
from PIL import Image

from hyimg_cli.journal.job_pictures import Drawing
from hyimg_cli.journal.put_back import Made, put_back_all
from hyimg_cli.media.carried import read_carried, region_of
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import KeepOutside, Region

# Both crops hold the second box; it is drawn in the one whose middle is nearer.
FIRST, SECOND = (20, 30, 80, 90), (260, 40, 320, 100)
CROPS = ((0, 0, 360, 240), (140, 0, 500, 240))
RED, GREEN = (220, 30, 30), (30, 200, 40)


@pytest.fixture
def source(tmp_path: Path) -> np.ndarray:
    """A photograph's stand-in, 500 x 300."""
    numbers = np.random.default_rng(2)
    coarse = Image.fromarray(numbers.integers(60, 200, (30, 50, 3), np.uint8))
    levels = np.asarray(coarse.resize((500, 300), Image.Resampling.BICUBIC), np.float32)
    pixels = np.clip(levels + numbers.normal(0, 6, levels.shape), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "source.png")
    return pixels


def edited(tmp_path: Path) -> ImageJob:
    boxes = ";".join(",".join(map(str, box)) for box in (FIRST, SECOND))
    outside = KeepOutside(region=Region(boxes), region_mode="instead")
    one = job(tmp_path / "source.png", outside, crops=CROPS)
    return replace(one, size=SizeRequest(240, 360))


def drawn(source: np.ndarray, crop: tuple[int, ...], *painted: Any, cast: int = 0) -> Drawing:
    """A crop, drawn at its own size, with boxes painted and a cast over everything around them."""
    left, top, right, bottom = crop
    noise = np.random.default_rng(sum(crop)).normal(0, 4, source.shape)
    pixels = np.round(source + noise).astype(np.int16)
    for (x0, y0, x1, y1), colour in painted:
        # A cast of the drawn part alone shows at its seam.
        pixels[y0:y1, x0:x1] = np.int16(colour) + cast
        around = slice(max(0, y0 - 20), y1 + 20), slice(max(0, x0 - 20), x1 + 20)
        pixels[around] += cast
    shown = source[top:bottom, left:right]
    return Drawing(np.clip(pixels, 0, 255).astype(np.uint8)[top:bottom, left:right], shown)


def made(tmp_path: Path, drawings: list[Drawing]) -> tuple[Made, dict[str, Any]]:
    one = edited(tmp_path)
    assert one.outside is not None
    edit: dict[str, Any] = {}
    carried, given = read_carried(tmp_path / "source.png"), region_of(one.outside, Size(300, 500))
    return put_back_all(one, carried, drawings, given, edit, has_grey=True), edit


def test_no_pixel_is_edited_by_two_drawings(tmp_path: Path, source: np.ndarray) -> None:
    """The first drawing has also painted the second box, which is not its own."""
    drawings = [
        drawn(source, CROPS[0], (FIRST, RED), (SECOND, RED)),
        drawn(source, CROPS[1], (SECOND, GREEN)),
    ]
    result, edit = made(tmp_path, drawings)
    assert edit["kind"] == "local"
    assert [one["box"] for one in edit["crop"]] == [list(crop) for crop in CROPS]
    # The middles of the boxes, whose rims are blended.
    assert tuple(result.pixels[60, 50]) == pytest.approx(RED, abs=3)
    assert tuple(result.pixels[70, 290]) == pytest.approx(GREEN, abs=3)
    # Its first crop has edited one box, not both.
    share = 60 * 60 / (500 * 300)
    assert edit["area"] == pytest.approx(2 * share, rel=0.05)
    outside = np.ones(source.shape[:2], bool)
    for left, top, right, bottom in (FIRST, SECOND):
        outside[top:bottom, left:right] = False
    assert np.array_equal(result.pixels[outside], source[outside])


@pytest.mark.parametrize("faulty", [0, 1])
def test_the_worse_seam_of_two_is_the_edits(
    tmp_path: Path, source: np.ndarray, faulty: int
) -> None:
    painted = ((FIRST, RED), (SECOND, GREEN))
    drawings = [
        drawn(source, crop, one, cast=5 * (number == faulty))
        for number, (crop, one) in enumerate(zip(CROPS, painted, strict=True))
    ]
    _, edit = made(tmp_path, drawings)
    seams = [one["seam"] for one in edit["crop"]]
    assert seams[faulty]["cast"] > seams[1 - faulty]["cast"] + 1
    assert edit["seam"] == seams[faulty]
