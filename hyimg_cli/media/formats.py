"""Pictures as bytes of a PNG, JPEG or WebP, and where each keeps its metadata.

    PNG         text chunks: `parameters`, `hyimg` (the record), and the XMP packet
    JPEG, WebP  EXIF UserComment: the parameters; XMP packet: the record, or comments (COM)
                of a JPEG if it is too long for one segment

Pixels are uint8 arrays [H, W, 3], RGB. Equal pixels and texts give equal bytes with the same
libraries.
"""

import io
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, PngImagePlugin

from hyimg_cli.media import xmp
from hyimg_cli.media.fast_png import with_rows
from hyimg_cli.media.metadata import KEYWORD, PARAMETERS, PictureText
from hyimg_cli.media.tags import Tags
from hyimg_cli.spec.job import Encoding

PNG = Encoding()
# From this quality on, a JPEG keeps every pixel's colour; below, one colour for four pixels.
_FULL_COLOUR = 90
# Source: the EXIF standard, and piexif, with which other tools read the comment.
_UNICODE, _COMMENT_CODING = b"UNICODE\0", "utf-16-be"
# EXIF in a JPEG is one segment of 65,533 bytes, and a character takes up to four.
_MOST_CHARACTERS = 16_000
_CUT = "… (cut: the record has all of it)"
_INCH = 2
_COMMENT, _PIECE_BYTES = b"hyimg ", 65_000


def encode(
    pixels: NDArray[np.uint8],
    encoding: Encoding = PNG,
    text: PictureText | None = None,
    *,
    tags: Tags | None = None,
    fast: bool = False,
) -> bytes:
    """Return the picture's file with the metadata `text`, and with the `tags` of its numbers.

    A PNG has pixels of any channels; a lossless WebP has RGB or RGBA, including colours under
    transparent pixels. `fast`: a PNG in a seventh of the time, for a file that is a few hundredths
    larger.
    """
    assert pixels.dtype == np.uint8, "pixels are bytes"
    text, tags = text or PictureText(), tags or Tags()
    profile = tags.profile(encoding.format, is_grey=pixels.ndim == 2)
    how = dict[str, Any](icc_profile=profile)
    match encoding.format:
        case "png":
            how |= {"pnginfo": _png_chunks(text, tags)}
            how |= {"exif": tags.exif} | ({"dpi": tags.dpi} if tags.dpi else {})
        case "jpeg":
            assert encoding.quality is not None, "a JPEG always loses something"
            colour = "4:4:4" if encoding.quality >= _FULL_COLOUR else "4:2:0"
            how |= {"quality": encoding.quality, "subsampling": colour, "optimize": True}
            how |= _in_jpeg(text)
        case "webp":
            is_lossy = encoding.quality is not None
            how |= {"quality": encoding.quality} if is_lossy else {"lossless": True, "exact": True}
            how["exif"] = _exif(text.parameters, tags)
            how["xmp"] = xmp.packet(text.source_type, text.record)
    is_fast, data = fast and encoding.format == "png", io.BytesIO()
    shown = pixels[:1, :1] if is_fast else pixels
    Image.fromarray(shown).save(data, encoding.format, **how)
    return with_rows(data.getvalue(), pixels) if is_fast else data.getvalue()


def text_in(image: ImageFile.ImageFile) -> PictureText:
    """Return the metadata of an opened picture of these formats; empty if it has none.

    Raises what Pillow does for a damaged PNG.
    """
    packet = image.info.get("xmp", b"")
    if isinstance(image, PngImagePlugin.PngImageFile):
        texts = {str(keyword): str(text) for keyword, text in image.text.items()}
        parameters, record = texts.get(PARAMETERS, ""), texts.get(KEYWORD, "")
    else:
        segments = getattr(image, "applist", ())
        own = [data for name, data in segments if name == "COM" and data.startswith(_COMMENT)]
        said = b"".join(data.removeprefix(_COMMENT) for data in own).decode("utf-8", "replace")
        parameters, record = _comment(image), said or xmp.record_in(packet)
    return PictureText(parameters, record, xmp.source_type_in(packet))


def _png_chunks(text: PictureText, tags: Tags) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    for name, data in tags.chunks.items():
        chunks.add(name, data)
    if text.record:
        chunks.add_text(PARAMETERS, text.parameters)
        chunks.add_text(KEYWORD, text.record)
        chunks.add_itxt(xmp.PNG_KEYWORD, xmp.packet(text.source_type).decode())
    return chunks


def _in_jpeg(text: PictureText) -> dict[str, bytes]:
    packet, comments = xmp.packet(text.source_type, text.record), b""
    if len(packet) > xmp.MOST_IN_JPEG:
        packet, data = xmp.packet(text.source_type), text.record.encode()
        for start in range(0, len(data), _PIECE_BYTES):
            piece = _COMMENT + data[start : start + _PIECE_BYTES]
            comments += b"\xff\xfe" + (len(piece) + 2).to_bytes(2) + piece
    prompt, _, settings = text.parameters.rpartition("\n")
    is_long = len(prompt) > _MOST_CHARACTERS
    short = f"{prompt[:_MOST_CHARACTERS]}{_CUT}\n{settings}" if is_long else text.parameters
    return {"exif": _exif(short, Tags()), "xmp": packet, "extra": comments}


def _exif(comment: str, tags: Tags) -> bytes:
    """Return EXIF with a comment, and with the resolution, which WebP keeps nowhere else."""
    exif = Image.Exif()
    exif.load(tags.exif)
    if comment:
        coded = _UNICODE + comment.encode(_COMMENT_CODING)
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = coded
    if tags.dpi and ExifTags.Base.XResolution not in exif:
        exif[ExifTags.Base.XResolution], exif[ExifTags.Base.YResolution] = tags.dpi
        exif[ExifTags.Base.ResolutionUnit] = _INCH
    return exif.tobytes() if comment or tags.exif or tags.dpi else b""


def _comment(image: ImageFile.ImageFile) -> str:
    """Return the EXIF UserComment; empty if it is missing or unreadable."""
    with suppress(Exception):  # Pillow reads damaged EXIF with errors of any kind
        comment: bytes = image.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
        if comment.startswith(_UNICODE):
            return comment.removeprefix(_UNICODE).decode(_COMMENT_CODING, "replace")
    return ""
