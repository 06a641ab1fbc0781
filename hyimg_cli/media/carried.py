"""A source picture with everything that its result keeps: exact pixels and tags.

Colours under transparent pixels are kept too. Pictures that do not fit into 8 bits per channel are
refused: 16-bit, CMYK, float, and several frames; so are colours to which no edit can be converted.
"""

import io
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media import formats, masks
from hyimg_cli.media.colour_tags import colours_of
from hyimg_cli.media.deep import bits_of
from hyimg_cli.media.history import History, recorded_history
from hyimg_cli.media.images import (
    Picture,
    Pixels,
    Upright,
    marks_of,
    on_white,
    pixel_digest,
    read_upright,
    size_of,
    text_of,
)
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.media.pages import pages_of
from hyimg_cli.media.source_files import bytes_of_source, decoder_faults, open_picture
from hyimg_cli.media.strips import in_strips, pixels_of, rows_of, strips
from hyimg_cli.media.tags import Tags, tags_of
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Encoding, Size
from hyimg_cli.spec.options import Box, KeepOutside

# Modes with 8 bits per channel of RGB, or grey.
_EXACT = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX"}
# Formats whose compression changes levels; a WebP or a TIFF may do so.
_LOSSY = {"JPEG", "MPO", "JPEG2000", "AVIF", "HEIF"}
# What is white in a mask, and which parts of it allow edits: by what a region keeps, and by which
# alpha decides.
_WHITE = {"outside": "where edits are allowed", "inside": "where the source stays"}
_PARTS = {
    "": ("white", "black"),
    "transparent": ("transparent", "opaque"),
    "opaque": ("opaque", "transparent"),
}
# Deviation from white in a redraw that is only noise.
_CLEAR = 6


@dataclass(frozen=True)
class Carried:
    """A source picture, upright.

    `own` [H, W] grey, [H, W, 3] or [H, W, 4]: the file's numbers, of the colours that `tags` name.
    `digest`: sha256 of the file. `text`: its metadata.
    """

    own: Pixels
    digest: str
    tags: Tags
    text: PictureText = field(default_factory=PictureText)

    @property
    def pixels(self) -> Pixels:
        """Return the picture [H, W, 3] in sRGB on white, for a model; `own` itself if it is that.

        Made anew each time: a picture of 100 megapixels takes 300 MB.
        """
        own, space = self.own, self.tags.space
        if space is None:
            return on_white(own)

        def part_of(rows: slice) -> Pixels:
            return np.asarray(space.to_srgb(Image.fromarray(own[rows])))

        return on_white(in_strips(own.shape[0], own.shape[1], part_of))

    @property
    def numbers(self) -> Pixels:
        """Return the file's numbers as colours [H, W, 3], without alpha."""
        own = self.own if self.own.ndim == 3 else np.repeat(self.own[..., None], 3, axis=2)
        return own[..., :3]

    def with_edit(self, result: Pixels, numbers: Pixels, matte: Pixels) -> Pixels:
        """Return the result in the source's channels; outside the matte, the file's own numbers.

        `result` [H, W, 3]: in sRGB on white. `numbers`: the same in the source's colours.
        """
        if self.own.ndim == 2:
            is_grey = bool((result[..., :1] == result).all())
            return numbers[..., 1] if is_grey else numbers
        if self.own.shape[2] == 3:
            return numbers
        edited, space = self.own.copy(), self.tags.space
        # One row at a time, to keep temporary arrays small.
        rows = zip(edited, numbers, result, matte > 0, strict=True)
        for row, own_row, drawn_row, is_edit in rows:
            np.copyto(row[:, :3], own_row, where=is_edit[:, None])
            # In transparent parts, colour is un-mixed from the white that it was drawn on: with the
            # smallest alpha that can give this on white, or the source's if that is larger.
            at = is_edit & (row[:, 3] < 255)
            drawn = drawn_row[at]
            ink = 255 - drawn.min(axis=1)
            alpha = np.maximum(row[at, 3], np.where(ink > _CLEAR, ink, 0))[:, None]
            part = np.maximum(alpha, 1).astype(np.float32) / 255
            colour = np.clip(np.round((drawn - 255 * (1 - part)) / part), 0, 255).astype(np.uint8)
            if space is not None and at.any():
                (colour,) = space.from_srgb(colour[None])
            row[at] = np.hstack([colour, alpha])
        # As for a source: an alpha channel that is opaque everywhere is dropped, as WebP does.
        return edited[..., :3] if edited[..., 3].min() == 255 else edited

    def encode(self, pixels: Pixels, encoding: Encoding, text: PictureText | None) -> bytes:
        """Return a result's lossless file with metadata `text`; without it, only the colours'."""
        tags = self.tags if text is not None else self.tags.of_colours()
        return formats.encode(pixels, encoding, text, tags=tags, fast=True)

    def count_differing(self, data: bytes, matte: Pixels) -> int:
        """Count the pixels outside the matte that differ in a result's decoded file."""
        count = 0
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            for rows in strips(image.height, image.width):
                found, own = rows_of(image, rows), self.own[rows]
                if found.mode == "RGB" and own.shape[2:] == (3,):
                    apart = np.asarray(found) != own
                    # A reduction over such a short axis is slow.
                    differs = apart[..., 0] | apart[..., 1] | apart[..., 2]
                else:
                    # Four bytes at once.
                    both = found.convert("RGBA"), Image.fromarray(own).convert("RGBA")
                    first, second = (np.asarray(one).view(np.uint32)[..., 0] for one in both)
                    differs = first != second
                count += int(np.count_nonzero(differs & (matte[rows] == 0)))
        return count


