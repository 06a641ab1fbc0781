"""Hostile and odd pictures are read as upright RGB or refused by name; PNGs are whole or absent."""

import contextlib
import errno
import io
import json
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from hyimg_cli import files
from hyimg_cli.errors import SourceImageError, StorageError
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.media import formats, kinds
from hyimg_cli.media.carried import depth_fault, own_picture, read_carried, region_of
from hyimg_cli.media.images import (
    cut_off,
    fit_cover,
    pixel_digest,
    probe_image,
    read_image,
    read_small,
    size_of,
    text_of,
)
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.source_files import (
    MAX_ASPECT,
    MAX_SOURCE_BYTES,
    MAX_SOURCE_PIXELS,
    decoder_faults,
    file_faults,
)
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Encoding, Size
from hyimg_cli.spec.options import KeepOutside, Region

Save = Callable[..., Path]
RED, GREEN, BLUE = (200, 30, 30), (30, 160, 60), (20, 40, 180)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def saved(picture: Image.Image, name: str = "a.png", **more: Any) -> Path:
        picture.save(tmp_path / name, **more)
        return tmp_path / name

    return saved


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    def written(data: bytes, name: str = "a.png") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return written


def in_lab(picture: Image.Image) -> Image.Image:
    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.applyTransform(picture, ImageCms.buildTransform(rgb, lab, "RGB", "LAB"))


