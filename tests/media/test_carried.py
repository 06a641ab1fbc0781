"""An edit in a source's own channels."""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from hyimg_cli.media.carried import Carried
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.strips import pixels_of
from hyimg_cli.media.tags import Tags
from hyimg_cli.spec.job import Encoding


def test_an_edit_of_clear_pixels_is_on_white_what_was_drawn() -> None:
    numbers = np.random.default_rng(0)
    own, drawn, matte = (
        numbers.integers(0, 256, (300, 80, *channels), np.uint8) for channels in ((4,), (3,), ())
    )
    matte[matte < 128] = 0
    own[:, :9, 3], drawn[:, 9:20], drawn[:, 20:25] = 0, 255, 252
    edited = Carried(own, "", Tags()).with_edit(drawn, drawn, matte)
    assert np.array_equal(edited[matte == 0], own[matte == 0])
    layer = Image.fromarray(edited)
    white = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    away = np.abs(np.asarray(white).astype(int) - drawn).max(axis=2)[matte > 0]
    ink = 255 - drawn.min(axis=2)[matte > 0]
    assert away[ink > 6].max() <= 1
    assert away.max() <= 6, "so little ink is noise"
    assert (edited[..., 3] >= own[..., 3]).all()
    assert not edited[:, 9:20][own[:, 9:20, 3] == 0].any(where=[False, False, False, True])


def test_what_goes_along_and_stays_under_clear_pixels() -> None:
    """The profile always, EXIF with the metadata; a lossless WebP keeps colours that are clear."""
    exif = Image.Exif()
    exif[ExifTags.Base.Artist] = "somebody"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    own = np.random.default_rng(0).integers(0, 256, (8, 9, 4), np.uint8)
    own[:4, :, 3] = 0
    source = Carried(own, "", Tags(profile, exif.tobytes()))
    for encoding in (Encoding("png"), Encoding("webp")):
        for text in (None, PictureText("", "", "")):
            with Image.open(io.BytesIO(source.encode(own, encoding, text))) as found:
                assert found.info["icc_profile"] == profile
                assert (ExifTags.Base.Artist in found.getexif()) == (text is not None)
                assert np.array_equal(np.asarray(found), own)


@pytest.mark.parametrize("channels", [(), (4,)], ids=["grey", "rgba"])
def test_differing_pixels_are_counted_in_every_strip(channels: tuple[int, ...]) -> None:
    """A picture of more than one strip, of 4 million pixels."""
    own = np.full((2100, 2000, *channels), 128, np.uint8)
    matte = np.zeros(own.shape[:2], np.uint8)
    matte[-1, :5] = 1
    source, result = Carried(own, "", Tags()), own.copy()
    for at in ((0, 0), (1999, 7), (2000, 7), (-1, 3), (-1, -1)):
        result[at] = 129
    data = source.encode(result, Encoding("png"), None)
    assert source.count_differing(data, matte) == 4, "one of the five may differ"
    assert source.count_differing(source.encode(own, Encoding("png"), None), matte) == 0


def test_a_picture_in_strips_is_the_same_picture() -> None:
    own = np.random.default_rng(0).integers(0, 256, (2100, 2000, 4), np.uint8)
    layer = Image.fromarray(own)
    assert np.array_equal(pixels_of(layer), own)
    white = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    assert np.array_equal(Carried(own, "", Tags()).pixels, np.asarray(white))
