"""Pictures as pixels: any common file read as RGB, and fitted to a size.

Pixels are uint8 arrays [H, W, 3], RGB.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media import deep, formats
from hyimg_cli.media.colour import ColourSpace
from hyimg_cli.media.colour_tags import Colours, colours_of
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.pages import pages_of
from hyimg_cli.media.source_files import (
    MAX_SOURCE_BYTES,
    SKIPPED,
    bytes_of_source,
    decoder_faults,
    open_picture,
)
from hyimg_cli.media.strips import in_strips, pixels_of
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Size, View
from hyimg_cli.spec.options import box_text

Pixels = NDArray[np.uint8]
# As Pillow holds it: colours take four bytes a pixel.
Picture = Image.Image
_UPRIGHT, _SIDEWAYS = 1, (5, 6, 7, 8)
# Modes that become RGB without a note, and names for the others.
_PLAIN_MODES = {"RGB", "L", "1", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}
_MODE_NAMES = {"P": "palette", "PA": "palette", "LA": "grey with alpha"}
# The note on a source with transparent parts.
_ON_WHITE = "transparency composited on white"
# The note on a source that shows nothing.
_BLANK = "the picture is transparent everywhere"


@dataclass(frozen=True)
class SourceImage:
    """A source picture in sRGB. `notes`: what reading changed.

    `sha256`: of the file. `digest`: of the picture as it is read; see `Digests`. `whole`: that of
    the whole picture, if this is a crop.
    """

    pixels: Pixels
    digest: str
    notes: tuple[str, ...]
    sha256: str = ""
    is_stretched: bool = False
    whole: str = ""

    @property
    def digests(self) -> "Digests":
        """Return the digests of the file, for a picture that is not `stretched`."""
        return Digests(self.sha256, self.whole or self.digest)

    def seen_as(self, view: View) -> "SourceImage":
        """Return what a view shows of this picture; to caches it is another image."""
        if view.crop is None or view.size is None:
            return self
        left, top, right, bottom = view.crop
        pixels = stretch(self.pixels[top:bottom, left:right], view.size)
        own = view.digest_of(self.digest)
        return replace(self, pixels=pixels, digest=own, whole=self.digest)

    def stretched(self) -> "SourceImage":
        """Return the same picture, to be resized without cutting; to caches it is another image."""
        return replace(self, digest=stretched_digest(self.digest), is_stretched=True)


@dataclass(frozen=True)
class Digests:
    """Digests of a source file: `sha256` of its bytes, and `picture` of what is read from it.

    They are equal for a picture in sRGB. If its colours are converted, `picture` changes with the
    conversion, so earlier results and cached encodings of unconverted numbers do not count.
    """

    sha256: str
    picture: str


def digests_of(path: Path) -> Digests:
    """Return the digests of a source picture, from its bytes and its header.

    Raises OSError if the file cannot be read. An unreadable picture counts as one in sRGB.
    """
    sha256 = digest.of_file(path, MAX_SOURCE_BYTES)
    with suppress(SourceImageError), open_picture(path) as image:
        return Digests(sha256, colours_of(image).as_read(sha256))
    return Digests(sha256, sha256)


def stretched_digest(image_digest: str) -> str:
    """Return the digest of an image that is resized without cutting."""
    return digest.of_bytes(f"stretched {image_digest}".encode())


def probe_image(path: Path, *, decode: bool = True) -> tuple[Size, tuple[str, ...]]:
    """Return the size as it will be read, and the notes that reading gives.

    With `decode` off, only the header is read: later damage and notes on pixels are missed. Raises
    SourceImageError.
    """
    with open_picture(path) as image:
        size, notes = image.size, tuple[str, ...]()
        if decode:
            # All of a JPEG's data are read, but only an eighth of its pixels are decoded.
            image.draft(image.mode, (1, 1))
            notes = read_upright(path, image).notes
        # A TIFF's size already accounts for its orientation.
        is_on_side = image.format != "TIFF" and _orientation(image) in _SIDEWAYS
        return Size(*(size if is_on_side else size[::-1])), notes


def is_warning(note: str) -> bool:
    """Return True for a note on a source that somebody must look at."""
    return note == _BLANK


def size_of(path: str) -> Size:
    """Return a picture's size from its header; cached until the file changes.

    Raises SourceImageError.
    """
    return _size_since(path, marks_of(path))


def marks_of(path: str) -> tuple[int, int]:
    """Return marks of a file that change with it; zeros if it is not one of this machine."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return 0, 0
    return found.st_mtime_ns, found.st_size


def view_size(view: View) -> Size:
    """Return the size in which a view shows its picture. Raises SourceImageError."""
    return view.size or size_of(view.path)