def two_tone(mode: str = "RGB", size: tuple[int, int] = (20, 10)) -> Image.Image:
    """Red on the left, blue on the right."""
    picture = Image.new("RGB", size, RED)
    picture.paste(BLUE, (size[0] // 2, 0, *size))
    if mode == "LAB":
        return in_lab(picture)
    return picture.quantize(4) if mode == "P" else picture.convert(mode)


def refusal(path: Path) -> SourceImageError:
    """The error that both ways of looking at a file give."""
    with pytest.raises(SourceImageError) as probed:
        probe_image(path)
    with pytest.raises(SourceImageError) as read:
        read_image(path)
    assert probed.value.code == read.value.code
    assert read.value.where == str(path)
    assert read.value.exit_code == 1
    return read.value


def png(width: int, height: int, *, data: bytes = b"") -> bytes:
    """A PNG that claims to be `width` x `height`, 8 bit RGB."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


# --- what is read -------------------------------------------------------------------------------


def test_a_plain_picture_comes_back_as_it_is(save: Save) -> None:
    path = save(two_tone())
    source = read_image(path)
    assert source.pixels.dtype == np.uint8
    assert source.pixels.shape == (10, 20, 3)
    assert tuple(source.pixels[0, 0]) == RED
    assert tuple(source.pixels[0, -1]) == BLUE
    assert source.digest == digest.of_file(path)
    assert source.notes == ()
    assert probe_image(path) == (Size(10, 20), ())
    assert probe_image(path, decode=False) == (Size(10, 20), ())


@pytest.mark.parametrize(
    ("mode", "name", "note"),
    [
        ("CMYK", "a.jpg", "CMYK converted to RGB"),
        ("CMYK", "a.tif", "CMYK converted to RGB"),
        ("YCbCr", "a.tif", "YCbCr converted to RGB"),
        ("LAB", "a.tif", "LAB converted to RGB"),
        ("RGBA", "a.png", "RGBA converted to RGB"),
        ("P", "a.png", "palette converted to RGB"),
        ("P", "a.gif", "palette converted to RGB"),
        ("RGB", "a.webp", None),
        ("RGB", "a.bmp", None),
        ("RGB", "a.avif", None),
        ("RGB", "a.ppm", None),
        ("RGB", "a.jp2", None),
    ],
)
def test_colours_survive_other_modes_and_formats(
    save: Save, mode: str, name: str, note: str | None
) -> None:
    lossless = {"lossless": True} if name == "a.webp" else {}
    path = save(two_tone(mode, (64, 32)), name, **lossless)
    source = read_image(path)
    assert np.abs(source.pixels[16, 8].astype(int) - RED).max() <= 16
    assert np.abs(source.pixels[16, 56].astype(int) - BLUE).max() <= 16
    assert source.notes == ((note,) if note else ())
    assert probe_image(path) == (Size(32, 64), source.notes)


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_is_no_news(save: Save, mode: str) -> None:
    source = read_image(save(Image.new(mode, (4, 4), 1 if mode == "1" else 77)))
    assert (source.pixels == (255 if mode == "1" else 77)).all()
    assert source.notes == ()


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_grey_is_scaled_not_clipped(save: Save, name: str) -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], np.uint16)
    source = read_image(save(Image.fromarray(values), name))
    assert source.pixels[0, :, 0].tolist() == [0, 1, 128, 255]
    assert source.notes == ("16-bit reduced to 8",)


def test_16_bit_colour_is_noted(put: Callable[[bytes], Path]) -> None:
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    row = zlib.compress(b"\0" + struct.pack(">HHH", 65535, 32768, 0))
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), (b"IDAT", row), (b"IEND", b"")):
        data += (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )
    source = read_image(put(data))
    assert source.pixels.tolist() == [[[255, 128, 0]]]
    assert source.notes == ("16-bit reduced to 8",)


@pytest.mark.parametrize(
    ("values", "expected", "range_"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255], "0 to 1"),
        ([0.0, 100.4, 255.0], [0, 100, 255], "0 to 255"),
        ([0, 65535, 99999], [0, 255, 255], "0 to 65535; 1 of 3 clipped"),
    ],
)
def test_pictures_of_fractions(
    save: Save, values: list[float], expected: list[int], range_: str
) -> None:
    source = read_image(save(Image.fromarray(np.array([values], np.float32)), "a.tif"))
    assert source.pixels[0, :, 0].tolist() == expected
    assert source.notes == (f"floating-point pixels ({range_}) reduced to 8 bits",)


def test_fractions_that_are_no_numbers_are_black(save: Save) -> None:
    values = np.array([[np.nan, 1.0, -1.0]], np.float32)
    source = read_image(save(Image.fromarray(values), "a.tif"))
    assert source.pixels[0, :, 0].tolist() == [0, 255, 0]


def transparent(mode: str) -> tuple[Image.Image, dict[str, Any]]:
    """Left half see-through, right half blue (or dark), in a mode that can say so."""
    layer = two_tone("RGBA")
    layer.paste((*GREEN, 0), (0, 0, 10, 10))
    if mode == "P":
        picture = Image.new("P", (20, 10), 0)
        picture.putpalette([*GREEN, *BLUE])
        picture.paste(1, (10, 0, 20, 10))
        return picture, {"transparency": 0}
    if mode == "RGB":
        picture = Image.new("RGB", (20, 10), GREEN)
        picture.paste(BLUE, (10, 0, 20, 10))
        return picture, {"transparency": GREEN}
    return layer.convert(mode), {}


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparency_becomes_white(save: Save, mode: str) -> None:
    picture, more = transparent(mode)
    source = read_image(save(picture, **more))
    assert (source.pixels[:, :10] == 255).all()
    assert source.pixels[5, 15].max() < 200
    assert "transparency composited on white" in source.notes


def test_half_transparency_is_mixed_with_white(save: Save) -> None:
    source = read_image(save(Image.new("RGBA", (1, 1), (0, 0, 0, 128))))
    assert source.pixels.tolist() == [[[127, 127, 127]]]


def bmp(alpha: int, header: int) -> bytes:
    """A red BMP of 4 x 4 pixels with 32 bits and an alpha mask, in a V4 or V5 header."""
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    info = struct.pack("<IiiHHIIiiII", header, 4, 4, 1, 32, 3, 64, 0, 0, 0, 0) + masks
    info += bytes(header - len(info))
    start = struct.pack("<2sIHHI", b"BM", 14 + header + 64, 0, 0, 14 + header)
    return start + info + bytes([RED[2], RED[1], RED[0], alpha]) * 16


@pytest.mark.parametrize("header", [108, 124])
def test_a_bmp_whose_alpha_is_0_is_opaque(put: Callable[..., Path], header: int) -> None:
    path = put(bmp(0, header), "a.bmp")
    source = read_image(path)
    assert (source.pixels == RED).all()
    assert "its alpha is 0 everywhere, so it is read as opaque" in source.notes
    assert "transparency composited on white" not in source.notes
    assert probe_image(path) == (Size(4, 4), source.notes)
    assert read_carried(path).own.shape == (4, 4, 3)
    assert read_image(path, keeps_alpha=True).pixels.shape == (4, 4, 3)
    mask = KeepOutside(region=Region(str(path)))
    with pytest.raises(SourceImageError, match="the mask is black"):  # of its colours alone
        region_of(mask, Size(4, 4))
    half = read_image(put(bmp(128, header), "half.bmp"))
    assert half.pixels[0, 0].tolist() == [227, 142, 142]


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif", "a.ico", "a.gif"])
def test_a_picture_that_is_transparent_everywhere_says_so(save: Save, name: str) -> None:
    clear = Image.new("RGBA", (16, 16), (*RED, 0))
    source = read_image(save(clear, name))
    assert (source.pixels == 255).all()
    assert "the picture is transparent everywhere" in source.notes


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif"])
def test_the_first_frame_of_a_moving_picture(save: Save, name: str) -> None:
    frames = [Image.new("RGB", (16, 8), colour) for colour in (RED, GREEN, BLUE)]
    path = save(frames[0], name, save_all=True, append_images=frames[1:], duration=50)
    source = read_image(path)
    assert np.abs(source.pixels[4, 8].astype(int) - RED).max() <= 12
    assert source.notes[0] == "first of 3 frames"
    assert probe_image(path) == (Size(8, 16), source.notes)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(save: Save, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(two_tone(), exif=exif)
    source = read_image(path)
    on_side = orientation >= 5
    assert source.pixels.shape == ((20, 10, 3) if on_side else (10, 20, 3))
    assert source.notes == (() if orientation == 1 else ("EXIF orientation applied",))
    red_first = orientation in (1, 4, 5, 6)
    assert tuple(source.pixels[0, 0]) == (RED if red_first else BLUE)
    assert (
        probe_image(path, decode=False)[0] == probe_image(path)[0] == Size(*source.pixels.shape[:2])
    )


@pytest.mark.parametrize("name", ["a.jpg", "a.tif", "a.webp", "a.avif"])
def test_a_turned_pictures_head_says_the_size_it_is_read_in(save: Save, name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(two_tone(size=(64, 32)), name, exif=exif)
    assert read_image(path).pixels.shape == (64, 32, 3)
    assert probe_image(path)[0] == probe_image(path, decode=False)[0] == Size(64, 32)
    assert probe_image(path)[1] == read_image(path).notes == ("EXIF orientation applied",)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
def test_a_changed_byte_is_found_alike_by_looking_and_by_reading(save: Save, name: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    path = save(Image.fromarray(noise), name)
    whole, found = path.read_bytes(), set()
    for at in range(len(whole) // 8, len(whole), len(whole) // 8):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        verdicts = []
        for look in (probe_image, read_image, read_carried):
            with contextlib.suppress(SourceImageError):
                look(path)
                verdicts.append(look)
        assert len(verdicts) in (0, 3), at
        found.add(len(verdicts))
    assert 0 in found or name != "a.png"


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_impossible_orientation_is_none(save: Save, value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    source = read_image(save(two_tone(), exif=exif))
    assert source.pixels.shape == (10, 20, 3)
    assert source.notes == ()


def heic(picture: Image.Image, path: Path) -> Path:
    pytest.importorskip("pillow_heif").from_pillow(picture).save(path, quality=90)
    return path


@pytest.mark.parametrize("name", ["IMG_0001.HEIC", "renamed.jpg"])
def test_a_phones_heic(tmp_path: Path, name: str) -> None:
    path = heic(two_tone(size=(64, 32)), tmp_path / name)
    source = read_image(path)
    assert np.abs(source.pixels[16, 5].astype(int) - RED).max() <= 12
    assert np.abs(source.pixels[16, 60].astype(int) - BLUE).max() <= 12
    assert probe_image(path) == (Size(32, 64), source.notes) == (Size(32, 64), ())


def test_a_heic_of_10_bits_says_so(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    deep = np.full((32, 64, 3), 40_000, np.uint16)
    heif.from_bytes("RGB;16", (64, 32), deep.tobytes()).save(tmp_path / "a.heic")
    assert read_image(tmp_path / "a.heic").notes == ("10-bit reduced to 8",)
    fault = depth_fault(tmp_path / "a.heic")
    assert fault is not None
    assert fault.code == "source.source-depth"


def test_a_damaged_heic(tmp_path: Path) -> None:
    path = heic(two_tone(size=(64, 32)), tmp_path / "a.heic")
    path.write_bytes(path.read_bytes()[:-50])
    assert refusal(path).code == "source.truncated"


@pytest.mark.parametrize("has_library", [True, False])
def test_an_avif_that_begins_like_a_heic(
    save: Save, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    monkeypatch.setattr(kinds, "knows_heif", kinds.knows_heif if has_library else lambda: False)
    path = save(two_tone(size=(64, 32)), "a.avif")
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"mif1" + data[12:])
    assert read_image(path).pixels.shape == (32, 64, 3)


def test_a_heic_without_the_library_is_told_what_reads_it(
    put: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "find_spec", lambda name: None)
    kinds.knows_heif.cache_clear()
    error = refusal(put(b"\0\0\0\x18ftypheic" + bytes(100)))
    kinds.knows_heif.cache_clear()
    assert error.code == "source.no-heif"
    assert "[heif]" in error.hint


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty"),
        (b"hello", "not-an-image"),
        (b"BM and so on", "not-an-image"),
        (b"RIFF1234WAVEfmt ", "not-an-image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "unsupported"),
        (b"\0" * 5000, "not-an-image"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"\xff\xd8\xff\xe0", "truncated"),
        (b"GIF89a", "truncated"),
        (png(0, 10), "truncated"),
        (png(64, 64), "truncated"),
        (png(20_000, 20_000), "too-large"),
        (png(10_001, 10_000), "too-large"),
        (png(2**31 - 1, 2**31 - 1), "too-large"),
        (png(MAX_ASPECT + 1, 1, data=b"\0" * (3 * MAX_ASPECT + 4)), "too-narrow"),
    ],
    ids=range(15),
)
def test_files_that_are_no_pictures(put: Callable[[bytes], Path], data: bytes, code: str) -> None:
    assert refusal(put(data)).code == f"source.{code}"


def test_a_link_that_leads_nowhere_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("gone.png")
    error = refusal(tmp_path / "a.png")
    assert (error.code, error.what) == ("source.missing", "the link's target does not exist")


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files(put: Callable[[bytes], Path], format_name: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = io.BytesIO()
    Image.fromarray(noise).save(whole, format_name)
    data = whole.getvalue()
    error = refusal(put(data[: int(len(data) * share)]))
    assert error.code == "source.truncated"
    assert error.hint


def test_a_bomb_is_refused_before_it_is_decoded(
    put: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*args: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    error = refusal(put(png(10_001, 10_000)))
    assert "10001 x 10000" in error.what
    assert f"{MAX_SOURCE_PIXELS:,}" in error.what
    assert "400,000,000 pixels" in refusal(put(png(20_000, 20_000))).what


def test_the_largest_picture_passes_the_size_check(put: Callable[[bytes], Path]) -> None:
    """Pillow itself would warn of it, and warnings are errors here."""
    assert probe_image(put(png(10_000, 10_000)), decode=False)[0] == Size(10_000, 10_000)


def test_missing_files_and_folders(tmp_path: Path, save: Save) -> None:
    missing = refusal(tmp_path / "none.png")
    assert missing.code == "source.missing"
    assert missing.hint
    assert refusal(save(two_tone()) / "deeper.png").code == "source.missing"
    assert refusal(tmp_path / "a\0b").code == "source.missing"
    assert refusal(tmp_path).code == "source.is-a-folder"
    assert refusal(tmp_path / ("x" * 300)).code == "source.unreadable"


# Its first byte gives an I/O error, as on a bad disk.
BAD_DISK = Path("/proc/self/mem")


@pytest.mark.skipif(not BAD_DISK.exists(), reason="no /proc")
@pytest.mark.parametrize(
    "look",
    [
        probe_image,
        read_image,
        text_of,
        read_carried,
        own_picture,
        lambda path: probe_image(path, decode=False),
        lambda path: size_of(str(path)),
        lambda path: read_small(path, 64),
        lambda path: region_of(KeepOutside(region=Region(str(path))), Size(1, 1)),
    ],
)
def test_an_input_error_of_the_disk_is_the_files(
    tmp_path: Path, look: Callable[[Path], object]
) -> None:
    path = tmp_path / "a.png"
    path.symlink_to(BAD_DISK)
    with pytest.raises(SourceImageError, match="Input/output error") as caught:
        look(path)
    assert (caught.value.code, caught.value.where) == ("source.unreadable", str(path))
    assert depth_fault(path) is None


def test_an_input_error_while_decoding_is_not_damage(tmp_path: Path) -> None:
    with pytest.raises(SourceImageError) as caught, decoder_faults(tmp_path, None):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert caught.value.code == "source.unreadable"


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert refusal(tmp_path / "pipe.png").code == "source.not-an-image"


def test_a_file_that_may_not_be_read(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, for the superuser may read anything."""
    path = save(two_tone())

    def refuse(*args: Any, **more: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    error = refusal(path)
    assert error.code == "source.unreadable"
    assert "Permission denied" in error.what


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "a.png", "wb") as file:
        file.truncate(MAX_SOURCE_BYTES + 1)
    assert refusal(tmp_path / "a.png").code == "source.too-large"


def test_an_embedded_colour_profile_does_no_harm(save: Save) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    source = read_image(save(two_tone(), icc_profile=profile))
    assert tuple(source.pixels[0, 0]) == RED


def _encoded(format_name: str) -> bytes:
    whole = io.BytesIO()
    two_tone(size=(24, 24)).save(whole, format_name)
    return whole.getvalue()


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    format_name=st.sampled_from(
        ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "ICO"]
    ),
)
def test_damage_is_read_or_refused_but_never_a_crash(
    data: st.DataObject, format_name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(_encoded(format_name))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "a"
    path.write_bytes(bytes(damaged))
    for look in (probe_image, read_image, lambda path: probe_image(path, decode=False)):
        with contextlib.suppress(SourceImageError):
            look(path)


# --- fit ----------------------------------------------------------------------------------------


@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    high=st.integers(1, 60),
    wide=st.integers(1, 60),
)
def test_fitting_gives_exactly_the_size(height: int, width: int, high: int, wide: int) -> None:
    pixels = np.full((height, width, 3), 77, np.uint8)
    fitted = fit_cover(pixels, Size(high, wide))
    assert fitted.shape == (high, wide, 3)
    assert (fitted == 77).all(), "no border comes in"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Size(30, 40), "; left and right cut off, 25% of the width"),
        (Size(40, 30), "; top and bottom cut off, 25% of the height"),
        (Size(401, 400), ""),
    ],
)
def test_what_fitting_cuts_off_is_said(source: Size, said: str) -> None:
    assert cut_off(source, Size(8, 8)) == said


