"""PNGs that are written fast: pixels and metadata of Pillow's, as other programs read them."""

import io
from dataclasses import replace

import av
import numpy as np
import pytest
from PIL import Image

from hyimg_cli.media import fast_png, formats
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.tags import Tags

NOISE = np.random.default_rng(0).integers(0, 256, (200, 300, 4), np.uint8)


@pytest.mark.parametrize("channels", [(), (3,), (4,)])
def test_it_is_compressed_by_what_it_shows(channels: tuple[int, ...]) -> None:
    """Sequences occur again in drawings; in photographs only bytes do, if at all."""
    noise = NOISE[..., 0] if not channels else NOISE[..., : channels[0]]
    drawing = np.tile(noise[:20, :30], (10, 10, *(1 for _ in channels)))
    for pixels, how in ((noise, fast_png.BY_BYTES), (drawing, fast_png.BY_SEQUENCES)):
        assert fast_png.compression_of(pixels) == how
        data = formats.encode(pixels, fast=True)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)
    assert len(formats.encode(drawing, fast=True)) < len(formats.encode(noise, fast=True)) / 5
    assert formats.encode(noise[:3, :5], fast=True)


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (900, 1), (3, 5), (37, 100_000)])
def test_any_size(shape: tuple[int, int]) -> None:
    """Also rows that are longer than what is filtered at a time, and by a reader of another kind.

    Pixels that are no neighbours in memory are those of a crop.
    """
    pixels = np.resize(NOISE, (shape[0], 2 * shape[1], 3))[:, ::2]
    data = formats.encode(pixels, fast=True)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)
    with av.open(io.BytesIO(data)) as file:
        (frame,) = file.decode(video=0)
        assert np.array_equal(frame.to_ndarray(format="rgb24"), pixels)


def test_everything_but_the_rows_is_what_pillow_writes() -> None:
    text = PictureText(parameters="a red house, é", record='{"prompt": "é"}')
    exif = Image.Exif()
    exif[0x10E] = "a house"
    tags = replace(Tags(), exif=exif.tobytes(), dpi=(300, 200))
    found = [
        Image.open(io.BytesIO(formats.encode(NOISE, text=text, tags=tags, fast=fast)))
        for fast in (True, False)
    ]
    for one in found:
        one.load()
    fast, plain = found
    assert fast.info == plain.info
    assert (fast.mode, fast.size, formats.text_in(fast)) == (plain.mode, plain.size, text)