@lru_cache(1 << 16)
def _size_since(path: str, marks: tuple[int, int]) -> Size:
    return probe_image(Path(path), decode=False)[0]


def read_image(path: Path, *, keeps_alpha: bool = False) -> SourceImage:
    """Return the first frame of a picture, upright, 8-bit RGB on white; RGBA with `keeps_alpha`.

    Raises SourceImageError.
    """
    data = bytes_of_source(path)
    with open_picture(path, data) as image:
        found = read_upright(path, image)
        shown, notes = found.in_srgb(), found.notes
    pixels = pixels_of(shown)
    if keeps_alpha and shown.mode == "RGBA":
        notes = tuple(note for note in notes if note != _ON_WHITE)
    else:
        pixels = on_white(pixels)
    sha256 = digest.of_bytes(data)
    return SourceImage(pixels, found.colours.as_read(sha256), notes, sha256)


def read_view(view: View, *, keeps_alpha: bool = False) -> SourceImage:
    """Return what a view shows of a picture, as `read_image` reads it.

    Raises SourceImageError, also if the picture no longer holds the view's crop.
    """
    image = read_image(Path(view.path), keeps_alpha=keeps_alpha)
    height, width = image.pixels.shape[:2]
    if view.crop is not None and (view.crop[2] > width or view.crop[3] > height):
        what = f"the crop {box_text(view.crop)} extends beyond the source ({width}x{height})"
        hint = "run the command again: the source has changed"
        raise SourceImageError(what, where=view.path, hint=hint, code="source.changed")
    return image.seen_as(view)


def read_small(path: Path, side: int) -> Image.Image:
    """Return the first frame as `read_image` does, scaled down to at most `side` pixels.

    A JPEG is decoded at a fraction of its size. Raises SourceImageError.
    """
    with open_picture(path) as image:
        image.draft("RGB", (2 * side, 2 * side))
        rgb = Image.fromarray(on_white(np.asarray(read_upright(path, image).in_srgb())))
        rgb.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        return rgb


def text_of(path: Path) -> PictureText:
    """Return the metadata of a PNG, JPEG or WebP, including text after a PNG's pixels.

    Raises SourceImageError for a file that is not a picture, or a damaged PNG.
    """
    with open_picture(path) as image, decoder_faults(path, image.fp):
        return formats.text_in(image)


def fit_cover(pixels: Pixels, size: Size) -> Pixels:
    """Return `pixels` scaled (Lanczos) to cover `size`, then cropped to it around the centre.

    Source: HunyuanImage-3.0, `resize_and_crop`, whose order of operations decides the rounding.
    """
    height, width = pixels.shape[:2]
    if height / width < size.height / size.width:
        new_height, new_width = size.height, round(size.height / height * width)
    else:
        new_height, new_width = round(size.width / width * height), size.width
    top = round((new_height - size.height) / 2)
    left = round((new_width - size.width) / 2)
    resized = stretch(pixels, Size(new_height, new_width))
    return np.array(resized[top : top + size.height, left : left + size.width])


def cut_off(source: Size, size: Size) -> str:
    """Return what `fit_cover` cuts off, as the end of a sentence; empty for equal shapes."""
    ratio = size.width * source.height / (size.height * source.width)
    lost = 1 - min(ratio, 1 / ratio)
    sides, of = ("left and right", "width") if ratio < 1 else ("top and bottom", "height")
    return f"; {sides} cut off, {lost:.0%} of the {of}" if lost >= 0.005 else ""


def stretch(
    pixels: Pixels, size: Size, resample: Image.Resampling = Image.Resampling.LANCZOS
) -> Pixels:
    """Return `pixels` resized to `size` without cutting, whatever their shape."""
    return np.array(Image.fromarray(pixels).resize((size.width, size.height), resample))


def bicubic(pixels: Pixels, size: Size) -> Pixels:
    """Resize like `stretch`, with the bicubic filter of models that were trained with it."""
    return stretch(pixels, size, Image.Resampling.BICUBIC)


def pixel_digest(pixels: Pixels | Picture) -> str:
    """Return the hex sha256 of the RGB bytes, row by row: the value to compare pictures by."""
    is_array = isinstance(pixels, np.ndarray)
    return digest.of_bytes(np.ascontiguousarray(pixels).data if is_array else pixels.tobytes())


