"""Pictures as bytes of a PNG, a JPEG or a WebP, and where each keeps what it says about itself.

    PNG         text chunks: `parameters`, `hyimg` (the record), and the XMP packet
    JPEG, WebP  EXIF UserComment: the parameters; the XMP packet: the record, too, but for one that
                is too long for a segment of a JPEG: that is in its comments (COM)

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
from hyimg_cli.media.metadata import KEYWORD, PARAMETERS, PictureText
from hyimg_cli.spec.job import Encoding

PNG = Encoding()
# From here on a JPEG keeps every pixel's colour; below, one colour for four pixels.
_FULL_COLOUR = 90
# Source: the EXIF standard, and piexif, by which other tools read the comment.
_UNICODE, _COMMENT_CODING = b"UNICODE\0", "utf-16-be"
# EXIF of a JPEG is one segment of 65,533 bytes, a character up to four of them.
_MOST_CHARACTERS = 16_000
_CUT = "… (cut: the record has all of it)"
_COMMENT, _PIECE_BYTES = b"hyimg ", 65_000


def encode(
    pixels: NDArray[np.uint8], encoding: Encoding = PNG, text: PictureText | None = None
) -> bytes:
    """The picture's file; `text`: what it says about itself."""
    assert pixels.shape[2:] == (3,), "pixels are RGB"
    match encoding.format:
        case "png":
            return _saved(pixels, format="PNG", pnginfo=_png_chunks(text))
        case "jpeg":
            assert encoding.quality is not None, "a JPEG always loses something"
            colour = "4:4:4" if encoding.quality >= _FULL_COLOUR else "4:2:0"
            how = {"quality": encoding.quality, "subsampling": colour, "optimize": True}
            return _saved(pixels, format="JPEG", **how, **_in_jpeg(text))
        case "webp":
            how = {"quality": encoding.quality} if encoding.quality else {"lossless": True}
            return _saved(pixels, format="WEBP", **how, **_in_webp(text))


def encode_lossless(
    pixels: NDArray[np.uint8],
    encoding: Encoding,
    text: PictureText | None,
    *,
    icc: bytes | None = None,
    exif: bytes = b"",
) -> bytes:
    """A PNG of grey, RGB or RGBA pixels or a lossless WebP of RGB or RGBA, colours under clear ones
    included, with a source's profile and EXIF; without `text` with the profile alone.
    """
    more: dict[str, Any] = {} if icc is None else {"icc_profile": icc}
    if encoding.format == "png":
        if text is not None and exif:
            more["exif"] = exif
        # Half the time of Pillow's own level, for a file that is a few hundredths larger.
        return _saved(pixels, format="PNG", pnginfo=_png_chunks(text), compress_level=3, **more)
    if text is not None:
        more |= _in_webp(text) if text.record else {}
        more["exif"] = _exif(text.parameters, exif) if text.parameters or exif else b""
    return _saved(pixels, format="WEBP", lossless=True, exact=True, **more)


def text_in(image: ImageFile.ImageFile) -> PictureText:
    """Metadata of an opened picture of these formats; empty where it has none.

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


def _png_chunks(text: PictureText | None) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    if text is not None and text.record:
        chunks.add_text(PARAMETERS, text.parameters)
        chunks.add_text(KEYWORD, text.record)
        chunks.add_itxt(xmp.PNG_KEYWORD, xmp.packet(text.source_type).decode())
    return chunks


def _in_jpeg(text: PictureText | None) -> dict[str, Any]:
    if text is None:
        return {}
    packet, comments = xmp.packet(text.source_type, text.record), b""
    if len(packet) > xmp.MOST_IN_JPEG:
        packet, data = xmp.packet(text.source_type), text.record.encode()
        pieces = (
            _COMMENT + data[start : start + _PIECE_BYTES]
            for start in range(0, len(data), _PIECE_BYTES)
        )
        comments = b"".join(b"\xff\xfe" + (len(one) + 2).to_bytes(2) + one for one in pieces)
    prompt, _, settings = text.parameters.rpartition("\n")
    is_long = len(prompt) > _MOST_CHARACTERS
    short = f"{prompt[:_MOST_CHARACTERS]}{_CUT}\n{settings}" if is_long else text.parameters
    return {"exif": _exif(short), "xmp": packet, "extra": comments}


def _in_webp(text: PictureText | None) -> dict[str, Any]:
    if text is None:
        return {}
    return {"exif": _exif(text.parameters), "xmp": xmp.packet(text.source_type, text.record)}


def _exif(comment: str, carried: bytes = b"") -> Image.Exif:
    exif = Image.Exif()
    if carried:
        exif.load(carried)
    if comment:
        fields = exif.get_ifd(ExifTags.IFD.Exif)
        fields[ExifTags.Base.UserComment] = _UNICODE + comment.encode(_COMMENT_CODING)
    return exif


def _comment(image: ImageFile.ImageFile) -> str:
    """The EXIF UserComment; empty where there is none, or where it cannot be read."""
    with suppress(Exception):  # Pillow reads damaged EXIF with errors of any kind
        comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
        if isinstance(comment, bytes) and comment.startswith(_UNICODE):
            return comment.removeprefix(_UNICODE).decode(_COMMENT_CODING, "replace")
        return "" if isinstance(comment, bytes) else str(comment)
    return ""


def _saved(pixels: NDArray[np.uint8], **how: Any) -> bytes:
    assert pixels.dtype == np.uint8, "pixels are bytes"
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, **how)
    return data.getvalue()
