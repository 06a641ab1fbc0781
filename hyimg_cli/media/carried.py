"""A source picture with everything that its result keeps: exact pixels, profile and EXIF.

Colours under transparent pixels are kept too. Pictures that do not fit into 8 bits per channel are
refused: 16-bit, CMYK, float, and several frames.
"""

import io
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media import formats, masks
from hyimg_cli.media.deep import bits_of
from hyimg_cli.media.images import Picture, Pixels, on_white, read_upright, size_of
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.source_files import bytes_of_source, open_picture
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Encoding, Size
from hyimg_cli.spec.options import KeepOutside

# Modes with 8 bits per channel of RGB, or grey.
_EXACT = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX"}
_ORIENTATION, _EXIF, _GPS = ExifTags.Base.Orientation, ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo
# Tags about the old pixels, or unreadable in a new file: sizes, offsets, maker's notes.
_OLD = {
    _ORIENTATION, _EXIF, _GPS, ExifTags.IFD.Interop, ExifTags.IFD.IFD1, ExifTags.Base.MakerNote,
    *range(0x0100, 0x0104), 0x0106, 0x0111, 0x0115, 0x0116, 0x0117, 0x011C, 0x013D, 0x0142, 0x0143,
    0x0144, 0x0145, 0x014A, 0x0152, 0x0153, 0x0201, 0x0202, 0x02BC, 0x8649, 0x8773, 0xC4A5,
}  # fmt: skip
# Deviation from white in a redraw that is only noise.
_CLEAR = 6


@dataclass(frozen=True)
class Carried:
    """A source picture, upright.

    `own` [H, W] grey, [H, W, 3] or [H, W, 4]: the file's numbers. `pixels`: the same on white, for
    a model. `exif`: without orientation, preview and (by default) place.
    """

    pixels: Pixels
    own: Pixels
    digest: str
    icc: bytes | None
    exif: bytes

    def with_edit(self, result: Pixels, matte: Pixels) -> Pixels:
        """Return the result in the source's channels; outside the matte, the file's own numbers."""
        if self.own.ndim == 2:
            is_grey = bool((result[..., :1] == result).all())
            return result[..., 0] if is_grey else result
        if self.own.shape[2] == 3:
            return result
        edited = self.own.copy()
        # One row at a time, to keep temporary arrays small.
        for row, drawn_row, is_edit in zip(edited, result, matte > 0, strict=True):
            np.copyto(row[:, :3], drawn_row, where=is_edit[:, None])
            # In transparent parts, colour is un-mixed from the white that it was drawn on: with the
            # smallest alpha that can give this on white, or the source's if that is larger.
            at = is_edit & (row[:, 3] < 255)
            drawn = drawn_row[at]
            ink = 255 - drawn.min(axis=1)
            alpha = np.maximum(row[at, 3], np.where(ink > _CLEAR, ink, 0))[:, None]
            part = np.maximum(alpha, 1).astype(np.float32) / 255
            colour = np.clip(np.round((drawn - 255 * (1 - part)) / part), 0, 255)
            row[at] = np.hstack([colour.astype(np.uint8), alpha])
        # As for a source: an alpha channel that is opaque everywhere is dropped, as WebP does.
        return edited[..., :3] if edited[..., 3].min() == 255 else edited

    def encode(self, pixels: Pixels, encoding: Encoding, text: PictureText | None) -> bytes:
        """Return a result's lossless file with metadata `text`; without it, only the profile."""
        # A grey profile does not fit colours.
        icc = self.icc if pixels.ndim == self.own.ndim or self.own.ndim != 2 else None
        exif = b"" if text is None else self.exif
        return formats.encode(pixels, encoding, text, icc=icc, exif=exif, compress_level=3)

    def count_differing(self, data: bytes, matte: Pixels) -> int:
        """Count the pixels outside the matte that differ in a result's decoded file."""
        with Image.open(io.BytesIO(data)) as image:
            found, own = (
                np.asarray(one.convert("RGBA")) for one in (image, Image.fromarray(self.own))
            )
        return int(((found != own).any(axis=2) & (matte == 0)).sum())


