"""Damaged or very large metadata of a PNG is skipped with a note; damaged pixels stay an error."""

import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.carried import read_carried
from hyimg_cli.media.images import probe_image, read_image, size_of, text_of
from hyimg_cli.spec.job import Size

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
NOTE = "damaged or very large metadata skipped: "
MB = 1 << 20


def chunk(name: bytes, body: bytes, crc: int = 0) -> bytes:
    checksum = zlib.crc32(name + body) ^ crc
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)


def packed(nbytes: int) -> bytes:
    return zlib.compress(bytes(nbytes), 9)


def png(before: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG of PIXELS with chunks before its pixels and after them."""
    rows = b"".join(b"\0" + row.tobytes() for row in PIXELS)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 12, 8, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + before + data + after + chunk(b"IEND", b"")


FAULTY = {
    "text of 20 MB": (chunk(b"zTXt", b"workflow\0\0" + packed(20 * MB)), "zTXt"),
    "international text of 20 MB": (
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + packed(20 * MB)),
        "iTXt",
    ),
    "profile of 20 MB": (chunk(b"iCCP", b"monitor\0\0" + packed(20 * MB)), "iCCP"),
    "plain texts of 70 MB": (chunk(b"tEXt", b"a\0" + b" " * 70 * MB), "tEXt"),
    "wrong checksums": (
        b"".join(
            chunk(name, body, crc=1)
            for name, body in (
                (b"pHYs", bytes(9)),
                (b"tEXt", b"Title\0a"),
                (b"gAMA", struct.pack(">I", 45455)),
                (b"tIME", bytes(7)),
                (b"prVt", b"private"),
            )
        ),
        "pHYs, tEXt, gAMA, tIME, prVt",
    ),
    "too short": (chunk(b"pHYs", b"1") + chunk(b"cHRM", b"12") + chunk(b"sRGB", b""), None),
    "unknown packing": (chunk(b"zTXt", b"a\0\5" + packed(9)), "zTXt"),
    "an empty profile": (chunk(b"iCCP", b""), "iCCP"),
}


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("name", FAULTY)
def test_faulty_metadata_is_skipped_with_a_note(tmp_path: Path, name: str, place: str) -> None:
    chunks, names = FAULTY[name]
    path = tmp_path / "a.png"
    sound = chunk(b"tEXt", b"Author\0somebody")
    path.write_bytes(png(**{place: sound + chunks}))
    source = read_image(path)
    assert np.array_equal(source.pixels, PIXELS)
    assert source.notes == (NOTE + (names or "pHYs, cHRM, sRGB"),)
    assert probe_image(path) == (Size(8, 12), source.notes)
    assert size_of(str(path)) == Size(8, 12)
    assert np.array_equal(read_carried(path).own, PIXELS)
    assert not text_of(path).record


@pytest.mark.parametrize(
    "metadata",
    [
        chunk(b"zTXt", b"workflow\0\0" + packed(9 * MB)),
        chunk(b"iTXt", b"workflow\0\1\0\0\0" + packed(9 * MB)),
        chunk(b"iCCP", b"monitor\0\0" + packed(3 * MB)),
        chunk(b"tEXt", b"a\0" + b" " * 9 * MB),
        chunk(b"prVt", b"private"),
        chunk(b"iTXt", b"a\0\0\0\0\0\xff is not UTF-8"),
    ],
)
def test_large_and_odd_metadata_is_no_fault(tmp_path: Path, metadata: bytes) -> None:
    (tmp_path / "a.png").write_bytes(png(metadata))
    source = read_image(tmp_path / "a.png")
    assert np.array_equal(source.pixels, PIXELS)
    # The profile is one in its size only.
    is_profile = b"iCCP" in metadata
    assert source.notes == ("the colour profile was ignored: it is damaged",) * is_profile


def test_our_own_text_is_read_past_faulty_chunks(tmp_path: Path) -> None:
    texts = chunk(b"tEXt", b"hyimg\0{}") + chunk(b"pHYs", bytes(9), crc=1)
    (tmp_path / "a.png").write_bytes(png(texts))
    assert text_of(tmp_path / "a.png").record == "{}"


@pytest.mark.parametrize("name", [b"IHDR", b"PLTE", b"tRNS"])
def test_what_decides_pixels_is_never_skipped(tmp_path: Path, name: bytes) -> None:
    """Without a damaged transparent colour, a mask or a picture would mean something else."""
    path = tmp_path / "a.png"
    picture = Image.fromarray(np.zeros((8, 8), np.uint8)).convert("P")
    picture.save(path, transparency=0)
    data = bytearray(path.read_bytes())
    at = data.index(name)
    data[at + 4 + int.from_bytes(data[at - 4 : at])] ^= 1  # its checksum
    path.write_bytes(bytes(data))
    with pytest.raises(SourceImageError) as caught:
        read_image(path)
    assert caught.value.code == "source.truncated"


@pytest.mark.parametrize("cut", [20, 60])
def test_a_cut_file_with_faulty_metadata_is_damaged(tmp_path: Path, cut: int) -> None:
    data = png(chunk(b"pHYs", bytes(9), crc=1))
    (tmp_path / "a.png").write_bytes(data[: -12 - cut])
    with pytest.raises(SourceImageError) as caught:
        read_image(tmp_path / "a.png")
    assert caught.value.code == "source.truncated"


def test_many_bombs_are_cheap(tmp_path: Path) -> None:
    """300 chunks of 16 kB that unpack to 17 MB each: most are skipped unread."""
    bombs = chunk(b"iCCP", b"a\0\0" + packed(17 * MB)) * 300
    (tmp_path / "a.png").write_bytes(png(bombs))
    began = time.process_time()
    assert read_image(tmp_path / "a.png").notes == (NOTE + "iCCP",)
    assert time.process_time() - began < 2
