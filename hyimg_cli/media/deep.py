"""Pictures of more than 8 bits per channel, or of fractions, as 8 bits.

Pillow opens more of them than it reads right. What its header says of a number is applied here, or
the picture is refused: nothing is guessed.
"""

import re
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, PngImagePlugin, TiffImagePlugin

# Unsigned numbers of 16 or 32 bits, or floats.
Numbers = NDArray[np.integer[Any]] | NDArray[np.floating[Any]]
_UNSIGNED, _SIGNED = 1, 2
_WHITE_IS_ZERO, _IN_PLANES = 0, 2
# A white that floats can have. Above one and a half of it are highlights, if at most so many of the
# lit pixels are there, and another white is meant if at least so many are.
_FLOAT_WHITES, _HIGHLIGHT, _FEW, _MANY = (1.0, 255.0, 65535.0), 1.5, 0.2, 0.5
# Raw modes of grey PNGs, with the largest number of a pixel.
_PNG_GREY = {"L;2": 3, "L;4": 15, "L": 255}


class UnclearPixelsError(Exception):
    """What the numbers of a picture mean cannot be told from it; the message says why."""


def bits_of(image: ImageFile.ImageFile) -> int:
    """Return the bits of a channel before decoding: 8 unless the header says more."""
    match image.format:
        case "HEIF":
            return int(image.info["bit_depth"])
        case "TIFF" if image.mode != "F":
            return int(max(_tags(image).get(ExifTags.Base.BitsPerSample, (8,))))
        case "PPM" if not image.mode.startswith("I"):
            args = image.tile[0].args
            return args[1].bit_length() if isinstance(args, tuple) else 8
        case "AVIF":
            # In the box av1C of a coded picture: the flag for 10 bits or more.
            is_deep = re.search(rb"av1C..[\x40-\x7f\xc0-\xff]", _head(image), re.DOTALL)
            return 10 if is_deep else 8
        case "JPEG2000" if not image.mode.startswith("I"):
            # In the SIZ marker: the first channel's bits minus one.
            depth = re.search(rb"\xff\x4f\xff\x51.{38}(.)", _head(image), re.DOTALL)
            return 1 + (depth[1][0] & 0x7F) if depth else 8
    # Pillow drops the lower 8 bits of colours, so only the raw mode shows them.
    return 16 if image.mode.startswith("I") or ";16" in _raw_mode(image) else 8


def mend(image: ImageFile.ImageFile) -> str:
    """Change an opened picture, before it is decoded, where Pillow would misread its header.

    Return what it is if it cannot be read right; else an empty string.
    """
    if image.format == "PNG":
        _scale_key(image)
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return ""
    tags = _tags(image)
    if _SIGNED in tags.get(ExifTags.Base.SampleFormat, (_UNSIGNED,)):
        return "a TIFF of signed numbers"
    if tags.get(ExifTags.Base.PlanarConfiguration) == _IN_PLANES and len(image.getbands()) > 1:
        if image.mode == "LAB":
            return "a TIFF of CIELab in planes"
        if bits_of(image) > 8 and not image.use_load_libtiff:
            # Pillow's own reader takes each plane for 8 bits; libtiff reads them right.
            args = (f"{image.mode};16N", False, tags.offset)
            image.tile = [ImageFile._Tile("libtiff", (0, 0, *image._tile_size), 0, args)]
            image.use_load_libtiff = True
    return ""


def grey_of(
    numbers: Numbers, image: ImageFile.ImageFile, greys: NDArray[np.uint8] | None = None
) -> tuple[Image.Image, str]:
    """Return 8-bit grey from one wide number per pixel [H, W], and a note on fractions.

    `image`: the file that they are of. With alpha, if it names a transparent grey. `greys`: the
    level of each 65535th of white, if levels are not in proportion. Raises UnclearPixelsError.
    """
    is_float, is_tiff, note = image.mode == "F", image.format == "TIFF", ""
    bits = bits_of(image) if is_tiff else 16
    white = _float_white(numbers) if is_float else float(2**bits - 1)
    # Pillow has only signed numbers of 32 bits.
    # Pillow has only signed numbers of 32 bits.
    numbers = numbers.view(np.uint32) if bits == 32 else numbers
    is_negative = is_tiff and (
        _tags(image).get(ExifTags.Base.PhotometricInterpretation, 0) == _WHITE_IS_ZERO
    )
    if is_negative and greys is not None:
        greys = 255 - greys[::-1]
    levels, clipped = _levels(numbers, white, greys)
    if is_float:
        beyond = f"; {clipped:,} of {levels.size:,} clipped" if clipped else ""
        note = f"floating-point pixels (0 to {white:.0f}{beyond}) reduced to 8 bits"
    if is_negative:
        levels = 255 - levels
    grey = Image.fromarray(levels)
    key = image.info.get("transparency")
    if isinstance(key, int) and (is_clear := numbers == key).any():
        alpha = Image.fromarray(np.where(is_clear, np.uint8(0), np.uint8(255)))
        grey = Image.merge("LA", (grey, alpha))
    return grey, note


