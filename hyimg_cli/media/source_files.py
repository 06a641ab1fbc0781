"""Files of source pictures: opened, recognised and limited before they are decoded.

They are untrusted until read. Formats that start other programs (EPS) are not opened.
"""

import contextlib
import errno
import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from PIL import Image, ImageFile

from hyimg_cli import remote
from hyimg_cli.addresses import address_of
from hyimg_cli.errors import MachineError, SourceImageError, UsageError, installation
from hyimg_cli.files import UnfitFile, bytes_of, opened
from hyimg_cli.media import deep, kinds, png_chunks
from hyimg_cli.mistyped import nearest_path, of_windows

# Sizes are checked here; other things that Pillow warns of are repaired by it or fail later. Set
# once for the process: ignoring a warning within a block is not thread-safe.
warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif)\b")

MAX_SOURCE_PIXELS = 100_000_000
MAX_SOURCE_BYTES = 1_000_000_000
MAX_ASPECT = 200
# Where an opened picture's `info` names the parts of the file that were not read.
SKIPPED = "skipped chunks"
# NOTE: on damaged bytes, Pillow's decoders raise almost anything: SyntaxError, IndexError,
# zlib.error, RuntimeError. Use this only around calls into Pillow.
_DECODER_ERRORS = Exception


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
            is_annexed = "/annex/objects/" in os.fspath(path.readlink())
            hint = "fetch the picture: git annex get" if is_annexed else nearest_path(str(path))
            raise _fault("missing", "the link's target does not exist", path, hint) from error
        hint = "write paths relative to the manifest"
        if address := address_of(path):
            hint = "names in a store count capitals, and %20 is no space"
            if "/../" in address:
                hint = "write the whole address: names in a store have no .."
        if any(c in str(path) for c in "\r\n\t\b\f"):
            hint = "write / between folders: in JSON, \\ and the letter after it are one character"
        elif written := of_windows(str(path)):
            hint = written
        if re.search(r"\.\w{3,4}\s*,", str(path)):
            hint = "separate several images with ; in a table, and as a list in JSON"
        raise _fault("missing", "file not found", path, hint) from error
    except IsADirectoryError as error:
        raise _fault("is-a-folder", "the path is a folder", path, "name a picture in it") from error
    except UnfitFile as error:
        slug = "too-large" if error.errno == errno.EFBIG else "not-an-image"
        hint = "make the picture smaller" if slug == "too-large" else "save the picture as a file"
        raise _fault(slug, error.strerror, path, hint) from error
    except remote.UnusableAddress as error:
        raise _of_address(error.fault) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def address_fault(path: str) -> SourceImageError | None:
    """Return why an address cannot be read on this machine, without reading it; None for others."""
    try:
        if address := address_of(path):
            remote.locate(address)
    except (MachineError, UsageError) as error:
        return _of_address(error)
    return None


def _of_address(fault: MachineError | UsageError) -> SourceImageError:
    return SourceImageError(fault.what, where=fault.where, hint=fault.hint, code=fault.code)


@contextlib.contextmanager
def open_picture(path: Path, data: bytes | None = None) -> Iterator[ImageFile.ImageFile]:
    """Open a picture without decoding it, after checking its size and kind; `data`: its bytes.

    Raises SourceImageError.
    """
    with file_faults(path):
        file = opened(path, MAX_SOURCE_BYTES) if data is None else io.BytesIO(data)
    with file, _opened(path, file) as image:
        sides = f"{image.width} x {image.height}"
        if image.width * image.height > MAX_SOURCE_PIXELS:
            raise _too_large(path, sides)
        if max(image.size) > MAX_ASPECT * min(image.size):
            hint = f"crop it: the long side can be at most {MAX_ASPECT} times the short one"
            raise _fault("too-narrow", f"it is too narrow ({sides} pixels)", path, hint)
        with decoder_faults(path, file):
            kind = deep.mend(image)
        if kind:
            raise _unsupported(path, kind)
        yield image


