"""Pictures whose numbers are not sRGB's are read as sRGB; whatever is sRGB stays as it is."""

import io
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.media import icc
from hyimg_cli.media.carried import region_of
from hyimg_cli.media.images import Digests, digests_of, probe_image, read_image, read_small
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import KeepOutside
from tests import coloured

NAMES = ("Display P3", "Adobe RGB", "ProPhoto")


def chunks(name: str, *parts: str) -> dict[str, bytes]:
    primaries, gamma = coloured.SPACES[name]
    made = {
        "gAMA": coloured.gamma_chunk(gamma or 2.2),
        "cHRM": coloured.primaries_chunk(primaries),
        "cICP": bytes((12, 13, 0, 1)),
        "sRGB": b"\0",
    }
    return {part: made[part] for part in parts}


def in_avif(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path, quality=100, subsampling="4:4:4")
    data = path.read_bytes()
    assert data.count(b"colrnclx\0\1\0\r") == 1
    path.write_bytes(data.replace(b"colrnclx\0\1\0\r", b"colrnclx\0\x0c\0\r"))


WAYS: dict[str, tuple[str, Callable[[Path, np.ndarray], Any]]] = {
    **{
        f"{name}{suffix}": (
            name,
            lambda path, pixels, name=name: coloured.write(
                path, pixels, icc_profile=coloured.profile(name)
            ),
        )
        for name in NAMES
        for suffix in (".png", ".tif", ".webp")
    },
    "cicp.png": (
        "Display P3",
        lambda path, pixels: coloured.write(path, pixels, chunks=chunks("Display P3", "cICP")),
    ),
    "linear.png": (
        "linear",
        lambda path, pixels: coloured.write(path, pixels, chunks=chunks("linear", "gAMA")),
    ),
    "primaries.png": (
        "Adobe RGB",
        lambda path, pixels: coloured.write(
            path, pixels, chunks=chunks("Adobe RGB", "gAMA", "cHRM")
        ),
    ),
    "prophoto-chunks.png": (
        "ProPhoto",
        lambda path, pixels: coloured.write(
            path, pixels, chunks=chunks("ProPhoto", "gAMA", "cHRM")
        ),
    ),
    **{
        f"dcf{suffix}": (
            "Adobe RGB",
            lambda path, pixels: coloured.write(path, pixels, dcf="R03"),
        )
        for suffix in (".png", ".webp")
    },
    "box.jp2": (
        "ProPhoto",
        lambda path, pixels: path.write_bytes(coloured.jp2(pixels, coloured.profile("ProPhoto"))),
    ),
    "nclx.avif": ("Display P3", in_avif),
}


@pytest.mark.parametrize("file", WAYS)
def test_colours_are_those_calculated_by_hand(tmp_path: Path, file: str) -> None:
    name, write = WAYS[file]
    path, numbers = tmp_path / file, coloured.numbers()
    write(path, numbers)
    own, source = np.asarray(Image.open(path).convert("RGB")), read_image(path)
    exact = coloured.by_hand(name, own)
    # littlecms calculates with 14 bits; where many colours are clipped, small errors grow.
    assert np.abs(source.pixels - exact).max() <= 1.5
    assert np.abs(source.pixels[:4].astype(int) - source.pixels[:4, :, :1]).max() <= 1, "greys"
    (note,) = source.notes
    assert note.endswith(" converted to sRGB")
    assert probe_image(path) == (Size(16, 64), source.notes)
    file_digest = digest.of_bytes(path.read_bytes())
    assert source.digests == digests_of(path) == Digests(file_digest, source.digest)
    assert source.digest == source_digest(str(path)) != file_digest
    small = np.asarray(read_small(path, 64))
    assert np.abs(small.astype(int) - source.pixels).max() <= (2 if file == "nclx.avif" else 0)