def test_a_picture_that_fits_is_left_alone() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    assert np.array_equal(fit_cover(pixels, Size(48, 64)), pixels)


@pytest.mark.parametrize(("shape", "size"), [((10, 30), Size(10, 10)), ((30, 10), Size(10, 10))])
def test_the_middle_is_kept(shape: tuple[int, int], size: Size) -> None:
    pixels = np.zeros((*shape, 3), np.uint8)
    middle = (slice(None), slice(10, 20)) if shape[1] == 30 else (slice(10, 20), slice(None))
    pixels[middle] = 255
    assert (fit_cover(pixels, size) == 255).all()


@pytest.mark.parametrize(
    ("shape", "size", "resized", "corner"),
    [
        ((480, 640), Size(128, 128), (171, 128), (22, 0)),
        ((640, 480), Size(128, 128), (128, 171), (0, 22)),
        ((1080, 1920), Size(96, 160), (171, 96), (6, 0)),
        ((100, 33), Size(64, 64), (64, 194), (0, 65)),
        ((5, 3), Size(2, 2), (2, 3), (0, 0)),
    ],
)
def test_sides_and_offsets_round_as_the_reference_does(
    shape: tuple[int, int], size: Size, resized: tuple[int, int], corner: tuple[int, int]
) -> None:
    """Worked out by hand; halves go to the even number, as Python rounds."""
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    left, top = corner
    whole = Image.fromarray(pixels).resize(resized, Image.Resampling.LANCZOS)
    expected = np.array(whole)[top : top + size.height, left : left + size.width]
    assert np.array_equal(fit_cover(pixels, size), expected)