def read_carried(path: Path, *, keep_gps: bool = False) -> Carried:
    """Read a source as it is.

    Raises SourceImageError, `source.source-depth` if no result could be equal to it.
    """
    data = bytes_of_source(path)
    with open_picture(path, data) as image:
        if fault := _depth_fault(path, image):
            raise fault
        own = np.asarray(read_upright(path, image)[0])
        icc, exif = image.info.get("icc_profile"), _carry_exif(image, keep_gps=keep_gps)
    return Carried(on_white(own), own, digest.of_bytes(data), icc, exif)


def own_picture(path: Path) -> tuple[Picture, bool]:
    """Return a picture upright in its own channels, and whether 8 bits hold all of it.

    Raises SourceImageError.
    """
    with open_picture(path) as image:
        is_exact = _depth_fault(path, image) is None
        return read_upright(path, image)[0], is_exact


def depth_fault(path: Path) -> SourceImageError | None:
    """Return why no result could equal a picture, by its header; None if one could."""
    with suppress(SourceImageError), open_picture(path) as image:
        return _depth_fault(path, image)
    return None


def region_of(outside: KeepOutside, size: Size) -> Pixels | None:
    """Return the user's region [H, W], white where an edit may be, or None.

    Raises SourceImageError.
    """
    check_region(outside, size)
    if outside.box is not None:
        left, top, right, bottom = outside.box
        levels = np.zeros((size.height, size.width), np.uint8)
        levels[top:bottom, left:right] = 255
        return levels
    if not outside.mask:
        return None
    path = Path(outside.mask)
    return masks.levels_of(own_picture(path)[0], outside.edits_where, path)


def check_region(outside: KeepOutside, size: Size) -> None:
    """Raise SourceImageError (`source.region`) if a region exceeds a source of this size."""
    what = ""
    if outside.box is not None:
        hint = "give LEFT,TOP,RIGHT,BOTTOM in pixels of the source"
        if outside.box[2] > size.width or outside.box[3] > size.height:
            what = f"the region {outside.region} extends beyond the source ({size})"
    elif outside.mask and (own := size_of(outside.mask)) != size:
        what = f"the mask has another size than the source ({own}, expected {size})"
        hint = "give a mask of the source's size, upright, white where edits are allowed"
    if what:
        raise SourceImageError(what, where=outside.region, hint=hint, code="source.region")


def _depth_fault(path: Path, image: ImageFile.ImageFile) -> SourceImageError | None:
    """Return the error if 8-bit RGB would lose the picture's numbers, else None."""
    frames, bits = getattr(image, "n_frames", 1), bits_of(image)
    if frames > 1:
        why = f"the source has {frames} frames"
    elif bits > 8:
        why = f"the source has {bits} bits per channel"
    elif image.mode in _EXACT:
        return None
    else:
        why = f"the source has {'floating-point' if image.mode == 'F' else image.mode} pixels"
    what = f"{why}, so a result in 8-bit RGB cannot be equal to it"
    hint = "convert it to 8-bit RGB, or remove keep_outside"
    return SourceImageError(what, where=path, hint=hint, code="source.source-depth")


def _carry_exif(image: Image.Image, *, keep_gps: bool) -> bytes:
    """Return the EXIF of upright pixels, without tags that cannot be read."""
    kept = Image.Exif()
    with suppress(Exception):
        # NOTE: `getexif` returns the image's own object: deleting the orientation there would lose
        # it.
        own = image.getexif()
        kept.update({tag: value for tag, value in own.items() if tag not in _OLD})
        inner = {_EXIF: own.get_ifd(_EXIF), _GPS: own.get_ifd(_GPS) if keep_gps else {}}
        inner[_EXIF] = {tag: value for tag, value in inner[_EXIF].items() if tag not in _OLD}
        for part, fields in inner.items():
            if fields:  # an empty part would be written too
                kept.get_ifd(part).update(fields)
        return kept.tobytes() if kept or any(inner.values()) else b""
    return b""
