"""Pictures as bytes of a PNG, a JPEG or a WebP, and where each keeps what it says about itself.

    PNG         text chunks: `parameters`, `hyimg` (the record), and the XMP packet
    JPEG, WebP  EXIF UserComment: the parameters; the XMP packet: the record, too

Pixels are uint8 arrays [H, W, 3], RGB. Equal pixels and texts give equal bytes with the same
libraries.
"""

import io
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, PngImagePlugin

from hyimg_cli.media import xmp
from hyimg_cli.media.metadata import KEYWORD, PARAMETERS, PictureText
from hyimg_cli.spec.job import Encoding

# From here on a JPEG keeps every pixel's colour; below, one colour for four pixels.
_FULL_COLOUR = 90
# Source: the EXIF standard, and piexif, by which other tools read the comment.
_UNICODE, _COMMENT_CODING = b"UNICODE\0", "utf-16-be"
# EXIF of a JPEG is one segment of 65,533 bytes; the comment is nearly all of it.
_MOST_COMMENT_BYTES = 65_000
_CUT = "… (cut: the XMP packet has all of it)"


def png(pixels: NDArray[np.uint8], texts: Mapping[str, str]) -> bytes:
    """A PNG with a text chunk for each of `texts`, by keyword."""
    chunks = PngImagePlugin.PngInfo()
    for keyword, text in texts.items():
        _add(chunks, keyword, text)
    return _saved(pixels, format="PNG", pnginfo=chunks)


def encoded(pixels: NDArray[np.uint8], encoding: Encoding, text: PictureText | None) -> bytes:
    """The picture's file; `text`: what it says about itself."""
    match encoding.format:
        case "png":
            return png(pixels, {} if text is None else _chunks(text))
        case "jpeg":
            assert encoding.quality is not None, "a JPEG always loses something"
            colour = "4:4:4" if encoding.quality >= _FULL_COLOUR else "4:2:0"
            how = {"quality": encoding.quality, "subsampling": colour, "optimize": True}
            return _saved(pixels, format="JPEG", **how, **_in_jpeg(text))
        case "webp" if encoding.quality is None:
            return _saved(pixels, format="WEBP", lossless=True, **_in_webp(text))
        case "webp":
            return _saved(pixels, format="WEBP", quality=encoding.quality, **_in_webp(text))


def lossless(
    pixels: NDArray[np.uint8],
    encoding: Encoding,
    text: PictureText | None,
    *,
    icc: bytes | None,
    exif: bytes,
) -> bytes:
    """A PNG of grey, RGB or RGBA pixels or a lossless WebP of RGB or RGBA, colours under clear ones
    included, with a source's profile and EXIF; without `text` with the profile alone.
    """
    more: dict[str, Any] = {} if icc is None else {"icc_profile": icc}
    if encoding.format == "png":
        if text is not None and exif:
            more["exif"] = exif
        chunks = PngImagePlugin.PngInfo()
        for keyword, said in ({} if text is None else _chunks(text)).items():
            _add(chunks, keyword, said)
        # Half the time of Pillow's own level, for a file that is a few hundredths larger.
        return _data(pixels, format="PNG", pnginfo=chunks, compress_level=3, **more)
    if text is not None:
        more |= _in_webp(text) if text.record else {}
        more["exif"] = _exif(text.parameters, exif) if text.parameters or exif else b""
    return _data(pixels, format="WEBP", lossless=True, exact=True, **more)


def text_in(image: ImageFile.ImageFile) -> PictureText:
    """Metadata of an opened picture of these formats; empty where it has none.

    Raises what Pillow does for a damaged PNG.
    """
    if isinstance(image, PngImagePlugin.PngImageFile):
        texts = {str(keyword): str(text) for keyword, text in image.text.items()}
        packet = image.info.get("xmp", b"")
        record = texts.get(KEYWORD, "")
        return PictureText(texts.get(PARAMETERS, ""), record, xmp.source_type_in(packet))
    packet = image.info.get("xmp", b"")
    segments = [data for name, data in getattr(image, "applist", ()) if name == "APP1"]
    record = xmp.record_in(packet, segments)
    return PictureText(_comment(image), record, xmp.source_type_in(packet))


def _add(chunks: PngImagePlugin.PngInfo, keyword: str, text: str) -> None:
    add = chunks.add_itxt if keyword == xmp.PNG_KEYWORD else chunks.add_text
    add(keyword, text)


def _chunks(text: PictureText) -> dict[str, str]:
    if not text.record:
        return {}
    packet = xmp.packet(text.source_type).decode()
    return {PARAMETERS: text.parameters, KEYWORD: text.record, xmp.PNG_KEYWORD: packet}


def _in_jpeg(text: PictureText | None) -> dict[str, Any]:
    if text is None:
        return {}
    packet, segments = xmp.for_jpeg(text.source_type, text.record)
    return {"exif": _exif(_short(text.parameters)), "xmp": packet, "extra": segments}


def _in_webp(text: PictureText | None) -> dict[str, Any]:
    if text is None:
        return {}
    packet = xmp.packet(text.source_type, text.record)
    return {"exif": _exif(text.parameters), "xmp": packet}


def _short(parameters: str) -> str:
    """The parameters where a JPEG's EXIF can hold them; else with a prompt that is cut."""
    if len(parameters.encode(_COMMENT_CODING)) <= _MOST_COMMENT_BYTES:
        return parameters
    prompt, _, settings = parameters.rpartition("\n")
    kept = _MOST_COMMENT_BYTES - len(f"{_CUT}\n{settings}".encode(_COMMENT_CODING))
    start = prompt.encode(_COMMENT_CODING)[:kept].decode(_COMMENT_CODING, "ignore")
    return f"{start}{_CUT}\n{settings}"


def _exif(comment: str, carried: bytes = b"") -> Image.Exif:
    exif = Image.Exif()
    if carried:
        exif.load(carried)
    if not comment:
        return exif
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
    assert pixels.shape[2:] == (3,), "pixels are RGB"
    return _data(pixels, **how)


def _data(pixels: NDArray[np.uint8], **how: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, **how)
    return data.getvalue()