@dataclass(frozen=True)
class Upright:
    """The first frame of a picture, upright. `own`: its numbers as 8-bit grey, RGB or RGBA.

    `notes`: what RGB of sRGB on white changes. `convert`: converts the colours from more than
    `own` holds: from four inks, or from 16 bits.
    """

    own: Picture
    colours: Colours
    notes: tuple[str, ...]
    convert: Callable[[ColourSpace], Picture] | None = None

    def in_srgb(self) -> Picture:
        """Return the picture in sRGB; `own` itself if that is sRGB."""
        space = self.colours.space
        if space is None:
            return self.own
        return space.to_srgb(self.own) if self.convert is None else self.convert(space)


def read_upright(path: Path, image: ImageFile.ImageFile) -> Upright:
    """Return the first frame of an opened picture. Raises SourceImageError."""
    with decoder_faults(path, image.fp):
        # What will be changed, as far as it is known before decoding.
        pages, bits, colours = pages_of(image), deep.bits_of(image), colours_of(image)
        file = image.fp
        if image.format == "PNG":
            # NOTE: its EXIF may follow its pixels. When asked for it, Pillow decodes; if that
            # fails, it accepts the damaged picture the next time.
            image.load()
        is_turned = _orientation(image) != _UPRIGHT
        image.load()
        upright: Picture = image
        if bits == 16 and image.mode == "RGB" and "transparency" in image.info:
            assert file is not None, "it was opened just now"
            upright = deep.with_exact_key(image, file)
        upright = ImageOps.exif_transpose(upright) if is_turned else upright
        of_floats, convert = "", None
        if image.mode[0] in "IF":
            numbers = np.asarray(upright)
            upright, of_floats = deep.grey_of(numbers, image)
            if colours.space is not None and colours.space.grey:
                convert = partial(_deep_in_srgb, numbers, image)
        own = _own_channels(upright)
        is_unseen = own.mode == "RGBA" and own.getchannel("A").getextrema() == (0, 0)
        # Programs leave a BMP's alpha at 0; Windows and browsers show such a file opaque.
        is_opaque = is_unseen and image.format in ("BMP", "DIB")
        own = own.convert("RGB") if is_opaque else own
    mode, is_plain = image.mode, image.mode in _PLAIN_MODES
    if mode == "CMYK" and colours.space is not None:
        convert, is_plain = partial(_cmyk_in_srgb, upright), True
    notes = {
        pages.note: bool(pages.note),
        "EXIF orientation applied": is_turned,
        f"{bits}-bit reduced to 8": bits > 8,
        of_floats: mode == "F",
        f"damaged or very large metadata skipped: {image.info.get(SKIPPED)}": SKIPPED in image.info,
        f"{_MODE_NAMES.get(mode, mode)} converted to RGB": not is_plain,
        "its alpha is 0 everywhere, so it is read as opaque": is_opaque,
        _BLANK: is_unseen and not is_opaque,
        **dict.fromkeys(colours.notes, True),
        _ON_WHITE: own.mode == "RGBA",
    }
    said = tuple(note for note, applies in notes.items() if applies)
    return Upright(own, colours, said, convert)


def _cmyk_in_srgb(upright: Picture, space: ColourSpace) -> Picture:
    return space.to_srgb(upright)


def _deep_in_srgb(numbers: deep.Numbers, image: ImageFile.ImageFile, space: ColourSpace) -> Picture:
    return _own_channels(deep.grey_of(numbers, image, space.deep_greys())[0])


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; upright if it is unreadable."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow reads damaged EXIF with errors of any kind
        return _UPRIGHT
    return value if isinstance(value, int) and 1 <= value <= 8 else _UPRIGHT


def stacked(layers: Sequence[Pixels]) -> Pixels:
    """Return RGBA layers over each other, from the lowest; a picture alone as it is."""
    lowest, *others = layers
    for layer in others:
        both = Image.alpha_composite(Image.fromarray(lowest), Image.fromarray(layer))
        lowest = np.asarray(both)
    return lowest


def on_white(own: Pixels) -> Pixels:
    """Return grey, RGB or RGBA as RGB on white."""
    if own.ndim == 2:
        return np.repeat(own[..., None], 3, axis=2)
    if own.shape[2] == 3:
        return own

    def part_of(rows: slice) -> Pixels:
        layer = Image.fromarray(own[rows])
        white = Image.new("RGBA", layer.size, "white")
        return np.asarray(Image.alpha_composite(white, layer).convert("RGB"))

    return in_strips(own.shape[0], own.shape[1], part_of)


def _own_channels(image: Picture) -> Picture:
    """Convert as `read_upright`; copy only if necessary."""
    if image.has_transparency_data:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        is_clear = layer.getchannel("A").getextrema() != (255, 255)
        return layer if is_clear else layer.convert("RGB")
    kind = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == kind else image.convert(kind)
