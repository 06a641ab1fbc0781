"""Kinds of files: which are read as pictures, and how to recognise them."""

import re
from functools import cache
from importlib.util import find_spec

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO")
# Names of these formats' files; a test compares them with Pillow.
SUFFIXES = {
    ".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".ico", ".j2c", ".j2k", ".jfif", ".jp2",
    ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm",
    ".tif", ".tiff", ".webp", ".heic", ".heics", ".heif", ".heifs", ".hif",
}  # fmt: skip
# Camera raw formats: their first picture is a thumbnail, which Pillow would read for some.
RAW_SUFFIXES = {
    ".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dng", ".erf", ".fff", ".iiq", ".kdc", ".mef", ".mrw",
    ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f",
}  # fmt: skip
RAW_HINT = "convert raw files first, for example: magick {0} {1}.jpg"
# Formats of phones that Pillow reads with an extra library; some AVIF files begin the same way.
HEIF = re.compile(rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
MAGIC = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\0|MM\0\*", re.DOTALL)


@cache
def knows_heif() -> bool:
    """True if Pillow reads HEIC from now on."""
    if find_spec("pillow_heif") is None:
        return False
    from pillow_heif import register_heif_opener

    register_heif_opener(thumbnails=False)
    return True
