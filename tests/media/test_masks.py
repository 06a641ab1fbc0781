"""A mask allows what its user says: white parts, or the transparent or the opaque ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiffs import tiff

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.carried import region_of
from hyimg_cli.media.masks import share_text
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