def read_carried(path: Path, *, keep_gps: bool = False) -> Carried:
    """Read a source as it is.

    Raises SourceImageError, `source.source-depth` if no result could be equal to it.
    """
    data = bytes_of_source(path)
    with open_picture(path, data) as image:
        if fault := _unfit(path, image):
            raise fault
        tags = tags_of(image, keep_gps=keep_gps)
        own = pixels_of(read_upright(path, image).own)
        with decoder_faults(path, image.fp):
            text = formats.text_in(image)
    return Carried(own, digest.of_bytes(data), tags, text)


def own_picture(path: Path) -> tuple[Picture, bool]:
    """Return a picture upright in its own channels, and whether 8 bits hold all of it.

    Raises SourceImageError.
    """
    upright, is_exact = own_upright(path)
    return upright.own, is_exact


def own_upright(path: Path) -> tuple[Upright, bool]:
    """Return the same as `own_picture`, with what the numbers mean."""
    with open_picture(path) as image:
        is_exact = not _beyond_8_bits(image)
        return read_upright(path, image), is_exact


def history_of_file(path: Path) -> tuple[History, bool] | None:
    """Return the recorded history of a picture, and whether its pixels are still those.

    None without one. Raises SourceImageError.
    """
    found = recorded_history(path, text_of(path), size_of(str(path)))
    if found is None:
        return None
    return found, pixel_digest(own_picture(path)[0]) == found.pixel_sha256


def depth_fault(path: Path) -> SourceImageError | None:
    """Return why no result could equal a picture, by its header; None if one could."""
    with suppress(SourceImageError), open_picture(path) as image:
        return _unfit(path, image)
    return None


def region_of(outside: KeepOutside, size: Size) -> Pixels | None:
    """Return the user's region [H, W], above 0 where an edit may be, or None.

    Levels between 0 and 255 are those by which a soft mask blends; the region itself is above 127.
    Raises SourceImageError.
    """
    check_region(outside, size)
    if outside.boxes:
        levels = np.zeros((size.height, size.width), np.uint8)
        for left, top, right, bottom in outside.boxes:
            levels[top:bottom, left:right] = 255
    elif outside.mask:
        levels = masks.resized(_mask_levels(outside), size)
    else:
        return None
    return levels if outside.region_keeps == "outside" else 255 - levels


def region_facts(outside: KeepOutside, given: Pixels) -> dict[str, Any]:
    """Return what an edit's record says of its region [H, W]: its size, and how a mask was read."""
    facts: dict[str, Any] = {"region_area": masks.share_of(given)}
    if blended := int(masks.counts_of(given)[1:255].sum()):
        facts["region_blends"] = round(blended / given.size, 5)
    if outside.mask and (own := size_of(outside.mask)) != Size(*given.shape[:2]):
        facts["region_mask"] = [own.width, own.height]
    return facts


