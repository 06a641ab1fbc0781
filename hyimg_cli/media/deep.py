"""Pictures of more than 8 bits per channel, or of fractions: their depth, and 8-bit grey of them."""

import re

import numpy as np
from PIL import ExifTags, Image, ImageFile


def bits_of(image: ImageFile.ImageFile) -> int:
    """Return the bits of a channel before decoding: 8 unless the header says more."""
    # Pillow drops the lower 8 bits of colours, so only the raw mode shows them.
    if image.mode.startswith("I") or any(";16" in str(tile.args) for tile in image.tile):
        return 16
    match image.format:
        case "HEIF":
            return int(image.info["bit_depth"])
        case "TIFF" if image.mode != "F":
            return int(max(getattr(image, "tag_v2", {}).get(ExifTags.Base.BitsPerSample, (8,))))
        case "PPM":
            args = image.tile[0].args
            return args[1].bit_length() if isinstance(args, tuple) else 8
        case "AVIF":
            # In the box av1C of a coded picture: the flag for 10 bits or more.
            is_deep = re.search(rb"av1C..[\x40-\x7f\xc0-\xff]", _head(image), re.DOTALL)
            return 10 if is_deep else 8
        case "JPEG2000":
            # In the SIZ marker: the first channel's bits minus one.
            depth = re.search(rb"\xff\x4f\xff\x51.{38}(.)", _head(image), re.DOTALL)
            return 1 + (depth[1][0] & 0x7F) if depth else 8
    return 8


def _head(image: ImageFile.ImageFile) -> bytes:
    """Return the start of the file, which names its channels; decoding seeks its own place."""
    assert image.fp is not None, "it was opened just now"
    image.fp.seek(0)
    return image.fp.read(1 << 16)


def grey_of(image: Image.Image) -> Image.Image:
    """Return 8-bit grey from one wide number per pixel: 16-bit, or fractions up to 1 or 255."""
    numbers = np.asarray(image)
    highest = np.nan_to_num(numbers).max() if image.mode == "F" else 65535
    scale = 255.0 if highest <= 1 else 1.0 if highest <= 255 else 255 / 65535
    levels = np.empty(numbers.shape, np.uint8)
    # Row by row: as float64 a large picture takes eight bytes a pixel, several times.
    for row, values in zip(levels, numbers, strict=True):
        row[:] = np.clip(np.round(np.nan_to_num(values.astype(np.float64)) * scale), 0, 255)
    return Image.fromarray(levels)
