"""What a result keeps of its source's file: the meaning of its numbers, its EXIF and resolution."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from PIL import ExifTags, Image, ImageFile

from hyimg_cli.media.colour import ColourSpace
from hyimg_cli.media.colour_tags import Carrier, colours_of, exif_of, is_adobe_rgb, png_chunks

_ORIENTATION, _EXIF, _GPS = ExifTags.Base.Orientation, ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo
_INTEROP, _COLOUR_SPACE = ExifTags.IFD.Interop, ExifTags.Base.ColorSpace
# Tags about the old pixels, or unreadable in a new file: sizes, offsets, maker's notes.
_OLD = {
    _ORIENTATION, _EXIF, _GPS, _INTEROP, ExifTags.IFD.IFD1, ExifTags.Base.MakerNote,
    *range(0x0100, 0x0104), 0x0106, 0x0111, 0x0115, 0x0116, 0x0117, 0x011C, 0x013D, 0x0142, 0x0143,
    0x0144, 0x0145, 0x014A, 0x0152, 0x0153, 0x0201, 0x0202, 0x02BC, 0x8649, 0x8773, 0xC4A5,
}  # fmt: skip
_DPI = (1.0, 1e6)
# Pillow's value for a JPEG that names no resolution.
_NO_DPI = (72.0, 72.0)


@dataclass(frozen=True)
class Tags:
    """Tags for a file with the numbers of another one.

    `space`: the colours of the numbers, None for sRGB; `carrier`: the tag that names them. `exif`:
    without orientation, preview and (by default) place. `chunks`: of a PNG, by name. `dpi`: pixels
    per inch, across and down.
    """

    icc: bytes | None = None
    exif: bytes = b""
    chunks: Mapping[bytes, bytes] = field(default_factory=dict)
    dpi: tuple[float, float] | None = None
    space: ColourSpace | None = None
    carrier: Carrier = ""

    def profile(self, kind: str, *, is_grey: bool) -> bytes | None:
        """Return the ICC profile of a file of this kind, `png` or `webp`, with these numbers."""
        space, profile = self.space, self.icc
        is_named = self.carrier in ("icc", "exif") or (self.carrier == "png" and kind == "png")
        if space is not None and not is_named:
            profile = space.grey if is_grey and space.grey else space.rgb
        if profile and profile[16:20] == b"GRAY" and not is_grey:
            # A grey profile does not fit colours.
            profile = space.rgb if space is not None else None
        return profile

    def of_colours(self) -> "Tags":
        """Return the tags without the EXIF that does not name the colours."""
        exif = Image.Exif()
        exif.load(self.exif)
        if not is_adobe_rgb(exif):
            return replace(self, exif=b"")
        kept = Image.Exif()
        kept.get_ifd(_EXIF).update(_colour_fields(exif))
        return replace(self, exif=kept.tobytes())


def tags_of(image: ImageFile.ImageFile, *, keep_gps: bool = False) -> Tags:
    """Return what a result keeps of an opened picture. Call it before the picture is decoded."""
    colours, exif = colours_of(image), _carried(exif_of(image), keep_gps=keep_gps)
    icc = image.info.get("icc_profile")
    return Tags(icc, exif, png_chunks(image), _dpi_of(image), colours.space, colours.carrier)


def _dpi_of(image: Image.Image) -> tuple[float, float] | None:
    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
        across, down = (float(value) for value in image.info["dpi"])
        is_unnamed = image.format in ("JPEG", "MPO") and (across, down) == _NO_DPI
        least, most = _DPI
        if least <= across <= most and least <= down <= most and not is_unnamed:
            return across, down
    return None


def _colour_fields(exif: Image.Exif) -> dict[int, object]:
    """Return the fields that name DCF's optional colour space, Adobe RGB."""
    space = exif.get_ifd(_EXIF).get(_COLOUR_SPACE)
    fields: dict[int, object] = {_INTEROP: dict(exif.get_ifd(_INTEROP))}
    return fields if space is None else {_COLOUR_SPACE: space} | fields


def _carried(own: Image.Exif, *, keep_gps: bool) -> bytes:
    """Return the EXIF of upright pixels, without tags that cannot be read."""
    kept = Image.Exif()
    with suppress(Exception):
        # NOTE: `own` is the image's own object: deleting the orientation there would lose it.
        kept.update({tag: value for tag, value in own.items() if tag not in _OLD})
        inner = {_EXIF: own.get_ifd(_EXIF), _GPS: own.get_ifd(_GPS) if keep_gps else {}}
        inner[_EXIF] = {tag: value for tag, value in inner[_EXIF].items() if tag not in _OLD}
        if is_adobe_rgb(own):
            inner[_EXIF] |= _colour_fields(own)
        for part, fields in inner.items():
            if fields:  # an empty part would be written too
                kept.get_ifd(part).update(fields)
        return kept.tobytes() if kept or any(inner.values()) else b""
    return b""
