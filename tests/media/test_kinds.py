"""Kinds of files that are not read are named; damaged files of the others are called damaged."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import probe_image, read_image


def jpeg(marker: int, bits: int = 8) -> bytes:
    """A JPEG whose frame has another marker or depth; a comment and filling come before it."""
    whole = io.BytesIO()
    Image.new("RGB", (16, 16)).save(whole, "JPEG", comment=b"\xff\xc3 is not a marker here")
    data = whole.getvalue()
    at = data.index(b"\xff\xc0\x00\x11\x08")
    return data[:at] + b"\xff" + bytes([0xFF, marker, 0, 17, bits]) + data[at + 5 :]


def fault_of(tmp_path: Path, data: bytes, name: str = "a.jpg") -> SourceImageError:
    (tmp_path / name).write_bytes(data)
    faults = []
    for look in (read_image, probe_image):
        with pytest.raises(SourceImageError) as caught:
            look(tmp_path / name)
        faults.append(caught.value)
    assert faults[0].code == faults[1].code
    return faults[0]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\xff\x0a\xfa\x1f", "JPEG XL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\x76\x2f\x31\x01\2\0\0\0", "OpenEXR"),
        (b"8BPS\0\1", "PSD (Photoshop)"),
        (b"8BPS\0\2", "PSD (Photoshop)"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- drawn --><svg/>", "SVG"),
        (b"<!DOCTYPE svg PUBLIC ''>\n<svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "PostScript"),
        (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n", "Radiance HDR"),
        (b"gimp xcf v011\0", "XCF (GIMP)"),
        (b"\0" * 128 + b"DICM", "DICOM"),
        (b"II\xbc\1\x08\0\0\0", "JPEG XR"),
        (b"PF\n2 2\n-1.0\n" + bytes(48), "PFM with colours"),
        (b"FUJIFILMCCD-RAW 0201", "camera RAW"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1", "camera RAW"),
        (b"\xff\xd8\xff\xf7\0\x0b\x08", "JPEG-LS"),
        (jpeg(0xC1, 12), "12-bit JPEG"),
        (jpeg(0xC3, 12), "lossless JPEG"),
        (jpeg(0xC5), "hierarchical JPEG"),
    ],
)
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_kind_that_is_not_read_is_named(
    tmp_path: Path, data: bytes, name: str, suffix: str
) -> None:
    error = fault_of(tmp_path, data, f"a{suffix}")
    assert error.code == "source.unsupported"
    assert error.what == f"{name} is not supported"
    assert error.hint == "convert it to PNG or JPEG"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (jpeg(0xC0)[:200], "truncated"),
        (b"\xff\xd8\xff\xe1\xff\xff", "truncated"),
        (b"II*\0\x08\0\0\0\1\0", "truncated"),
        (b"\0\0\0\x18ftypavif" + bytes(20), "truncated"),
        (b"<plist/>", "not-an-image"),
        (b"a text about <svg>", "not-an-image"),
    ],
)
def test_damaged_and_unknown_files_are_not_given_a_name(
    tmp_path: Path, data: bytes, code: str
) -> None:
    assert fault_of(tmp_path, data).code == f"source.{code}"


@pytest.mark.parametrize(
    ("data", "name", "hint"),
    [
        (b"<html><svg/></html>", "a web page", "again"),
        (b"\xef\xbb\xbf\r\n<!DOCTYPE html><title>404</title>", "a web page", "again"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML text", "again"),
        (b'{"error": "not found"}', "a JSON text", "again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS", "git lfs pull"),
        (b"/annex/objects/MD5E-s1--0.jpg\n", "a pointer of git-annex", "git annex get"),
        (b"\0\0\0\x20ftypisom\0\0", "a video", "frames"),
        (b"\x1aE\xdf\xa3\x01", "a video", "frames"),
        (b"PK\3\4\x14\0", "an archive", "unpack"),
        (b"data:image/png;base64,iVBOR", "a data URL as text", "base64"),
    ],
)
def test_what_is_taken_for_a_picture_is_named(
    tmp_path: Path, data: bytes, name: str, hint: str
) -> None:
    error = fault_of(tmp_path, data)
    assert (error.code, error.what) == ("source.not-an-image", f"the file is {name}, not an image")
    assert hint in error.hint


def test_a_link_into_an_annex_says_how_to_fetch_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to("../.git/annex/objects/aa/a.jpg")
    with pytest.raises(SourceImageError) as raised:
        read_image(tmp_path / "a.jpg")
    assert "git annex get" in raised.value.hint


def test_a_long_beginning_is_searched_in_one_pass(tmp_path: Path) -> None:
    data = b"<?xml " + b"<!-- <svh " * 200_000
    assert fault_of(tmp_path, data).code == "source.not-an-image"


def test_a_jpeg_of_progressive_frames_is_read(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "a.jpg", progressive=True)
    assert read_image(tmp_path / "a.jpg").pixels.max() == 0
