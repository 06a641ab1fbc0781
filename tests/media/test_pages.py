"""Further pictures in a file: versions of the first are left out, others are refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from hyimg_cli.media.carried import depth_fault, read_carried
from hyimg_cli.media.images import read_image

FIRST = np.full((40, 60, 3), (200, 30, 30), np.uint8)
SMALL = np.full((20, 30, 3), (20, 40, 180), np.uint8)
REDUCED, PAGE, OLD_REDUCED = {254: 1}, {254: 2}, {255: 2}


def tiff(path: Path, *kinds: dict[int, int]) -> Path:
    with TiffImagePlugin.AppendingTiffWriter(path, new=True) as file:
        for at, kind in enumerate(kinds):
            Image.fromarray(SMALL if at else FIRST).save(file, "TIFF", tiffinfo=dict(kind))
            file.newFrame()
    return path


def mpo(path: Path, kind: int = 0, *, segment: bytes = b"", kept: int | None = None) -> Path:
    first, other = (Image.fromarray(one) for one in (FIRST, SMALL))
    first.save(path, "MPO", save_all=True, append_images=[other])
    data = path.read_bytes()
    at = data.index(b"MPF\0")
    entry = data.index(b"\x02\xb0", at)
    place = at + 4 + int.from_bytes(data[entry + 8 : entry + 12], "little") + 16
    data = data[:place] + kind.to_bytes(4, "little") + data[place + 4 :]
    if segment:  # before the index, whose offsets count from itself
        made = b"\xff\xe2" + (len(segment) + 2).to_bytes(2) + segment
        data = data[:2] + made + data[2:]
    path.write_bytes(data[:kept])
    return path


@pytest.mark.parametrize(
    ("kind", "segment", "note"),
    [
        (0x010001, b"", "preview left out"),
        (0x010002, b"", "preview left out"),
        (0, b"", "preview or gain map left out"),
        (0x020002, b"", "1 further view left out"),
        (0, b"urn:iso:std:iso:ts:21496:-1\0\0\0", "gain map left out"),
    ],
)
@pytest.mark.parametrize("kept", [None, -300])
def test_the_first_picture_of_an_mpo_is_the_source(
    tmp_path: Path, kind: int, segment: bytes, note: str, kept: int | None
) -> None:
    """Even if a service has cut off the second one."""
    path = mpo(tmp_path / "a.jpg", kind, segment=segment, kept=kept)
    assert read_image(path).notes == (note,)
    assert depth_fault(path) is None
    assert read_carried(path).own.shape == FIRST.shape


@pytest.mark.parametrize(
    ("kinds", "note"),
    [
        (({}, REDUCED), "1 smaller page left out"),
        (({}, REDUCED, OLD_REDUCED), "2 smaller pages left out"),
        (({}, PAGE), "first of 2 frames"),
        (({}, REDUCED, PAGE), "first of 3 frames"),
        ((REDUCED, {}), "first of 2 frames"),
    ],
)
def test_smaller_copies_in_a_tiff(
    tmp_path: Path, kinds: tuple[dict[int, int], ...], note: str
) -> None:
    path = tiff(tmp_path / "a.tif", *kinds)
    source = read_image(path)
    assert source.notes == (note,)
    assert np.array_equal(source.pixels, FIRST)
    assert (depth_fault(path) is None) == ("smaller" in note)