def with_exact_key(image: Image.Image, file: IO[bytes]) -> Image.Image:
    """Return a decoded PNG of 16-bit colours with alpha; its transparent colour has 16 bits, too.

    `file`: the PNG again, whose lower bytes Pillow has dropped.
    """
    key = np.array(image.info["transparency"], np.uint16)
    file.seek(0)
    with PngImagePlugin.PngImageFile(file) as low:
        low.tile = [one._replace(args="RGB;16L") for one in low.tile]
        is_clear = (np.asarray(image) == key >> 8).all(axis=2)
        is_clear &= (np.asarray(low) == key & 255).all(axis=2)
    alpha = Image.fromarray(np.where(is_clear, np.uint8(0), np.uint8(255)))
    layer = Image.merge("RGBA", (*image.split(), alpha))
    layer.info = image.info  # the orientation
    return layer


def _levels(
    numbers: Numbers, white: float, greys: NDArray[np.uint8] | None
) -> tuple[NDArray[np.uint8], int]:
    """Return numbers [H, W] as levels of 255, and how many are beyond them or not a number.

    `greys`: see `grey_of`.
    """
    most = 255 if greys is None else len(greys) - 1
    levels, clipped = np.empty(numbers.shape, np.uint8), 0
    # Row by row: as float64 a large picture takes eight bytes a pixel, several times.
    for row, values in zip(levels, numbers, strict=True):
        exact = np.round(values.astype(np.float64) * (most / white))
        clipped += exact.size - np.count_nonzero((exact >= 0) & (exact <= most))
        within = np.clip(np.nan_to_num(exact), 0, most)
        row[:] = within if greys is None else greys[within.astype(np.uint16)]
    return levels, clipped


def _float_white(numbers: Numbers) -> float:
    """Return the white of floats: of the usual ones, that above which only highlights are."""
    lit = max(1, int(np.count_nonzero(numbers > 0)))
    for white in _FLOAT_WHITES[:-1]:
        share = int(np.count_nonzero(numbers > _HIGHLIGHT * white)) / lit
        if share <= _FEW:
            return white
        if share < _MANY:
            what = f"{share:.0%} of its floating-point pixels are above {white:g}"
            raise UnclearPixelsError(f"the range of the picture is not clear: {what}")
    return _FLOAT_WHITES[-1]


def _scale_key(image: ImageFile.ImageFile) -> None:
    """Give a PNG's transparent colour the levels of its decoded pixels."""
    key, most = image.info.get("transparency"), _PNG_GREY.get(_raw_mode(image))
    if most is not None and isinstance(key, int):
        image.info["transparency"] = (key & most) * 255 // most
    elif _raw_mode(image) == "RGB" and isinstance(key, tuple):
        image.info["transparency"] = tuple(value & 255 for value in key)


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Return Pillow's name of the channels in the file; empty once it is decoded."""
    args = image.tile[0].args if image.tile else ""
    return str(args[0]) if isinstance(args, tuple) else str(args)


def _tags(image: Image.Image) -> TiffImagePlugin.ImageFileDirectory_v2:
    """Return the tags of a TIFF; none for other pictures."""
    return getattr(image, "tag_v2", None) or TiffImagePlugin.ImageFileDirectory_v2()


def _head(image: ImageFile.ImageFile) -> bytes:
    """Return the start of the file, which names its channels; decoding seeks its own place."""
    assert image.fp is not None, "it was opened just now"
    image.fp.seek(0)
    return image.fp.read(1 << 16)
