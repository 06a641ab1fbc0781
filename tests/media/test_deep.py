"""Deep and fractional pictures are read as their header says, or refused by name; never guessed."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from tiffs import tiff

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import probe_image, read_image

Read = Callable[[bytes], tuple[np.ndarray, tuple[str, ...]]]
RAMP = np.linspace(0, 65535, 12).round().astype(np.uint16).reshape(3, 4)
RGB = np.stack([RAMP, RAMP[::-1], RAMP[:, ::-1]], axis=2)
RGBA = np.concatenate([RGB, 65535 - RGB[..., :1]], axis=2)
BOTH = pytest.mark.parametrize("order", ["<", ">"])


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def pixels_of(data: bytes) -> tuple[np.ndarray, tuple[str, ...]]:
        (tmp_path / "a.tif").write_bytes(data)
        source = read_image(tmp_path / "a.tif")
        assert probe_image(tmp_path / "a.tif")[1] == source.notes
        return source.pixels, source.notes

    return pixels_of


def levels(values: np.ndarray, white: float) -> np.ndarray:
    return np.round(np.clip(values.astype(np.float64) / white, 0, 1) * 255).astype(np.uint8)


def refusal(read: Read, data: bytes) -> str:
    with pytest.raises(SourceImageError) as caught:
        read(data)
    assert caught.value.code == "source.unsupported"
    assert caught.value.hint
    return caught.value.what


@BOTH
@pytest.mark.parametrize("channels", [3, 4])
def test_colours_of_16_bits_in_planes_are_those_side_by_side(
    read: Read, order: str, channels: int
) -> None:
    for extra in [()] if channels == 3 else [(0,), (1,), (2,)]:
        tags, values = {338: extra} if extra else {}, RGBA[..., :channels]
        together, notes = read(tiff(values, order=order, tags=tags))
        apart, other_notes = read(tiff(values, order=order, tags=tags, planar=True))
        assert np.array_equal(apart, together), extra
        assert notes == other_notes
        assert notes[0] == "16-bit reduced to 8"
    if channels == 3:
        assert np.array_equal(apart, (RGB >> 8).astype(np.uint8))


@BOTH
def test_cmyk_of_16_bits_in_planes(read: Read, order: str) -> None:
    together, _ = read(tiff(RGBA, order=order, photometric=5))
    assert np.array_equal(read(tiff(RGBA, order=order, photometric=5, planar=True))[0], together)


@pytest.mark.parametrize(
    ("values", "how", "white"),
    [
        (RAMP, {}, 65535),
        (RAMP, {"order": ">"}, 65535),
        (RAMP.astype(np.uint32) * 65537, {}, 2**32 - 1),
        ((RAMP / 65535).astype(np.float32), {}, 1),
        ((RAMP / 65535).astype(np.float32), {"order": ">"}, 1),
    ],
    ids=["16", "16 big-endian", "32", "float", "float big-endian"],
)
def test_wide_grey_and_its_inverse(
    read: Read, values: np.ndarray, how: dict[str, Any], white: float
) -> None:
    expected = levels(values, white)
    assert np.array_equal(read(tiff(values, **how))[0][..., 0], expected)
    if how and values.dtype == np.uint16:
        assert "with white as 0" in refusal(read, tiff(values, photometric=0, **how))
    elif values.dtype != np.uint32:
        inverse, _ = read(tiff(values, photometric=0, **how))
        assert np.array_equal(inverse[..., 0], 255 - expected)


def test_a_packed_inverse_is_inverted_too(read: Read) -> None:
    packed = zlib.compress(RAMP.tobytes())
    pixels, _ = read(tiff(RAMP, photometric=0, body=packed, tags={259: (8,), 279: (len(packed),)}))
    assert np.array_equal(pixels[..., 0], 255 - levels(RAMP, 65535))


def test_12_bits_have_their_own_white(read: Read) -> None:
    values = np.array([[0, 16, 0x800, 0xFFF]], np.uint16)
    pixels, notes = read(tiff(values, bits=12, body=bytes.fromhex("000010800fff")))
    assert np.array_equal(pixels[..., 0], levels(values, 4095))
    assert notes == ("12-bit reduced to 8",)


def test_the_depth_of_32_bits_is_in_the_note(read: Read) -> None:
    assert read(tiff(RAMP.astype(np.uint32)))[1] == ("32-bit reduced to 8",)


@BOTH
@pytest.mark.parametrize(
    ("values", "how", "name"),
    [
        (RAMP.astype(np.int16), {}, "signed numbers"),
        (RAMP.astype(np.int32), {}, "signed numbers"),
        (RAMP.astype(np.int8), {}, "signed numbers"),
        ((RAMP / 65535).astype(np.float16), {}, "16-bit floating-point grey"),
        (RAMP.astype(np.float64), {}, "64-bit floating-point grey"),
        (RGB.astype(np.float32), {}, "32-bit floating-point RGB"),
        (RGB.astype(np.float32), {"planar": True}, "32-bit floating-point RGB"),
        (RGB.astype(np.uint32), {}, "32-bit RGB"),
        (RGB[..., :2], {"tags": {338: (2,)}}, "16-bit grey with further channels"),
        (RGB, {"photometric": 8}, "16-bit CIELab"),
        (RGB.astype(np.uint8), {"photometric": 8, "planar": True}, "CIELab in planes"),
        (RAMP, {"photometric": 3, "tags": {320: (0,) * 768}}, "16-bit palette"),
        (RAMP, {"photometric": 32803}, "16-bit camera RAW"),
        (RAMP, {"tags": {259: (34887,)}}, "compression 34887"),
        (RAMP, {"tags": {339: (4,)}}, "16-bit undefined grey"),
    ],
)
def test_what_is_not_read_is_named(
    read: Read, order: str, values: np.ndarray, how: dict[str, Any], name: str
) -> None:
    what = refusal(read, tiff(values, order=order, **how))
    assert what.startswith(("a TIFF of ", "a TIFF with "))
    assert name in what


@pytest.mark.parametrize(
    ("beyond", "clipped"),
    [
        ([1.0000001], 0),
        ([1.02, -0.01], 2),
        ([8.0] * 9, 9),
        ([4.0] * 160, 160),
        ([np.inf, -np.inf], 2),
        ([np.nan], 1),
    ],
    ids=["rounding", "ringing", "highlight", "many highlights", "infinite", "not a number"],
)
def test_floats_a_little_beyond_keep_their_white(
    read: Read, beyond: list[float], clipped: int
) -> None:
    values = np.tile(np.linspace(0, 1, 32, dtype=np.float32), (32, 1))
    values.flat[: len(beyond)] = beyond
    for white in (1, 255, 65535):
        wide = values * np.float32(white)
        pixels, notes = read(tiff(wide))
        expected = levels(np.nan_to_num(wide), white)
        assert np.abs(pixels[..., 0].astype(int) - expected).max() <= 1, white
        tail = f"; {clipped:,} of 1,024 clipped" if clipped else ""
        note = f"floating-point pixels (0 to {white}{tail}) reduced to 8 bits"
        assert notes == (note,), white


def test_a_few_bright_pixels_on_black_have_the_white_of_all(read: Read) -> None:
    """Black pixels say nothing of the range."""
    values = np.zeros((32, 32), np.float32)
    values[0, :4] = (60, 130, 200, 255)
    assert np.array_equal(read(tiff(values))[0][..., 0], levels(values, 255))
    assert not read(tiff(values * 0))[0].any()


def test_floats_of_two_ranges_are_refused(read: Read) -> None:
    values = np.full((10, 10), 0.5, np.float32)
    values[:3] = 90
    assert "30% of its floating-point pixels are above 1" in refusal(read, tiff(values))


# --- transparent colours of PNGs ----------------------------------------------------------------


def png(rows: list[bytes], bits: int, colour: int, width: int, key: bytes) -> bytes:
    data = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = ((b"IHDR", head), (b"tRNS", key), (b"IDAT", body), (b"IEND", b""))
    for name, part in chunks:
        data += struct.pack(">I", len(part)) + name + part
        data += struct.pack(">I", zlib.crc32(name + part))
    return data


@pytest.mark.parametrize(
    ("bits", "rows", "key", "expected"),
    [
        (1, [b"\x50"], 1, [0, 255, 0, 255]),
        (2, [b"\x1b"], 1, [0, 255, 170, 255]),
        (4, [b"\x0f\x5a"], 15, [0, 255, 85, 170]),
        (8, [bytes([0, 9, 100, 255])], 9, [0, 255, 100, 255]),
        (16, [struct.pack(">4H", 0, 300, 301, 65535)], 300, [0, 255, 1, 255]),
    ],
)
def test_the_transparent_grey_of_any_depth(
    read: Read, bits: int, rows: list[bytes], key: int, expected: list[int]
) -> None:
    pixels, notes = read(png(rows, bits, 0, 4, struct.pack(">H", key)))
    assert pixels[0, :, 0].tolist() == expected
    assert "transparency composited on white" in notes


@pytest.mark.parametrize("orientation", [1, 3])
def test_a_transparent_colour_of_16_bits_is_exact(tmp_path: Path, orientation: int) -> None:
    """A colour that differs only in the lower 8 bits is not transparent."""
    row = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0x1234, 0x5678, 0x9ABD)
    data = png([row], 16, 2, 2, struct.pack(">3H", 0x1234, 0x5678, 0x9ABC))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body
    chunk += struct.pack(">I", zlib.crc32(b"eXIf" + body))
    (tmp_path / "a.png").write_bytes(data[:33] + chunk + data[33:])
    pixels = read_image(tmp_path / "a.png").pixels[0].tolist()
    clear, opaque = [255, 255, 255], [0x12, 0x56, 0x9A]
    assert pixels == ([clear, opaque] if orientation == 1 else [opaque, clear])


def test_only_the_low_byte_of_a_transparent_colour_of_8_bits_counts(read: Read) -> None:
    data = png([bytes([9, 8, 7, 9, 8, 6])], 8, 2, 2, b"\xff\x09\xff\x08\xff\x07")
    assert read(data)[0].tolist() == [[[255] * 3, [9, 8, 6]]]


def test_wide_grey_of_other_formats(tmp_path: Path) -> None:
    for name in ("a.png", "a.pgm", "a.jp2"):
        Image.fromarray(RAMP).save(tmp_path / name)
        found = read_image(tmp_path / name).pixels[..., 0].astype(int)
        assert np.abs(found - levels(RAMP, 65535)).max() <= 1, name
    floats = io.BytesIO()
    Image.fromarray((RAMP / 65535).astype(np.float32)).save(floats, "PPM")
    (tmp_path / "a.pfm").write_bytes(floats.getvalue())
    assert np.array_equal(read_image(tmp_path / "a.pfm").pixels[..., 0], levels(RAMP, 65535))
