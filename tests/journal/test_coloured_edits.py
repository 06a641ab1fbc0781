"""An edit of a source in other colours: its numbers stay outside, the edit shows what was drawn."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from hyimg_cli.errors import SourceImageError
from hyimg_cli.measure.outside import outside_of
from hyimg_cli.media.carried import depth_fault, read_carried
from hyimg_cli.media.images import read_image
from hyimg_cli.spec.job import Encoding
from hyimg_cli.spec.options import KeepOutside
from tests import coloured
from tests.journal.test_job_pictures import opened, picture, put_back

INK = (40, 163, 76)
P3 = coloured.profile("Display P3")
LINEAR = {"gAMA": coloured.gamma_chunk(1.0)}
WAYS: dict[str, dict[str, Any]] = {
    "profile": {"icc_profile": P3},
    "wide": {"icc_profile": coloured.profile("ProPhoto")},
    "gamma": {"chunks": LINEAR},
    "codes": {"chunks": {"cICP": bytes((12, 13, 0, 1))}},
    "dcf": {"dcf": "R03"},
}


def source_in(folder: Path, mode: str, **tags: Any) -> Path:
    image = picture().convert(mode)
    if mode == "RGBA":
        clear = np.full((101, 150), 255, np.uint8)
        clear[:, 60:70] = 128  # through the disc
        image.putalpha(Image.fromarray(clear))
    return coloured.write(folder / "source.png", np.asarray(image), dpi=300, **tags)


@pytest.mark.parametrize(
    ("encoding", "metadata"),
    [(Encoding(), True), (Encoding("webp"), False)],
    ids=["png", "webp without metadata"],
)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_stay_and_mean_the_same(
    tmp_path: Path, way: str, metadata: bool, encoding: Encoding
) -> None:
    source = source_in(tmp_path, "RGB", **WAYS[way])
    path, edit = put_back(tmp_path / "out", source, ink=INK, metadata=metadata, encoding=encoding)
    free = opened(tmp_path / "out" / edit["mask"]) == 0
    assert np.array_equal(opened(path)[free], opened(source)[free])
    before, after = read_image(source), read_image(path)
    assert np.array_equal(after.pixels[free], before.pixels[free]), "it is read the same again"
    assert after.notes == before.notes
    assert np.abs(after.pixels[45:56, 66:75].astype(int) - INK).max() <= 4, "as it was drawn"
    with Image.open(path) as image:
        dpi = image.info.get("dpi") or (image.getexif().get(0x011A),)
        assert abs(float(dpi[0]) - 300) < 0.1
    found = outside_of(source, path, KeepOutside())
    assert (found["outside_equal"], "compared_in" in found) == (True, False)


@pytest.mark.parametrize(("mode", "ink"), [("L", (60, 60, 60)), ("L", INK), ("RGBA", INK)])
def test_greys_and_alpha_too(tmp_path: Path, mode: str, ink: tuple[int, int, int]) -> None:
    profile = coloured.grey(1.4) if mode == "L" else P3
    source = source_in(tmp_path, mode, icc_profile=profile)
    path, edit = put_back(tmp_path / "out", source, ink=ink)
    free = opened(tmp_path / "out" / edit["mask"]) == 0
    own, found = (opened(one, "RGBA") for one in (source, path))
    assert np.array_equal(own[free], found[free])
    before, after = read_image(source).pixels, read_image(path).pixels
    assert np.abs(after[free].astype(int) - before[free]).max() <= 1
    assert np.abs(after[45:56, 62:75].astype(int) - ink).max() <= 4
    with Image.open(path) as image:
        assert image.mode == (mode if mode != "L" or len({*ink}) == 1 else "RGB")
        opened_profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        assert opened_profile.profile.xcolor_space.strip() == (
            "GRAY" if image.mode == "L" else "RGB"
        )


def test_colours_beyond_srgb_stay_around_the_edit(tmp_path: Path) -> None:
    """The whole background is of a red that sRGB has not."""
    numbers = np.full((101, 150, 3), (250, 40, 30), np.uint8)
    numbers[::7, ::5] = (240, 60, 40)
    numbers[30:70, 50:95] = (60, 60, 200)
    source = coloured.write(tmp_path / "source.png", numbers, icc_profile=P3)
    path, edit = put_back(tmp_path / "out", source, ink=INK)
    matte, found = opened(tmp_path / "out" / edit["mask"]), opened(path).astype(int)
    assert (matte == 0).any()
    edge = (matte > 0) & (matte < 40)
    assert edge.any()
    assert np.abs(found - numbers)[edge].max() <= 40, "no step at the border of the matte"


def test_a_result_whose_tags_are_lost_is_compared_by_its_colours(tmp_path: Path) -> None:
    source = source_in(tmp_path, "RGB", icc_profile=P3)
    shown, raw = tmp_path / "shown.png", tmp_path / "raw.png"
    Image.fromarray(read_carried(source).pixels).save(shown)
    coloured.write(raw, opened(source))
    same, other = (outside_of(source, one, KeepOutside()) for one in (shown, raw))
    assert (same["differing_pixels"], same["compared_in"]) == (0, "sRGB")
    assert other["differing_pixels"] > 0


def test_colours_without_a_way_back_are_refused(tmp_path: Path) -> None:
    source = source_in(tmp_path, "RGB", chunks={"cICP": bytes((9, 16, 0, 1))})
    assert read_image(source).notes == ("BT.2020 PQ converted to sRGB (highlights clipped)",)
    with pytest.raises(SourceImageError, match="PQ, to which an edit cannot") as refused:
        read_carried(source)
    assert str(depth_fault(source)) == str(refused.value)
