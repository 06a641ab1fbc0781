"""Which colours a file says that its numbers mean.

PNG              cICP, else iCCP, else sRGB, else gAMA and cHRM, else EXIF
other formats    ICC profile, else nclx (AVIF, HEIF), else EXIF (DCF: R03 is Adobe RGB)
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from PIL import ExifTags, Image, ImageFile

from hyimg_cli.media import icc
from hyimg_cli.media.colour import (
    ColourSpace,
    Kind,
    UnfitSpace,
    kind_of,
    space_of,
    space_of_profile,
)
from hyimg_cli.media.png_chunks import chunks_of
from hyimg_cli.spec import digest

# Increase it if the same file would be converted to other numbers.
_FORMAT = 1
# Chunks that say what a PNG's numbers mean; each has a few bytes.
PNG_CHUNKS = (b"cICP", b"cHRM", b"gAMA", b"sRGB")
_MOST_BYTES = 64
# PNG's standard prescribes this value of gAMA for sRGB; some programs round it.
_SRGB_GAMMA, _ROUNDING, _GAMMAS = 45455, 500, range(10_000, 1_000_000)
_SRGB_CURVE, _UNSPECIFIED = 13, 2
# Values of EXIF's ColorSpace; the second one is not in the standard, but cameras write it.
_EXIF_SRGB, _EXIF_ADOBE_RGB = 1, 2
# Boxes of ISO files, which Pillow does not read: codes, and the profile of a JPEG 2000.
_NCLX = re.compile(rb"colrnclx(..)(..)...", re.DOTALL)
_JP2_PROFILE = re.compile(rb"colr\x02..(?=(....))", re.DOTALL)
_HEAD_BYTES = 1 << 20
# The tag that names a picture's colours: an ICC profile, chunks of a PNG, EXIF, or a box of a file
# that Pillow does not read.
Carrier = Literal["icc", "png", "exif", "box", ""]
Claim = tuple[Carrier, Callable[[], ColourSpace | None]]


@dataclass(frozen=True)
class Colours:
    """What a file says of its numbers.

    `space`: None for sRGB; `carrier`: the tag that names it. `notes`: what reading does.
    """

    space: ColourSpace | None = None
    notes: tuple[str, ...] = ()
    carrier: Carrier = ""

    def are(self, other: "Colours") -> bool:
        """Return whether equal numbers mean equal colours, in pictures of 8 bits."""
        own, others = (one.space.rgb if one.space else b"" for one in (self, other))
        return own == others

    def as_read(self, file_digest: str) -> str:
        """Return the digest of a picture as it is read; for sRGB, the digest of its file."""
        if self.space is None:
            return file_digest
        return digest.of_bytes(f"converted to sRGB {_FORMAT} {file_digest}".encode())


def colours_of(image: ImageFile.ImageFile) -> Colours:
    """Return what the numbers of an opened picture mean. Call it before the picture is decoded."""
    faults = list[str]()
    for carrier, space_by in _claims(image):
        try:
            space = space_by()
        except UnfitSpace as fault:
            faults.append(f"the colour profile was ignored: {fault}")
            continue
        if space is None:
            break
        clipped = " (highlights clipped)" if space.is_hdr else ""
        said = f"{space.name} converted to sRGB{clipped}"
        return Colours(space, (*faults, said), carrier)
    return Colours(None, (*faults,))


def png_chunks(image: ImageFile.ImageFile) -> dict[bytes, bytes]:
    """Return a PNG's chunks of `PNG_CHUNKS` without damaged ones; empty for other formats.

    Call it before the picture is decoded.
    """
    file, found = image.fp, dict[bytes, bytes]()
    if image.format != "PNG" or file is None:
        return found
    before = file.tell()
    for _, length, name in chunks_of(file):
        if name == b"IDAT":
            break
        if name in PNG_CHUNKS and length <= _MOST_BYTES:
            data = file.read(length)
            if zlib.crc32(name + data).to_bytes(4) == file.read(4):
                found.setdefault(name, data)
    file.seek(before)
    return found


def exif_of(image: Image.Image) -> Image.Exif:
    """Return a picture's EXIF without decoding it; empty if it is unreadable."""
    with suppress(Exception):  # Pillow reads damaged EXIF with errors of any kind
        # NOTE: asked for a PNG's EXIF, Pillow decodes the picture to find it after the pixels.
        if image.format != "PNG" or "exif" in image.info:
            return image.getexif()
    return Image.Exif()


def is_adobe_rgb(exif: Image.Exif) -> bool:
    """Return whether EXIF says that the numbers are Adobe RGB, by DCF's optional colour space."""
    with suppress(Exception):
        space = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.ColorSpace)
        named = str(exif.get_ifd(ExifTags.IFD.Interop).get(ExifTags.Interop.InteropIndex, ""))
        is_named = space != _EXIF_SRGB and named.strip("\0 ") == "R03"
        return is_named or space == _EXIF_ADOBE_RGB
    return False