def test_colours_are_those_of_littlecms(tmp_path: Path) -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1) * np.array([1, 0, 1], np.uint8)
    profile = coloured.profile("Display P3")
    path = coloured.write(tmp_path / "a.png", ramp, icc_profile=profile)
    made = ImageCms.profileToProfile(
        Image.fromarray(ramp),
        ImageCms.ImageCmsProfile(io.BytesIO(profile)),
        ImageCms.createProfile("sRGB"),
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    assert np.array_equal(read_image(path).pixels, np.asarray(made))


def test_colours_near_srgb_are_converted(tmp_path: Path) -> None:
    """By a plain power, blacks differ by six levels at most."""
    profile = icc.rgb_profile("sRGB", icc.SRGB, icc.power(2.2))
    numbers = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    source = read_image(coloured.write(tmp_path / "a.png", numbers, icc_profile=profile))
    exact = coloured.srgb_levels((numbers / 255) ** 2.2)
    assert np.abs(source.pixels - exact).max() <= 1
    assert 3 < np.abs(source.pixels.astype(int) - numbers).max() < 10
    assert source.notes


def test_white_is_white_whatever_white_a_profile_names(tmp_path: Path) -> None:
    """That of paper, too: colours are relative to it."""
    profile = coloured.profile("Display P3")
    at = int.from_bytes(profile[profile.index(b"wtpt") + 4 :][:4]) + 8
    yellow = struct.pack(">3i", *(round(one * 65536) for one in (0.9, 0.95, 0.6)))
    profile = profile[:at] + yellow + profile[at + 12 :]
    numbers = np.full((16, 16, 3), 255, np.uint8)
    numbers[:8] = (250, 20, 20)
    source = read_image(coloured.write(tmp_path / "a.png", numbers, icc_profile=profile))
    assert source.notes == ("Display P3 converted to sRGB",)
    assert (source.pixels[8:] == 255).all()


SRGB = icc.rgb_profile("Display P3", icc.SRGB, icc.srgb_curve)
BENT = coloured.profile("linear")
SAME: dict[str, dict[str, Any]] = {
    "no tags": {},
    "littlecms": {
        "icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    },
    "by another name": {"icc_profile": SRGB},
    "gAMA as PNG prescribes": {"chunks": {"gAMA": struct.pack(">I", 45455)}},
    "gAMA rounded": {"chunks": {"gAMA": struct.pack(">I", 45000)}},
    "all chunks": {"chunks": chunks("linear", "cHRM", "sRGB") | {"gAMA": struct.pack(">I", 45455)}},
    "sRGB before gAMA": {"chunks": chunks("linear", "sRGB", "gAMA")},
    "cICP of sRGB before ICC": {"chunks": {"cICP": bytes((1, 13, 0, 1))}, "icc_profile": BENT},
    "cICP of BT.709": {"chunks": {"cICP": bytes((1, 1, 0, 1))}},
    "DCF's usual space": {"dcf": "R98"},
    "EXIF's sRGB before DCF's other space": {"dcf": "R03", "exif_space": 1},
    "dpi": {"dpi": 300},
}
UNFIT: dict[str, dict[str, Any]] = {
    "cut off": {"icc_profile": BENT[: len(BENT) // 2]},
    "no profile": {"icc_profile": b"no profile"},
    "grey": {"icc_profile": coloured.grey(1.0)},
    "four inks": {"icc_profile": coloured.cmyk_profile()},
    "black": {"icc_profile": icc.rgb_profile("x", icc.SRGB, lambda levels: levels * 0)},
    "falling": {"icc_profile": icc.rgb_profile("x", icc.SRGB, lambda levels: 1 - levels)},
    "gAMA of 0": {"chunks": {"gAMA": bytes(4)}},
    "primaries on a line": {"chunks": {"cHRM": struct.pack(">8I", *[30000, 30000] * 4)}},
    "cICP of video": {"chunks": {"cICP": bytes((9, 1, 9, 0))}},
    "cICP of unknown codes": {"chunks": {"cICP": bytes((200, 13, 0, 1))}},
}


@pytest.mark.parametrize("name", [*SAME, *UNFIT])
def test_numbers_of_srgb_and_of_broken_tags_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    numbers = coloured.numbers()
    path = coloured.write(tmp_path / "a.png", numbers, **(SAME | UNFIT)[name])
    source = read_image(path)
    assert np.array_equal(source.pixels, numbers)
    assert source.digest == source_digest(str(path)) == digest.of_bytes(path.read_bytes())
    said = [note.startswith("the colour profile was ignored: ") for note in source.notes]
    assert said == [True] * (name in UNFIT)


@pytest.mark.parametrize("mode", ["L", "LA", "I;16", "grey of an RGB profile"])
def test_greys_by_their_curve(tmp_path: Path, mode: str) -> None:
    """A linear scan, in 16 bits as fine as they are."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    profile, light = coloured.grey(1.0), levels / 255
    if mode == "LA":
        pixels = np.stack([levels, np.full_like(levels, 255)], 2)
        pixels[0, 0, 1] = 0
    elif mode == "I;16":
        pixels = (levels * 17).astype(np.uint16)
        light = pixels / 65535
    else:
        pixels = levels
        profile = profile if mode == "L" else coloured.profile("linear")
    path = coloured.write(tmp_path / "a.png", pixels, icc_profile=profile)
    found, exact = read_image(path).pixels, coloured.srgb_levels(light)
    assert np.abs(found - exact[..., None])[0 if mode != "LA" else 1 :].max() <= 1
    assert found.tolist()[15][15] == [round(exact[15, 15])] * 3


def test_a_masks_levels_are_its_numbers(tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    path = coloured.write(tmp_path / "a.png", levels, icc_profile=coloured.grey(1.0))
    assert np.array_equal(region_of(KeepOutside(region=str(path)), Size(16, 16)), levels)


def test_four_inks_by_their_profile(tmp_path: Path) -> None:
    inks = Image.new("CMYK", (8, 8))
    inks.paste((0, 255, 255, 0), (4, 0, 8, 8))
    paths = [tmp_path / name for name in ("with.tif", "without.tif")]
    inks.save(paths[0], icc_profile=coloured.cmyk_profile())
    inks.save(paths[1])
    source = read_image(paths[0])
    assert np.abs(source.pixels[0, [0, 7]].astype(int) - [[255] * 3, [255, 0, 0]]).max() <= 6
    assert source.notes == ("press converted to sRGB",)
    assert read_image(paths[1]).notes == ("CMYK converted to RGB",)


def test_many_threads_read_the_same_colours(tmp_path: Path) -> None:
    path = coloured.write(
        tmp_path / "a.png", coloured.numbers(), icc_profile=coloured.profile("Adobe RGB")
    )
    with ThreadPoolExecutor(8) as pool:
        found = [one.pixels for one in pool.map(read_image, [path] * 24)]
    assert all(np.array_equal(one, found[0]) for one in found)


def test_a_damaged_profile_never_fails_a_picture(tmp_path: Path) -> None:
    numbers, rng = coloured.numbers(), np.random.default_rng(0)
    for _ in range(40):
        profile = bytearray(coloured.profile("Display P3")[:600])
        for at in rng.integers(0, len(profile), 6):
            profile[at] = rng.integers(0, 256)
        path = coloured.write(tmp_path / "a.png", numbers, icc_profile=bytes(profile))
        assert read_image(path).pixels.shape == (16, 64, 3)
