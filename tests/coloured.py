"""Files whose numbers are not sRGB's, and the colours that they mean, calculated by hand."""

import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin

from hyimg_cli.media import icc

P3 = icc.PRIMARIES[12][1]
PROPHOTO = icc.Primaries((0.7347, 0.2653), (0.1596, 0.8404), (0.0366, 0.0001), (0.3457, 0.3585))
# Primaries, the curve of a gamma or sRGB's, and the name.
SPACES = {
    "Display P3": (P3, 0.0),
    "Adobe RGB": (icc.ADOBE_RGB, 563 / 256),
    "ProPhoto": (PROPHOTO, 1.8),
    "linear": (icc.SRGB, 1.0),
}
# Matrices from RGB to XYZ at D50, as published: Display P3 and sRGB by ICC profiles of the W3C and
# Apple, Adobe RGB and ProPhoto by Bruce Lindbloom.
MATRICES = {
    "Display P3": (
        (0.51512, 0.29198, 0.15710),
        (0.24120, 0.69225, 0.06657),
        (-0.00105, 0.04189, 0.78407),
    ),
    "Adobe RGB": (
        (0.60974, 0.20528, 0.14919),
        (0.31111, 0.62567, 0.06322),
        (0.01947, 0.06087, 0.74457),
    ),
    "ProPhoto": ((0.79767, 0.13519, 0.03135), (0.28804, 0.71187, 0.00009), (0.0, 0.0, 0.82521)),
    "linear": (
        (0.43607, 0.38515, 0.14307),
        (0.22249, 0.71687, 0.06061),
        (0.01392, 0.09708, 0.71410),
    ),
}


def profile(name: str) -> bytes:
    primaries, gamma = SPACES[name]
    return icc.rgb_profile(name, primaries, icc.power(gamma) if gamma else icc.srgb_curve)


def grey(gamma: float) -> bytes:
    return icc.grey_profile("a grey", icc.power(gamma))


def by_hand(name: str, numbers: np.ndarray) -> np.ndarray:
    """The levels of sRGB of numbers [..., 3], from the published matrices; clipped, as floats."""
    gamma = SPACES[name][1]
    at = numbers / 255
    light = at**gamma if gamma else srgb_light(at)
    own, srgb = (np.array(MATRICES[one]) for one in (name, "linear"))
    return srgb_levels(light @ own.T @ np.linalg.inv(srgb).T)


def srgb_light(at: np.ndarray) -> np.ndarray:
    return np.where(at <= 0.04045, at / 12.92, ((at + 0.055) / 1.055) ** 2.4)


def srgb_levels(light: np.ndarray) -> np.ndarray:
    light = np.clip(light, 0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def numbers() -> np.ndarray:
    """Greys, then colours from all over the cube [16, 64, 3]."""
    greys = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
    colours = np.random.default_rng(0).integers(0, 256, (768, 3), np.uint8)
    return np.concatenate([greys, colours]).reshape(16, 64, 3)


def write(
    path: Path,
    pixels: np.ndarray,
    *,
    chunks: Mapping[str, bytes] | None = None,
    icc_profile: bytes | None = None,
    dcf: str = "",
    exif_space: int = 0xFFFF,
    dpi: int = 0,
) -> Path:
    """A lossless file with PNG chunks, a profile, and DCF's name of a colour space."""
    info, exif = PngImagePlugin.PngInfo(), Image.Exif()
    for name, data in (chunks or {}).items():
        info.add(name.encode(), data)
    if dcf:
        fields = exif.get_ifd(ExifTags.IFD.Exif)
        fields[ExifTags.Base.ColorSpace] = exif_space
        fields[ExifTags.IFD.Interop] = {1: dcf, 2: b"0100"}
    how: dict[str, object] = {"exif": exif.tobytes()} if dcf else {}
    how |= {"dpi": (dpi, dpi)} if dpi else {}
    if path.suffix == ".png":
        how["pnginfo"] = info
    if path.suffix == ".webp":
        how |= {"lossless": True, "exact": True}
    Image.fromarray(pixels).save(path, icc_profile=icc_profile, **how)
    return path


def gamma_chunk(gamma: float) -> bytes:
    return struct.pack(">I", round(100_000 / gamma))


def primaries_chunk(of: icc.Primaries) -> bytes:
    points = (of.white, of.red, of.green, of.blue)
    return struct.pack(">8I", *(round(100_000 * at) for point in points for at in point))


def cmyk_profile() -> bytes:
    """A profile of four inks that each take away their own light; black is not quite black.

    A table of 16 colours in Lab, as every press profile has; littlecms interpolates.
    """
    nodes = np.stack(np.meshgrid(*[(0, 1)] * 4, indexing="ij"), -1).reshape(16, 4)
    light = (1 - nodes[:, :3]) * (1 - 0.95 * nodes[:, 3:])
    lab = _lab(light @ np.array(MATRICES["linear"]).T)
    table = np.round(np.stack([lab[:, 0] * 2.55, lab[:, 1] + 128, lab[:, 2] + 128], 1))
    ramp = bytes(range(256))
    matrix = struct.pack(">9i", *(65536 * int(at % 4 == 0) for at in range(9)))
    lut = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + matrix + ramp * 4
    lut += np.clip(table, 0, 255).astype(np.uint8).tobytes() + ramp * 3
    text = b"desc\0\0\0\0" + struct.pack(">I", 6) + b"press\0" + bytes(78)
    tags = [(b"desc", text), (b"A2B0", lut), (b"wtpt", b"XYZ \0\0\0\0" + _D50_BYTES)]
    offset, index, data = 132 + 12 * len(tags), b"", b""
    for tag, value in tags:
        index += struct.pack(">4sII", tag, offset + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    head = struct.pack(">I4sI4s4s4s12s4s", offset + len(data), b"", 0x02400000, b"prtr", b"CMYK",
                       b"Lab ", struct.pack(">6H", 2026, 1, 1, 0, 0, 0), b"acsp")  # fmt: skip
    head = head.ljust(68, b"\0") + _D50_BYTES
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + index + data


_D50_BYTES = struct.pack(">3i", 63190, 65536, 54061)


def _lab(xyz: np.ndarray) -> np.ndarray:
    root = np.cbrt(xyz / (0.9642, 1.0, 0.8249))
    f = np.where(root > 6 / 29, root, xyz / (0.9642, 1.0, 0.8249) * 841 / 108 + 4 / 29)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)


def with_chunk(path: Path, name: bytes, data: bytes, *, before: bytes = b"IDAT") -> None:
    """Put a chunk with a right checksum before another one of a PNG."""
    whole = path.read_bytes()
    at = whole.index(before) - 4
    made = struct.pack(">I", len(data)) + name + data
    path.write_bytes(whole[:at] + made + struct.pack(">I", zlib.crc32(name + data)) + whole[at:])


def jp2(pixels: np.ndarray, icc_profile: bytes) -> bytes:
    """A lossless JPEG 2000 with a restricted profile in place of its enumerated colours."""
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG2000")
    whole = data.getvalue()
    at = whole.index(b"colr") - 4
    box = struct.pack(">I4s", 11 + len(icc_profile), b"colr") + b"\2\0\0" + icc_profile
    whole = whole[:at] + box + whole[at + 15 :]
    head = whole.index(b"jp2h") - 4
    (length,) = struct.unpack(">I", whole[head : head + 4])
    return whole[:head] + struct.pack(">I", length + len(box) - 15) + whole[head + 4 :]
