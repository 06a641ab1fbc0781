"""Pictures as files: read any common one as RGB, fit it to a size, write it whole.

Pixels are uint8 arrays [H, W, 3], RGB. Source files are untrusted until read: their size is checked
before decoding, and formats that start other programs (EPS) are not opened.
"""

import contextlib
import errno
import io
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps

from hyimg_cli.errors import SourceImageError
from hyimg_cli.files import UnfitFile, bytes_of, opened
from hyimg_cli.media import formats
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Size

# Sizes are checked here; other things that Pillow warns of are repaired by it or fail later. Set
# once for the process: ignoring a warning within a block is not thread-safe.
warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif)\b")

Pixels = NDArray[np.uint8]
# As Pillow holds it: colours take four bytes a pixel.
Picture = Image.Image
MAX_SOURCE_PIXELS = 100_000_000
MAX_SOURCE_BYTES = 1_000_000_000
MAX_ASPECT = 200
_UPRIGHT, _SIDEWAYS = 1, (5, 6, 7, 8)
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
_HEIF = re.compile(rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
_MAGIC = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\0|MM\0\*", re.DOTALL)
# Modes that become RGB without a note, and names for the others.
_PLAIN_MODES = {"RGB", "L", "1", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}
_MODE_NAMES = {"P": "palette", "PA": "palette", "LA": "grey with alpha"}
# The note on a source with transparent parts.
_ON_WHITE = "transparency composited on white"
# NOTE: on damaged bytes, Pillow's decoders raise almost anything: SyntaxError, IndexError,
# zlib.error, RuntimeError. Use this only around calls into Pillow.
_DECODER_ERRORS = Exception


@dataclass(frozen=True)
class SourceImage:
    """A source picture. `digest`: sha256 of the file; `notes`: what reading changed."""

    pixels: Pixels
    digest: str
    notes: tuple[str, ...]
    is_stretched: bool = False

    def stretched(self) -> "SourceImage":
        """Return the same picture, to be resized without cutting; to caches it is another image."""
        return replace(self, digest=stretched_digest(self.digest), is_stretched=True)


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
            _, notes = read_upright(path, image)
        # A TIFF's size already accounts for its orientation.
        is_on_side = image.format != "TIFF" and _orientation(image) in _SIDEWAYS
        return Size(*(size if is_on_side else size[::-1])), notes


def size_of(path: str) -> Size:
    """Return a picture's size from its header; cached until the file changes.

    Raises SourceImageError.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # not a path of this machine
        return _size_since(path, 0, 0)
    return _size_since(path, found.st_mtime_ns, found.st_size)


@lru_cache(1 << 16)
def _size_since(path: str, changed_ns: int, nbytes: int) -> Size:
    return probe_image(Path(path), decode=False)[0]


def read_image(path: Path, *, keeps_alpha: bool = False) -> SourceImage:
    """Return the first frame of a picture, upright, 8-bit RGB on white; RGBA with `keeps_alpha`.

    Raises SourceImageError.
    """
    data = bytes_of_source(path)
    with open_picture(path, data) as image:
        own, notes = read_upright(path, image)
    pixels = np.array(own)
    if keeps_alpha and own.mode == "RGBA":
        notes = tuple(note for note in notes if note != _ON_WHITE)
    else:
        pixels = on_white(pixels)
    return SourceImage(pixels, digest.of_bytes(data), notes)


def read_small(path: Path, side: int) -> Image.Image:
    """Return the first frame as `read_image` does, scaled down to at most `side` pixels.

    A JPEG is decoded at a fraction of its size. Raises SourceImageError.
    """
    with open_picture(path) as image:
        image.draft("RGB", (2 * side, 2 * side))
        rgb = Image.fromarray(on_white(np.asarray(read_upright(path, image)[0])))
        rgb.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        return rgb


def text_of(path: Path) -> PictureText:
    """Return the metadata of a PNG, JPEG or WebP, including text after a PNG's pixels.

    Raises SourceImageError for a file that is not a picture, or a damaged PNG.
    """
    with open_picture(path) as image, _decoder_faults(path):
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
    return digest.of_bytes(pixels.tobytes())


def bytes_of_source(path: Path) -> bytes:
    """Return the bytes of a picture's file. Raises SourceImageError."""
    with file_faults(path):
        return bytes_of(path, MAX_SOURCE_BYTES)


@contextlib.contextmanager
def file_faults(path: Path) -> Iterator[None]:
    """Raise SourceImageError for a file that cannot be read."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        if path.is_symlink():
            raise _fault("missing", "the link's target does not exist", path) from error
        hint = "write paths relative to the manifest"
        if "\\" in path.name:
            hint += ", with forward slashes"
        raise _fault("missing", "file not found", path, hint) from error
    except IsADirectoryError as error:
        raise _fault("is-a-folder", "the path is a folder", path, "name a picture in it") from error
    except UnfitFile as error:
        slug = "too-large" if error.errno == errno.EFBIG else "not-an-image"
        raise _fault(slug, error.strerror, path) from error
    except OSError as error:
        raise _fault("unreadable", f"the file cannot be read: {error.strerror}", path) from error


@contextlib.contextmanager
def open_picture(path: Path, data: bytes | None = None) -> Iterator[ImageFile.ImageFile]:
    """Open a picture without decoding it, after checking its size and kind; `data`: its bytes.

    Raises SourceImageError.
    """
    with file_faults(path):
        file = opened(path, MAX_SOURCE_BYTES) if data is None else io.BytesIO(data)
    with file:
        if path.suffix.lower() in RAW_SUFFIXES:
            hint = RAW_HINT.format(path.name, path.stem)
            raise _fault("raw", "camera RAW files are not supported", path, hint)
        start = file.read(16)
        if not start:
            raise _fault("empty", "the file is empty", path, "copy or save it again")
        file.seek(0)
        is_heif = _HEIF.match(start) is not None
        try:
            formats = (*FORMATS, "HEIF") if is_heif and _knows_heif() else FORMATS
            image = Image.open(file, formats=formats)
        except Image.DecompressionBombError as error:
            # Only Pillow's message gives the number.
            count = re.search(r"[0-9]+", str(error))
            raise _too_large(path, f"{int(count[0]):,}" if count else "too many") from error
        except _DECODER_ERRORS as error:
            if is_heif and not _knows_heif():
                what = "HEIC images need pillow-heif, which is not installed"
                hint = "pip install 'hyimg-cli[heif]', or convert it to JPEG or PNG"
                raise _fault("no-heif", what, path, hint) from error
            if _MAGIC.match(start) or is_heif:
                raise _truncated(path) from error
            hint = f"give one of {', '.join(FORMATS)}"
            raise _fault("not-an-image", "the file is not an image", path, hint) from error
        with image:
            sides = f"{image.width} x {image.height}"
            if image.width * image.height > MAX_SOURCE_PIXELS:
                raise _too_large(path, sides)
            if max(image.size) > MAX_ASPECT * min(image.size):
                hint = f"crop it: the long side can be at most {MAX_ASPECT} times the short one"
                raise _fault("too-narrow", f"it is too narrow ({sides} pixels)", path, hint)
            yield image


@cache
def _knows_heif() -> bool:
    """True if Pillow reads HEIC from now on."""
    if find_spec("pillow_heif") is None:
        return False
    from pillow_heif import register_heif_opener

    register_heif_opener(thumbnails=False)
    return True


def read_upright(path: Path, image: ImageFile.ImageFile) -> tuple[Picture, tuple[str, ...]]:
    """Return the first frame, upright, in 8-bit grey, RGB or RGBA, and notes on changes.

    The notes include what RGB on white changes. Raises SourceImageError.
    """
    with _decoder_faults(path):
        # What will be changed, as far as it is known before decoding.
        count, bits = getattr(image, "n_frames", 1), bits_of(image)
        if image.format == "PNG":
            # NOTE: its EXIF may follow its pixels. When asked for it, Pillow decodes; if that
            # fails, it accepts the damaged picture the next time.
            image.load()
        is_turned = _orientation(image) != _UPRIGHT
        image.load()
        own = _own_channels(ImageOps.exif_transpose(image) if is_turned else image)
    mode = image.mode
    notes = {
        f"first of {count} frames": count > 1,
        "EXIF orientation applied": is_turned,
        f"{bits}-bit reduced to 8": bits > 8,
        "floating-point pixels reduced to 8 bits": mode == "F",
        f"{_MODE_NAMES.get(mode, mode)} converted to RGB": mode not in _PLAIN_MODES,
        _ON_WHITE: own.mode == "RGBA",
    }
    return own, tuple(note for note, applies in notes.items() if applies)


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


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; upright if it is unreadable."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except _DECODER_ERRORS:
        return _UPRIGHT
    return value if isinstance(value, int) and 1 <= value <= 8 else _UPRIGHT


def on_white(own: Pixels) -> Pixels:
    """Return grey, RGB or RGBA as RGB on white."""
    if own.ndim == 2:
        return np.repeat(own[..., None], 3, axis=2)
    if own.shape[2] == 3:
        return own
    layer = Image.fromarray(own)
    white = Image.new("RGBA", layer.size, "white")
    return np.array(Image.alpha_composite(white, layer).convert("RGB"))


def _own_channels(image: Picture) -> Picture:
    """Convert as `read_upright`; copy only if necessary."""
    if image.mode[0] in "IF":
        return _grey_of(image)
    if image.has_transparency_data:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        is_clear = layer.getchannel("A").getextrema() != (255, 255)
        return layer if is_clear else layer.convert("RGB")
    kind = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == kind else image.convert(kind)


def _grey_of(image: Image.Image) -> Image.Image:
    """Return 8-bit grey from one wide number per pixel: 16-bit, or fractions up to 1 or 255."""
    numbers = np.asarray(image)
    highest = np.nan_to_num(numbers).max() if image.mode == "F" else 65535
    scale = 255.0 if highest <= 1 else 1.0 if highest <= 255 else 255 / 65535
    levels = np.empty(numbers.shape, np.uint8)
    # Row by row: as float64 a large picture takes eight bytes a pixel, several times.
    for row, values in zip(levels, numbers, strict=True):
        row[:] = np.clip(np.round(np.nan_to_num(values.astype(np.float64)) * scale), 0, 255)
    return Image.fromarray(levels)


def _fault(slug: str, what: str, path: Path, hint: str = "") -> SourceImageError:
    return SourceImageError(what, where=path, hint=hint, code=f"source.{slug}")


@contextlib.contextmanager
def _decoder_faults(path: Path) -> Iterator[None]:
    """Raise SourceImageError for whatever calls into Pillow raise."""
    try:
        yield
    except _DECODER_ERRORS as error:
        raise _truncated(path) from error


def _truncated(path: Path) -> SourceImageError:
    what = "the picture is damaged or incomplete"
    return _fault("truncated", what, path, "copy or save it again")


def _too_large(path: Path, found: str) -> SourceImageError:
    what = f"the picture is too large ({found} pixels, limit {MAX_SOURCE_PIXELS:,})"
    return _fault("too-large", what, path, "scale the picture down")