def _claims(image: ImageFile.ImageFile) -> Iterator[Claim]:
    """Yield what a file says of its colours, the decisive first; a claim may raise UnfitSpace."""
    kind, chunks = kind_of(image.mode), png_chunks(image)
    if codes := chunks.get(b"cICP"):
        yield "png", partial(_by_cicp, codes, kind)
    if profile := image.info.get("icc_profile"):
        yield "icc", partial(space_of_profile, bytes(profile), kind)
    if profile := _jp2_profile(image):
        yield "box", partial(space_of_profile, profile, kind)
    if b"sRGB" in chunks:
        yield "png", lambda: None
    if b"gAMA" in chunks or b"cHRM" in chunks:
        yield "png", partial(_by_gamma, chunks.get(b"gAMA", b""), chunks.get(b"cHRM", b""), kind)
    if nclx := _nclx(image):
        yield "box", partial(_by_codes, *nclx, kind)
    if is_adobe_rgb(exif_of(image)):
        adobe_rgb = icc.ADOBE_RGB, icc.power(icc.ADOBE_GAMMA)
        yield "exif", partial(_space, "Adobe RGB", *adobe_rgb, kind)


def _by_cicp(codes: bytes, kind: Kind) -> ColourSpace | None:
    if len(codes) != 4 or codes[2] or not codes[3]:
        raise UnfitSpace(f"the codes of cICP ({', '.join(map(str, codes))}) are not supported")
    return _by_codes(codes[0], codes[1], kind)


def _by_codes(primaries: int, curve: int, kind: Kind) -> ColourSpace | None:
    """Return the space of two codes of ITU-T H.273."""
    named = icc.PRIMARIES.get(1 if primaries == _UNSPECIFIED else primaries)
    decode = icc.CURVES.get(_SRGB_CURVE if curve == _UNSPECIFIED else curve)
    if named is None or decode is None:
        raise UnfitSpace(f"its codes {primaries} and {curve} are not supported")
    return _space(f"{named[0]} {decode[0]}".strip(), named[1], decode[1], kind)


def _by_gamma(gamma: bytes, points: bytes, kind: Kind) -> ColourSpace | None:
    """Return the space of the chunks gAMA and cHRM; either may be missing."""
    if len(gamma) not in (0, 4) or len(points) not in (0, 32):
        raise UnfitSpace("gAMA or cHRM is damaged")
    value, primaries = int.from_bytes(gamma) if gamma else _SRGB_GAMMA, icc.SRGB
    if points:
        at = [number / 100_000 for number in struct.unpack(">8I", points)]
        white, red, green, blue = zip(at[::2], at[1::2], strict=True)
        primaries = icc.Primaries(red, green, blue, white)
    if value not in _GAMMAS:
        raise UnfitSpace(f"gAMA is {value / 100_000:g}")
    as_srgb = _space("PNG primaries", primaries, icc.srgb_curve, kind)
    is_usual = abs(value - _SRGB_GAMMA) <= _ROUNDING
    if not gamma or (is_usual and as_srgb is None):
        return as_srgb
    exponent = 100_000 / value
    name = f"PNG gamma {exponent:.3g}{' and primaries' if as_srgb else ''}"
    return _space(name, primaries, icc.power(exponent), kind)


def _space(name: str, primaries: icc.Primaries, curve: icc.Curve, kind: Kind) -> ColourSpace | None:
    if kind not in ("RGB", "GRAY"):
        raise UnfitSpace("it is for RGB pictures")
    return space_of(name, primaries, curve, kind)


def _nclx(image: ImageFile.ImageFile) -> tuple[int, int] | None:
    """Return the codes of primaries and curve of an AVIF or HEIF, if any."""
    found = _NCLX.search(_head(image)) if image.format in ("AVIF", "HEIF") else None
    return None if found is None else (int.from_bytes(found[1]), int.from_bytes(found[2]))


def _jp2_profile(image: ImageFile.ImageFile) -> bytes:
    """Return the ICC profile of a JPEG 2000; empty without one."""
    if image.format != "JPEG2000":
        return b""
    head = _head(image)
    found = _JP2_PROFILE.search(head)
    return head[found.end() :][: int.from_bytes(found[1])] if found else b""


def _head(image: ImageFile.ImageFile) -> bytes:
    assert image.fp is not None, "it was opened just now"
    at = image.fp.tell()
    image.fp.seek(0)
    head = image.fp.read(_HEAD_BYTES)
    image.fp.seek(at)
    return head
