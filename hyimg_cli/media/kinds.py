"""Kinds of files: which are read as pictures, how to recognise them, and names of the others."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import IO

from PIL import TiffImagePlugin

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO")
# Names of these formats' files; a test compares them with Pillow.
SUFFIXES = {
    ".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".ico", ".j2c", ".j2k", ".jfif", ".jp2",
    ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm",
    ".ppm", ".tif", ".tiff", ".webp", ".heic", ".heics", ".heif", ".heifs", ".hif",
}  # fmt: skip
# Camera raw formats: their first picture is a thumbnail, which Pillow would read for some.
RAW_SUFFIXES = {
    ".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dng", ".erf", ".fff", ".iiq", ".kdc", ".mef", ".mrw",
    ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f",
}  # fmt: skip
# Pictures of kinds that are not read: in folders, they are counted as such.
UNREAD_SUFFIXES = {
    ".ai", ".cur", ".dcm", ".dds", ".emf", ".eps", ".exr", ".fits", ".flif", ".hdr", ".icns",
    ".jls", ".jxl", ".jxr", ".kra", ".pam", ".pcx", ".pdf", ".psb", ".psd", ".qoi", ".sgi", ".svg",
    ".svgz", ".tga", ".wmf", ".xbm", ".xcf", ".xpm",
}  # fmt: skip
RAW_HINT = "convert raw files first, for example: magick {0} {1}.jpg"
# Formats of phones that Pillow reads with an extra library; some AVIF files begin the same way.
HEIF = re.compile(rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
_TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")
# The formats that are known by their first bytes.
MAGIC = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|II[*+]\0|MM\0[*+]|....ftypavi[fs]|"
    rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    re.DOTALL,
)
# Kinds that people take for pictures that are read, by their first bytes.
_UNREAD = {
    name: re.compile(start, re.DOTALL | re.IGNORECASE)
    for name, start in {
        "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
        "OpenEXR": rb"\x76\x2f\x31\x01",
        "PSD (Photoshop)": rb"8BPS",
        "SVG": rb"\s*<(svg|!doctype svg|\?xml.*<svg|!--.*<svg)",
        "PDF": rb"%PDF",
        "PostScript": rb"%!PS|\xc5\xd0\xd3\xc6",
        "Radiance HDR": rb"#\?(RADIANCE|RGBE)",
        "DDS": rb"DDS ",
        "XCF (GIMP)": rb"gimp xcf",
        "QOI": rb"qoif",
        "FITS": rb"SIMPLE  =",
        "DICOM": rb".{128}DICM",
        "JPEG XR": rb"II\xbc\x01",
        "JPEG-LS": rb"\xff\xd8\xff\xf7",
        "MNG": rb"\x8aMNG",
        "JNG": rb"\x8bJNG",
        "BPG": rb"BPG\xfb",
        "FLIF": rb"FLIF",
        "PAM": rb"P7\n",
        "PFM with colours": rb"PF\s",
        "ICNS": rb"icns",
        "CUR (a cursor)": rb"\0\0\x02\0",
        "EMF": rb"\x01\0\0\0.{36} EMF",
        "WMF": rb"\xd7\xcd\xc6\x9a",
        "camera RAW": rb"FUJIFILMCCD-RAW|FOVb|IIU\0|IIR[OS]|MMOR|....ftypcrx |II\*\0....CR\x02",
    }.items()
}
# What lies under a picture's name without being a picture, by its first bytes, and what to do.
_MISTAKEN = (
    (rb"\s*<(!doctype html|html|head|body)", "a web page", "download the picture itself again"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "fetch the picture: git lfs pull"),
    (rb"/annex/objects/|(\.\./)*\.git/annex/", "a pointer of git-annex", "fetch it: git annex get"),
    (rb"....ftyp(isom|iso[2-9]|mp4|avc1|qt  |M4V|3gp)|\x1aE\xdf\xa3|RIFF....AVI ", "a video",
     "save one of its frames as a picture"),
    (rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!|BZh|\xfd7zXZ", "an archive", "unpack it first"),
    (rb"\s*<(\?xml|Error)", "an XML text", "download the picture itself again"),
    (rb"\s*[\[{]\s*[\"{\[\]}]", "a JSON text", "name the picture, or download it again"),
    (rb"data:image/", "a data URL as text", "decode its base64 part into a file"),
)  # fmt: skip
_BEGINNING = 4096
# Start-of-frame markers of JPEGs; Huffman or arithmetic coding, sequential or progressive.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_LOSSLESS, _HIERARCHICAL = (0xC3, 0xCB), (0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF)
_SAMPLES = {2: "signed", 3: "floating-point", 4: "undefined", 5: "complex signed", 6: "complex"}
_COLOURS = {
    0: "grey",
    1: "grey",
    2: "RGB",
    3: "palette",
    4: "mask",
    5: "CMYK",
    6: "YCbCr",
    8: "CIELab",
    9: "ICCLab",
    10: "ITULab",
    32803: "camera RAW",
    34892: "linear RAW",
    32844: "LogL",
    32845: "LogLuv",
}


def unread_kind(file: IO[bytes]) -> str:
    """Return the name of a kind of file that is not read; empty for damaged and unknown files."""
    file.seek(0)
    start = file.read(_BEGINNING)
    for name, beginning in _UNREAD.items():
        if beginning.match(start.removeprefix(b"\xef\xbb\xbf")):
            return name
    if start.startswith(b"\xff\xd8"):
        return _unread_jpeg(file)
    return _unread_tiff(file) if _TIFF.match(start) else ""


def mistaken_kind(file: IO[bytes]) -> tuple[str, str]:
    """Return what a file is instead of a picture, and what to do; both empty if unknown."""
    file.seek(0)
    start = file.read(_BEGINNING).removeprefix(b"\xef\xbb\xbf")
    for beginning, name, hint in _MISTAKEN:
        if re.match(beginning, start, re.DOTALL | re.IGNORECASE):
            return name, hint
    return "", ""


def _unread_jpeg(file: IO[bytes]) -> str:
    for marker, bits in _frames(file):
        if marker in _LOSSLESS:
            return "lossless JPEG"
        if marker in _HIERARCHICAL:
            return "hierarchical JPEG"
        if bits != 8:
            return f"{bits}-bit JPEG"
    return ""


def _frames(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the first frame's marker and its bits, if the segments before it are whole."""
    at = 2
    while True:
        file.seek(at)
        head = file.read(5)
        if len(head) < 5 or head[0] != 0xFF:
            return
        if head[1] == 0xFF:  # filled up
            at += 1
            continue
        if head[1] in _FRAMES:
            yield head[1], head[4]
            return
        at += 2 + int.from_bytes(head[2:4])


def _unread_tiff(file: IO[bytes]) -> str:
    """Return the pixels or the compression of a TIFF that Pillow does not know, in words."""
    file.seek(0)
    try:
        TiffImagePlugin.TiffImageFile(file).close()
    except SyntaxError as error:
        # Pillow looks both up in a table.
        if not isinstance(error.__cause__, KeyError):
            return ""
        key = error.__cause__.args[0]
    except Exception:
        return ""
    else:
        return ""
    if isinstance(key, int):
        return f"a TIFF with compression {key}"
    order, colours, formats, _, bits, extra = key
    samples = " and ".join(_SAMPLES[one] for one in {*formats} if one in _SAMPLES)
    words = [f"{max(bits)}-bit", samples, _COLOURS.get(colours, f"colours of kind {colours}")]
    words += ["with white as 0"] * (colours == 0) + ["with further channels"] * bool(extra)
    words += ["in big-endian order"] * (order == b"MM")
    return f"a TIFF of {' '.join(filter(None, words))}"


@cache
def knows_heif() -> bool:
    """True if Pillow reads HEIC from now on."""
    if find_spec("pillow_heif") is None:
        return False
    from pillow_heif import register_heif_opener

    register_heif_opener(thumbnails=False)
    return True