def _opened(path: Path, file: IO[bytes]) -> ImageFile.ImageFile:
    """Open a file as the kind of picture that it is, whatever its name; RAW by its name."""
    if path.suffix.lower() in kinds.RAW_SUFFIXES:
        hint = kinds.RAW_HINT.format(path.name, path.stem)
        raise _fault("raw", "camera RAW files are not supported", path, hint)
    with file_faults(path):
        start = file.read(16)
        file.seek(0)
    if not start:
        raise _fault("empty", "the file is empty", path, "copy or save it again")
    is_heif = kinds.HEIF.match(start) is not None
    formats = (*kinds.FORMATS, "HEIF") if is_heif and kinds.knows_heif() else kinds.FORMATS
    skipped = tuple[str, ...]()
    try:
        if start.startswith(png_chunks.SIGNATURE):
            file, skipped = png_chunks.without_faulty(file)
        image = Image.open(file, formats=formats)
    except Image.DecompressionBombError as error:
        # Only Pillow's message gives the number.
        count = re.search(r"[0-9]+", str(error))
        raise _too_large(path, f"{int(count[0]):,}" if count else "too many") from error
    except _DECODER_ERRORS as error:
        if is_heif and not kinds.knows_heif():
            what = "HEIC images need pillow-heif, which is not installed"
            hint = f"{installation('heif')}, or convert it to JPEG or PNG"
            raise _fault("no-heif", what, path, hint) from error
        fault = _decoder_fault(path, file, error)
        if fault.code == "source.truncated" and not (kinds.MAGIC.match(start) or is_heif):
            kind, hint = kinds.mistaken_kind(file)
            what = f"the file is {kind}, not an image" if kind else "the file is not an image"
            hint = hint or f"give one of {', '.join(kinds.FORMATS)}"
            fault = _fault("not-an-image", what, path, hint)
        raise fault from error
    if skipped:
        image.info[SKIPPED] = ", ".join(skipped)
    return image


def _fault(slug: str, what: str, path: Path, hint: str = "") -> SourceImageError:
    return SourceImageError(what, where=path, hint=hint, code=f"source.{slug}")


@contextlib.contextmanager
def decoder_faults(path: Path, file: IO[bytes] | None) -> Iterator[None]:
    """Raise SourceImageError for whatever calls into Pillow raise on an open file."""
    try:
        yield
    except deep.UnclearPixelsError as error:
        hint = "convert it to 16 bits, or scale its pixels to the range 0 to 1"
        raise _fault("unsupported", str(error), path, hint) from error
    except _DECODER_ERRORS as error:
        raise _decoder_fault(path, file, error) from error


def _decoder_fault(path: Path, file: IO[bytes] | None, error: Exception) -> SourceImageError:
    """Return the fault of the disk, the kind or the bytes that made Pillow raise `error`."""
    # Pillow's own have no number.
    if isinstance(error, OSError) and error.errno:
        return _unreadable(path, error)
    kind = kinds.unread_kind(file) if file is not None and not file.closed else ""
    return _unsupported(path, kind) if kind else _truncated(path)


def _unreadable(path: Path, error: OSError) -> SourceImageError:
    what = f"the file cannot be read: {error.strerror}"
    return _fault("unreadable", what, path, "check its permissions and its disk")


def _unsupported(path: Path, kind: str) -> SourceImageError:
    return _fault("unsupported", f"{kind} is not supported", path, "convert it to PNG or JPEG")


def _truncated(path: Path) -> SourceImageError:
    what = "the picture is damaged or incomplete"
    return _fault("truncated", what, path, "copy or save it again")


def _too_large(path: Path, found: str) -> SourceImageError:
    what = f"the picture is too large ({found} pixels, limit {MAX_SOURCE_PIXELS:,})"
    return _fault("too-large", what, path, "scale the picture down")