# --- write --------------------------------------------------------------------------------------

PICTURE = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)


def write(path: Path, pixels: Any, text: PictureText | None = None) -> str:
    """A picture as a run writes it, and its sha256."""
    data = formats.encode(pixels, Encoding(), text)
    with disk_errors(path.parent):
        files.replace_file(path, data)
    return digest.of_bytes(data)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    text = {"parameters": "a cat\nSteps: 4", "hyimg": json.dumps({"prompt": "\N{GRINNING FACE}"})}
    sha256 = write(path, PICTURE, PictureText(*text.values()))
    assert sha256 == digest.of_file(path)
    assert pixel_digest(PICTURE) == digest.of_bytes(PICTURE.tobytes())
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert np.array_equal(np.array(picture), PICTURE)
        assert {key: picture.info[key] for key in text} == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["cat.png"]


def test_text_never_changes_pixels_and_writing_twice_gives_the_same_file(tmp_path: Path) -> None:
    bare = write(tmp_path / "a.png", PICTURE)
    told = write(tmp_path / "b.png", PICTURE, PictureText("a", "{}"))
    assert np.array_equal(read_image(tmp_path / "b.png").pixels, PICTURE)
    assert bare != told
    assert write(tmp_path / "a.png", PICTURE) == bare


def test_the_pixel_digest_sees_rows_in_order() -> None:
    assert pixel_digest(PICTURE[:, ::-1]) != pixel_digest(PICTURE)
    assert pixel_digest(np.asfortranarray(PICTURE)) == pixel_digest(PICTURE)


