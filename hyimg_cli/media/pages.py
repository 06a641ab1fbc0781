"""Further pictures in a picture's file: frames and pages, or versions of the first picture.

A JPEG may have a preview, a gain map (the light of an HDR screen) or another view of its picture
after it (CIPA DC-007, "MPO"), a TIFF smaller copies of its first page. The first picture alone is
what every program shows, so it is the source.
"""

from contextlib import suppress
from dataclasses import dataclass

from PIL import ImageFile, TiffImagePlugin

from hyimg_cli.spec.units import counted

_GAIN_MAPS = (b"hdrgm:Version", b"urn:iso:std:iso:ts:21496:-1")
_MPO_ENTRIES = 0xB002
# TIFF's tags for a page that is a smaller copy, and their values.
_NEW_SUBFILE_TYPE, _IS_REDUCED = 0x00FE, 1
_OLD_SUBFILE_TYPE, _REDUCED = 0x00FF, 2


@dataclass(frozen=True)
class Pages:
    """`count`: frames or pages in their own right; `note`: what reading the first leaves out."""

    count: int
    note: str


def pages_of(image: ImageFile.ImageFile) -> Pages:
    """Return what an opened picture's file has. Call it before the picture is decoded."""
    count = int(getattr(image, "n_frames", 1))
    if image.format in ("MPO", "JPEG"):
        if any(name in data for _, data in getattr(image, "applist", ()) for name in _GAIN_MAPS):
            return Pages(1, "gain map left out")
        return Pages(1, _left_out_of_mpo(image, count - 1) if count > 1 else "")
    if count > 1 and image.format == "TIFF" and _are_copies(image, count):
        return Pages(1, f"{counted(count - 1, 'smaller page')} left out")
    return Pages(count, f"first of {count} frames" if count > 1 else "")


def _left_out_of_mpo(image: ImageFile.ImageFile, further: int) -> str:
    entries = getattr(image, "mpinfo", {}).get(_MPO_ENTRIES, ())[1:]
    kinds = {str(entry["Attribute"]["MPType"]) for entry in entries}
    if all(kind.startswith("Large Thumbnail") for kind in kinds):
        return "preview left out"
    if kinds == {"Undefined"}:
        return "preview or gain map left out"
    return f"{counted(further, 'further view')} left out"


def _are_copies(image: ImageFile.ImageFile, count: int) -> bool:
    """Return whether all pages of a TIFF but the first are smaller copies."""
    assert image.fp is not None, "it was opened just now"
    with suppress(Exception):  # Pillow reads damaged directories with errors of any kind
        # NOTE: another object, because seeking would undo changes of `image`. It is not closed,
        # because that would close the file.
        image.fp.seek(0)
        twin = TiffImagePlugin.TiffImageFile(image.fp)
        return [_is_reduced(twin, page) for page in range(count)] == [False] + [True] * (count - 1)
    return False


def _is_reduced(image: TiffImagePlugin.TiffImageFile, page: int) -> bool:
    image.seek(page)
    kind, old_kind = (image.tag_v2.get(tag, 0) for tag in (_NEW_SUBFILE_TYPE, _OLD_SUBFILE_TYPE))
    return bool(kind & _IS_REDUCED) or old_kind == _REDUCED