def region_parts(outside: KeepOutside, size: Size) -> tuple[Box, ...]:
    """Return boxes of the parts of the user's region that are apart; empty without a region.

    A mask is read once until its file changes. Raises SourceImageError as `region_of` does.
    """
    is_found = outside.mask or outside.region_keeps == "inside"
    if is_found or len(outside.boxes) > masks.MOST_PARTS or masks.do_overlap(outside.boxes):
        return _found_parts(outside, size, marks_of(outside.mask) if outside.mask else (0, 0))
    check_region(outside, size)
    return outside.boxes


@lru_cache(1 << 12)
def _found_parts(outside: KeepOutside, size: Size, marks: tuple[int, int]) -> tuple[Box, ...]:
    levels = region_of(outside, size)
    return () if levels is None else masks.parts_of(levels)


def check_region(outside: KeepOutside, size: Size) -> None:
    """Raise SourceImageError (`source.region`) if a region does not fit a source of this size."""
    what, white = "", _WHITE[outside.region_keeps]
    if outside.boxes:
        hint = "give LEFT,TOP,RIGHT,BOTTOM in pixels of the source"
        if any(box[2] > size.width or box[3] > size.height for box in outside.boxes):
            what = f"the region {outside.region} extends beyond the source ({size})"
        elif outside.region_keeps == "inside" and (0, 0, size.width, size.height) in outside.boxes:
            what, hint = f"the region {outside.region} keeps the whole source", "give a smaller box"
    elif outside.mask and not masks.are_alike(own := size_of(outside.mask), size):
        what = f"the mask has another size than the source ({own}, expected {size})"
        hint = f"give a mask of the source's size or shape, upright, white {white}"
        if masks.are_alike(Size(own.width, own.height), size):
            hint = f"turn the mask: with its EXIF orientation, the source is upright at {size}"
    if what:
        raise masks.fault(what, hint, Path(outside.region))


def _mask_levels(outside: KeepOutside) -> Pixels:
    """Return the levels of a region's mask at its own size. Raises SourceImageError."""
    path, keeps = Path(outside.mask), outside.region_keeps
    data = bytes_of_source(path)
    with open_picture(path, data) as image:
        is_lossy, mask = _is_lossy(image, data), read_upright(path, image).own
    levels = masks.levels_of(mask, outside.edits_where, path, _WHITE[keeps])
    if not ((levels > 127) == (keeps == "outside")).any():
        parts = _PARTS[outside.edits_where][keeps == "inside"]
        what = f"no pixel of the mask is {parts}"
        if parts == "white":
            what = f"the mask is black (brightest level {levels.max()} of 255)"
        elif keeps == "inside":
            what += ", so it keeps the whole source"
        raise masks.fault(what, f"make it {parts} where edits are allowed", path)
    return masks.to_blend(levels, is_lossy=is_lossy)


def _is_lossy(image: ImageFile.ImageFile, data: bytes) -> bool:
    """Return True if an opened file's compression changes levels."""
    if image.format == "WEBP":
        return b"VP8L" not in data  # the name of its part with pixels without loss
    return image.format in _LOSSY or "jpeg" in str(image.info.get("compression"))


def _unfit(path: Path, image: ImageFile.ImageFile) -> SourceImageError | None:
    """Return the error if no result could have an opened picture's numbers, else None."""
    space, hint = colours_of(image).space, "convert it to 8-bit RGB, or remove keep_outside"
    if has := _beyond_8_bits(image):
        what = f"the source has {has}, so a result in 8-bit RGB cannot be equal to it"
    elif space is not None and not space.can_return:
        what = f"the source is in {space.name}, to which an edit cannot be converted"
        hint = "convert it to sRGB, or remove keep_outside"
    else:
        return None
    return SourceImageError(what, where=path, hint=hint, code="source.source-depth")


def _beyond_8_bits(image: ImageFile.ImageFile) -> str:
    """Return what an opened picture has that 8-bit RGB has not; empty if it has nothing more."""
    count, bits = pages_of(image).count, bits_of(image)
    if count > 1:
        return f"{count} frames"
    if bits > 8:
        return f"{bits} bits per channel"
    if image.mode not in _EXACT:
        return "floating-point pixels" if image.mode == "F" else f"{image.mode} pixels"
    return ""
