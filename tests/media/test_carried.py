"""An edit in a source's own channels."""

import io

import numpy as np
from PIL import ExifTags, Image, ImageCms

from hyimg_cli.media.carried import Carried
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.tags import Tags
from hyimg_cli.spec.job import Encoding


def test_an_edit_of_clear_pixels_is_on_white_what_was_drawn() -> None:
    numbers = np.random.default_rng(0)
    own, drawn, matte = (
        numbers.integers(0, 256, (300, 80, *channels), np.uint8) for channels in ((4,), (3,), ())
    )
    matte[matte < 128] = 0
    own[:, :9, 3], drawn[:, 9:20], drawn[:, 20:25] = 0, 255, 252
    edited = Carried(drawn, own, "", Tags()).with_edit(drawn, drawn, matte)
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
    source = Carried(own[..., :3], own, "", Tags(profile, exif.tobytes()))
    for encoding in (Encoding("png"), Encoding("webp")):
        for text in (None, PictureText("", "", "")):
            with Image.open(io.BytesIO(source.encode(own, encoding, text))) as found:
                assert found.info["icc_profile"] == profile
                assert (ExifTags.Base.Artist in found.getexif()) == (text is not None)
                assert np.array_equal(np.asarray(found), own)