@pytest.mark.parametrize(
    ("call", "number", "code"),
    [
        ("write", errno.ENOSPC, "storage.full"),
        ("fsync", errno.ENOSPC, "storage.full"),
        ("write", errno.EDQUOT, "storage.full"),
        ("replace", errno.EROFS, "storage.read-only"),
        ("replace", errno.EACCES, "storage.read-only"),
        ("fsync", errno.EIO, "storage.failed"),
    ],
)
def test_a_picture_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: str
) -> None:
    path = tmp_path / "cat.png"
    write(path, PICTURE)
    before = path.read_bytes()

    def refuse(*args: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    for name in ("cat.png", "new.png"):
        with pytest.raises(StorageError) as caught:
            write(tmp_path / name, PICTURE[::-1])
        assert caught.value.code == code
        assert caught.value.exit_code == 3
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["cat.png"]


def test_a_disk_that_fills_up_halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = os.write, []

    def write_some(descriptor: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, bytes(data)[:100])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(StorageError, match="full"):
        write(tmp_path / "cat.png", PICTURE)
    assert not list(tmp_path.iterdir())


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: plain(descriptor, bytes(data)[:7]))
    sha256 = write(tmp_path / "cat.png", PICTURE)
    assert digest.of_file(tmp_path / "cat.png") == sha256


def test_a_disk_that_cannot_sync_folders_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def sync_files_only(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_only)
    write(tmp_path / "cat.png", PICTURE)
    assert (tmp_path / "cat.png").exists()


def test_only_bytes_are_written(tmp_path: Path) -> None:
    floats: Any = PICTURE.astype(np.float32)
    with pytest.raises(AssertionError, match="pixels are bytes"):
        write(tmp_path / "a.png", floats)


def test_reading_leaves_the_warning_filters_alone(save: Save) -> None:
    before, path, interval = list(warnings.filters), save(two_tone("P")), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert len(list(threads.map(read_image, [path] * 400))) == 400
    finally:
        sys.setswitchinterval(interval)
    assert warnings.filters == before


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a.png", "write paths relative to the manifest"),
        ("s3://bucket/in/a%20b.png", "names in a store count capitals, and %20 is no space"),
        ("s3://bucket/in/../a.png", "write the whole address: names in a store have no .."),
    ],
)
def test_a_missing_picture_has_the_hint_of_its_place(name: str, hint: str) -> None:
    with pytest.raises(SourceImageError) as caught, file_faults(Path(name)):
        raise FileNotFoundError
    assert (caught.value.code, caught.value.hint) == ("source.missing", hint)
