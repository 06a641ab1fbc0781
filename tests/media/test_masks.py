"""A mask allows what its user says: white parts, or the transparent or the opaque ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter
from tiffs import tiff

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.carried import region_facts, region_of, region_parts
from hyimg_cli.media.masks import region_text, share_text
from hyimg_cli.settings.paths import REGION
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import KeepOutside, Region

HOLE = np.zeros((16, 16), bool)
HOLE[:8, :8] = True  # a quarter
Save = Callable[[Path], object]


def masked(colours: Any, alpha: np.ndarray) -> Image.Image:
    """A picture of these colours [16, 16, 3], or of one, with `alpha`."""
    layer = np.empty((16, 16, 4), np.uint8)
    layer[..., :3], layer[..., 3] = colours, alpha
    return Image.fromarray(layer)


def palette(path: Path) -> None:
    picture = Image.fromarray(np.where(HOLE, 0, 1).astype(np.uint8)).convert("P")
    picture.putpalette([255] * 3 + [255, 255, 255])
    picture.save(path, transparency=0)


def grey(bits: int) -> Save:
    def save(path: Path) -> None:
        levels = np.where(HOLE, 9, 200).astype(np.uint8 if bits == 8 else np.uint16)
        Image.fromarray(levels).save(path, transparency=9)

    return save


CLEAR = np.where(HOLE, np.uint8(0), np.uint8(255))
PHOTO = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
# Transparent in the same quarter; only the colours differ, also those under clear pixels.
HOLES: Mapping[str, Save] = {
    "photo.png": masked(PHOTO, CLEAR).save,
    "black.png": masked(0, CLEAR).save,
    "white.png": masked(255, CLEAR).save,
    "hidden-white.png": masked(np.where(HOLE, 255, 0)[..., None], CLEAR).save,
    "hidden-black.png": masked(np.where(HOLE, 0, 255)[..., None], CLEAR).save,
    "red.png": masked((255, 0, 0), CLEAR).save,
    "half-erased.png": masked(PHOTO, np.where(HOLE, np.uint8(100), np.uint8(200))).save,
    "grey-with-alpha.png": masked(77, CLEAR).convert("LA").save,
    "of-webp.webp": lambda path: masked(PHOTO, CLEAR).save(path, lossless=True, exact=True),
    "of-tiff.tif": masked(PHOTO, CLEAR).save,
    "palette.png": palette,
    "palette.gif": palette,
    "grey-8.png": grey(8),
    "grey-16.png": grey(16),
    "deep.tif": lambda path: path.write_bytes(
        tiff(np.dstack([PHOTO, CLEAR]).astype(np.uint16) * 257, tags={338: (2,)})
    ),
}


@pytest.mark.parametrize(
    ("share", "says"),
    [(0.004, "0.4%"), (0.0951, "9.5%"), (0.25, "25%"), (1, "100%")],
)
def test_a_small_share_is_said_to_a_tenth(share: float, says: str) -> None:
    assert share_text(share) == f"{says} of the picture"


def region(path: Path, alpha: str = "") -> np.ndarray:
    kept = KeepOutside(region=Region(f"{alpha}{path}"))
    assert kept.mask == str(path)
    levels = region_of(kept, Size(16, 16))
    assert levels is not None
    return levels > 127


@pytest.mark.parametrize("name", HOLES)
def test_a_mask_with_transparency_is_refused_until_its_user_says_what_it_means(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    HOLES[name](path)
    with pytest.raises(SourceImageError) as caught:
        region(path)
    assert (caught.value.code, caught.value.where) == ("source.region", str(path))
    assert "the transparent 25% of the picture, or the opaque 75%" in caught.value.what
    assert "transparent:PATH or opaque:PATH" in caught.value.hint
    assert np.array_equal(region(path, "transparent:"), HOLE)
    assert np.array_equal(region(path, "opaque:"), ~HOLE)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "F"])
def test_a_mask_without_transparency_is_its_brightness(tmp_path: Path, mode: str) -> None:
    levels, path = np.where(HOLE, np.uint8(255), np.uint8(0)), tmp_path / "mask.tif"
    picture = Image.fromarray(levels)
    match mode:
        case "I;16":
            picture = Image.fromarray(levels.astype(np.uint16) * 257)
        case "F":
            picture = Image.fromarray(levels.astype(np.float32) / 255)
        case _:
            picture = picture.convert(mode)
    picture.save(path)
    assert np.array_equal(region(path), HOLE)
    with pytest.raises(SourceImageError, match="not transparent anywhere"):
        region(path, "transparent:")


@pytest.mark.parametrize(
    ("picture", "alpha", "what"),
    [
        (Image.new("L", (16, 16), 127), "", "the mask is black \\(brightest level 127 of 255\\)"),
        (Image.new("RGBA", (16, 16), (255, 255, 255, 0)), "", "transparent 100%.*opaque 0%"),
        (Image.new("RGBA", (16, 16), (0, 0, 0, 0)), "opaque:", "no pixel of the mask is opaque"),
        (Image.new("RGBA", (16, 16), (0, 0, 0, 200)), "transparent:", "is transparent"),
    ],
)
def test_a_mask_that_allows_nothing(
    tmp_path: Path, picture: Image.Image, alpha: str, what: str
) -> None:
    picture.save(tmp_path / "mask.png")
    with pytest.raises(SourceImageError, match=what) as caught:
        region(tmp_path / "mask.png", alpha)
    assert caught.value.code == "source.region"


@pytest.mark.parametrize("alpha", ["", "transparent:", "opaque:"])
def test_the_meaning_stays_when_the_path_of_a_mask_changes(alpha: str) -> None:
    value = REGION.read(f"{alpha}in/m.png")
    assert REGION.names(value) == ["in/m.png"]
    moved = REGION.map_paths(value, lambda path: f"../{path}")
    assert moved == f"{alpha}../in/m.png"
    assert REGION.resolve_paths(value, Path("jobs")) == f"{alpha}jobs/in/m.png"
    # A file of such a name keeps a prefix that says that it is one.
    odd = REGION.map_paths(value, lambda path: "opaque:m.png")
    assert KeepOutside(region=odd).mask == "./opaque:m.png"
    assert KeepOutside(region=odd).edits_where == alpha.removesuffix(":")


def test_a_box_has_no_path() -> None:
    value = REGION.read([0, 0, 9, 9])
    assert REGION.map_paths(value, lambda path: "moved") == "0,0,9,9"
    assert KeepOutside(region=value).mask == KeepOutside(region=value).edits_where == ""


SMALL, SHAPE = Size(16, 16), Size(60, 80)


def levels_in(region: str, size: Size = SMALL, **more: Any) -> np.ndarray:
    levels = region_of(KeepOutside(region=Region(region), **more), size)
    assert levels is not None
    return levels


@pytest.mark.parametrize("alpha", ["", "transparent:", "opaque:"])
def test_what_a_region_keeps_is_the_rest_of_what_it_allows(tmp_path: Path, alpha: str) -> None:
    path = tmp_path / "mask.png"
    (masked(PHOTO, CLEAR) if alpha else Image.fromarray(CLEAR)).save(path)
    for region in (f"{alpha}{path}", "2,3,9,16"):
        allowed = levels_in(region)
        assert 0 < (allowed > 0).mean() < 1
        assert np.array_equal(levels_in(region, region_keeps="inside"), 255 - allowed)


@pytest.mark.parametrize(
    ("picture", "alpha", "what", "make"),
    [
        (Image.new("L", (16, 16), 255), "", "no pixel of the mask is black", "make it black"),
        (Image.new("LA", (16, 16), (9, 9)), "transparent:", "no pixel .* opaque", "make it opaque"),
        (Image.new("LA", (16, 16), (9, 240)), "opaque:", "is transparent", "make it transparent"),
        (None, "", "keeps the whole source", "smaller box"),
    ],
)
def test_a_region_that_keeps_the_whole_source_is_refused(
    tmp_path: Path, picture: Image.Image | None, alpha: str, what: str, make: str
) -> None:
    region = "0,0,16,16"
    if picture is not None:
        picture.save(tmp_path / "mask.png")
        region = f"{alpha}{tmp_path / 'mask.png'}"
    with pytest.raises(SourceImageError, match=what) as caught:
        levels_in(region, region_keeps="inside")
    assert (caught.value.code, make in caught.value.hint) == ("source.region", True)


def ellipse(blur: float = 0) -> Image.Image:
    """A white ellipse [60, 80]."""
    picture = Image.new("L", (80, 60))
    ImageDraw.Draw(picture).ellipse((22, 13, 55, 47), fill=255)
    return picture.filter(ImageFilter.GaussianBlur(blur)) if blur else picture


FILES = {
    "mask.png": {},
    "mask.tif": {"compression": "tiff_lzw"},
    "mask.webp": {"lossless": True},
    "lossy.webp": {"quality": 40},
    "jpeg.tif": {"compression": "jpeg", "quality": 60},
    "mask.jpg": {"quality": 30},
    "fine.jpg": {"quality": 95},
    "mask.avif": {"quality": 40},
}


@pytest.mark.parametrize("name", FILES)
def test_a_mask_of_two_levels_has_two_after_any_compression(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for low, high in ((0, 255), (40, 200)):
        picture = Image.fromarray(np.where(ellipse(), np.uint8(high), np.uint8(low)))
        picture.save(path, **FILES[name])
        levels, hard = levels_in(str(path), SHAPE), np.array(ellipse())
        assert {*np.unique(levels)} == {0, 255}
        assert (levels != hard).mean() < (0.005 if name in ("mask.jpg", "mask.avif") else 0.001)


@pytest.mark.parametrize("name", FILES)
def test_a_soft_mask_blends_by_its_levels_and_leaves_black_untouched(
    tmp_path: Path, name: str
) -> None:
    path, soft = tmp_path / name, np.array(ellipse(5))
    ellipse(5).save(path, **FILES[name])
    levels = levels_in(str(path), SHAPE)
    is_lossy = name.partition(".")[0] != "mask" or name.endswith(("jpg", "avif"))
    assert (levels[soft == 0] == 0).mean() > 0.98
    assert np.abs(levels.astype(int) - soft).max() <= (24 if is_lossy else 0)
    facts = region_facts(KeepOutside(region=Region(str(path))), levels)
    assert 0.1 < facts["region_blends"] < 0.6
    assert "; the soft mask blends" in region_text(facts)
    inside = levels_in(str(path), SHAPE, region_keeps="inside")
    assert np.array_equal(inside, 255 - levels)


def test_soft_alpha_blends(tmp_path: Path) -> None:
    path, soft = tmp_path / "mask.png", np.array(ellipse(3))
    Image.merge("LA", (Image.new("L", (80, 60)), ellipse(3))).save(path)
    assert np.array_equal(levels_in(f"opaque:{path}", SHAPE), soft)
    assert np.array_equal(levels_in(f"transparent:{path}", SHAPE), 255 - soft)


@pytest.mark.parametrize(("width", "height"), [(40, 30), (160, 120), (201, 150), (1000, 753)])
def test_a_mask_of_another_size_and_the_same_shape_is_resized(
    tmp_path: Path, width: int, height: int
) -> None:
    path = tmp_path / "mask.png"
    mask = Image.new("L", (width, height))
    mask.paste(255, (width // 4, height // 2, width // 2, height))
    mask.save(path)
    levels = levels_in(str(path), SHAPE)
    assert {*np.unique(levels)} == {0, 255}
    ys, xs = np.nonzero(levels)
    assert (
        np.abs(np.array([ys.min(), ys.max() + 1, xs.min(), xs.max() + 1]) - [30, 60, 20, 40]).max()
        <= 1
    )
    facts = region_facts(KeepOutside(region=Region(str(path))), levels)
    assert facts["region_mask"] == [width, height]
    assert f"the mask of {width}x{height} was resized" in region_text(facts)


@pytest.mark.parametrize(
    ("width", "height", "hint"),
    [
        (81, 60, "size or shape"),
        (80, 59, "size or shape"),
        (30, 40, "turn the mask"),
        (40, 40, "shape"),
    ],
)
def test_a_mask_of_another_shape_is_refused(
    tmp_path: Path, width: int, height: int, hint: str
) -> None:
    path = tmp_path / "mask.png"
    Image.new("L", (width, height), 255).save(path)
    with pytest.raises(SourceImageError, match=f"{width}x{height}, expected 80x60") as caught:
        levels_in(str(path), SHAPE)
    assert (caught.value.code, hint in caught.value.hint) == ("source.region", True)


def test_a_mask_is_turned_as_its_orientation_says(tmp_path: Path) -> None:
    path, exif = tmp_path / "mask.png", Image.Exif()
    exif[274] = 6
    ellipse().transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    assert np.array_equal(levels_in(str(path), SHAPE), np.array(ellipse()))


def test_the_bounds_of_a_region_have_all_that_may_change(tmp_path: Path) -> None:
    path, soft = tmp_path / "mask.png", ellipse(3)
    soft.save(path)
    (bounds,) = region_parts(KeepOutside(region=Region(str(path))), SHAPE)
    assert bounds == soft.getbbox() != ellipse().getbbox()
    box = KeepOutside(region=Region("0,0,80,20"), region_keeps="inside")
    assert region_parts(box, SHAPE) == ((0, 20, 80, 60),)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ("10,10,40,40;50,10,80,40", [(10, 10, 40, 40), (50, 10, 80, 40)]),  # near, but two
        ("10,10,40,40;30,30,80,40", [(10, 10, 80, 40)]),
        ("10,10,40,40;30,30,80,40;200,10,210,20", [(10, 10, 80, 40), (200, 10, 210, 20)]),
    ],
)
def test_boxes_are_parts_unless_they_overlap(boxes: str, expected: list[Any]) -> None:
    found = region_parts(KeepOutside(region=Region(boxes)), Size(100, 300))
    assert sorted(found) == expected


def test_a_mask_of_many_parts_has_eight_at_most_and_all_of_it(tmp_path: Path) -> None:
    levels = np.zeros((400, 2400), np.uint8)
    for n in range(12):
        levels[::399, n * 200 : n * 200 + 20] = 255
    Image.fromarray(levels).save(tmp_path / "mask.png")
    outside = KeepOutside(region=Region(str(tmp_path / "mask.png")))
    parts = region_parts(outside, Size(400, 2400))
    assert len(parts) == 8
    for left, top, right, bottom in parts:
        assert levels[top:bottom, left:right].any()
        levels[top:bottom, left:right] = 0
    assert not levels.any()
