"""Masks of a folder, and which picture each belongs to, by their names."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

from hyimg_cli.errors import HyimgError, ManifestError, SourceImageError
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.sources import Sources, is_picture_name
from hyimg_cli.settings.paths import REGION
from hyimg_cli.spec.options import KeepOutside, Region
from hyimg_cli.spec.units import counted, names_text

# What a mask's name may add to its picture's.
MARKS = (".mask", "_mask", "-mask")
_NAMED = 3


class MaskFolder:
    """The masks that a region's folder holds.

    The mask of `cat.jpg` is `cat.png`, `cat.mask.png`, `cat_mask.png` or `cat-mask.png`, with any
    picture's suffix, or the same after the whole name: `cat.jpg.png`. A picture's subfolder must be
    the mask's if the folder has it; else masks are in the folder itself.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # The picture that has each mask.
        self._owners: dict[str, str] = {}
        self._in = cache(_names_in)
        self._of = cache(self._folder_of)

    def mask_of(self, picture: str) -> str:
        """Return the path of a picture's mask; empty if it has none.

        Raises SourceImageError, `source.region`, if it has several, or another picture has it.
        """
        above, name = os.path.split(os.path.abspath(picture))
        place, stem = self._of(above), os.path.splitext(name)[0]
        found = self._named(place, name) or self._named(place, stem)
        if os.path.abspath(place) == above:  # next to its masks, a picture is not one itself
            found = [one for one in found if os.path.splitext(one)[0] != stem]
        masks = [os.path.join(place, one) for one in found]
        if not masks:
            return ""
        if len(masks) > 1:
            what = f"{picture} has {len(masks)} masks: {names_text(masks, _NAMED)}"
            raise self._fault(what, f"keep one of them, or name it {name}.png")
        itself = os.path.join(above, name)
        if (owner := self._owners.setdefault(masks[0], itself)) != itself:
            what = f"{masks[0]} is named like two pictures: {os.path.relpath(owner)} and {picture}"
            hint = f"name their masks {os.path.basename(owner)}.png and {name}.png"
            if os.path.basename(owner) == name:
                hint = "put the masks into the same subfolders as the pictures"
            raise self._fault(what, hint)
        return masks[0]

    def needed_for(self, picture: str) -> str:
        """Return the path of a picture's mask. Raises SourceImageError also if it has none."""
        mask = self.mask_of(picture)
        if not mask:
            raise self.lacks([picture], f"{picture} has no mask in {self.folder}")
        return mask

    def lacks(self, pictures: Sequence[str], what: str) -> SourceImageError:
        """Return the error that these pictures have no mask, which `what` says."""
        above, name = os.path.split(os.path.abspath(pictures[0]))
        stem = os.path.splitext(name)[0]
        names = [f"{stem}.png", f"{stem}.mask.png", f"{stem}_mask.png"]
        if os.path.abspath(self._of(above)) == above:
            del names[0]
        return self._fault(what, f"name it {', '.join(names[:-1])} or {names[-1]}")

    def unused(self) -> list[str]:
        """Return the pictures of the folder that are no picture's mask so far."""
        places = sorted(place for place, _, _ in os.walk(self.folder))
        named = (
            (place, one) for place in places for found in self._in(place).values() for one in found
        )
        return [path for one in named if (path := os.path.join(*one)) not in self._owners]

    def _named(self, place: str, name: str) -> list[str]:
        """Return the masks of a picture's name, if there are none: of its name in other letters."""
        names, wanted = self._in(place), unicodedata.normalize("NFC", name)
        own = [one for key in ("", *MARKS) for one in names.get(wanted + key, ())]
        if own:
            return own
        folded = {wanted.casefold() + key for key in ("", *MARKS)}
        return [one for key, found in names.items() if key.casefold() in folded for one in found]

    def _folder_of(self, above: str) -> str:
        """Return the folder with the masks of the pictures in another: the deepest of its name."""
        parts = Path(above).parts[1:]
        places = (os.path.join(self.folder, *parts[first:]) for first in range(len(parts)))
        return next(filter(os.path.isdir, places), self.folder)

    def _fault(self, what: str, hint: str) -> SourceImageError:
        return SourceImageError(what, where=self.folder, hint=hint, code="source.region")


def folder_in(region: Region) -> str:
    """Return the folder of masks that a region names; empty for a mask, a box or no region."""
    path = KeepOutside(region=region).mask
    return path if path and os.path.isdir(path) else ""


def with_mask(region: Region, mask: str) -> Region:
    """Return a region of one mask of its folder, read in the same way."""
    return Region(REGION.map_paths(region, lambda folder: mask))


def with_regions(
    found: Sources, region: Region, *, keeps_outside: bool, may_lack: bool = False
) -> Sources:
    """Return the pictures of a command line with their regions, and without the masks among them.

    A region that is a folder has each picture's mask. Without a region, the masks next to the
    pictures are used if `keeps_outside`. Raises ManifestError if a picture lacks a mask, or its
    mask is not clear; if it `may_lack` one, the folder stays its region.
    """
    if not (folder := folder_in(region)):
        regions = _of_own_masks(found) if keeps_outside and not region else {}
        remedy = "" if region else " (--keep-outside uses them)"
        return replace(
            found, regions=regions, notes=(*found.notes, *_notes(found, regions, remedy))
        )
    masks, faults, lacking = MaskFolder(folder), list[HyimgError](), list[str]()
    within, base = (os.path.join(os.path.abspath(one), "") for one in (folder, found.base))
    is_below = within.startswith(base) and within != base
    files = {
        name: path
        for name, path in found.files.items()
        if not (is_below and os.path.abspath(path).startswith(within))
    }
    regions = dict.fromkeys(files, region)
    for name, path in files.items():
        try:
            if mask := masks.mask_of(str(path)):
                regions[name] = with_mask(region, mask)
            else:
                lacking.append(str(path))
        except SourceImageError as error:
            faults.append(fault("region", error.what, error.where, error.hint))
    used = {os.path.abspath(KeepOutside(region=one).mask) for one in regions.values()}
    files = {name: path for name, path in files.items() if os.path.abspath(path) not in used}
    if lacking := [path for path in lacking if os.path.abspath(path) not in used]:
        what = f"{len(lacking)} of {counted(len(files), 'picture')} without a mask: "
        lack = masks.lacks(lacking, what + names_text(lacking, _NAMED))
        faults.append(fault("region", lack.what, lack.where, lack.hint))
    if faults and not may_lack:
        raise ManifestError(faults)
    notes = [*found.notes, *_notes(found, {}, "", used)]
    skipped = {Path(one) for one in (*found.files.values(), *chain(*found.masks.values()))}
    if unused := [one for one in masks.unused() if Path(one) not in skipped]:
        what = f"{counted(len(unused), 'mask')} without a picture"
        notes.append(f"skipped {what}: {names_text(unused, _NAMED)}")
    return replace(found, files=files, regions=regions, notes=tuple(notes))


def _of_own_masks(found: Sources) -> dict[str, Region]:
    """Return the regions of pictures by the masks next to them. Raises ManifestError."""
    owners: dict[Path, list[str]] = defaultdict(list)
    faults: list[HyimgError] = []
    for name, masks in found.masks.items():
        owners[masks[0]].append(str(found.files[name]))
        if len(masks) > 1:
            what = f"{found.files[name]} has {len(masks)} masks: {names_text([*map(str, masks)])}"
            faults.append(fault("region", what, masks[0].parent, "keep one of them"))
    for mask, pictures in owners.items():
        if len(pictures) > 1:
            what = f"{mask} is named like {len(pictures)} pictures: {names_text(pictures)}"
            hint = "put the masks into a folder, named like cat.jpg.png, and give it as --region"
            faults.append(fault("region", what, mask.parent, hint))
    if faults:
        raise ManifestError(faults)
    return {name: Region(REGION.as_path(str(masks[0]))) for name, masks in found.masks.items()}


def _notes(
    found: Sources,
    regions: Mapping[str, Region],
    remedy: str,
    used: Collection[str] = (),
) -> Iterator[str]:
    """Yield what became of the masks next to pictures.

    `remedy`: what would use them. `used`: those that are a folder's masks, as absolute paths.
    """
    own = {str(one) for one in chain(*found.masks.values())}
    masks = sorted(one for one in own if os.path.abspath(one) not in used)
    if masks and regions:
        of = counted(len(found.files), "picture")
        yield f"{len(regions)} of {of} limited by a mask next to it: {names_text(masks, _NAMED)}"
    elif masks:
        what = f"{counted(len(masks), 'mask')} next to pictures{remedy}"
        yield f"skipped {what}: {names_text(masks, _NAMED)}"


def _names_in(place: str) -> dict[str, list[str]]:
    """Return the names of pictures in a folder by their names without suffix, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(_listed(place)):
        stem, _ = os.path.splitext(name)
        found[unicodedata.normalize("NFC", stem)].append(name)
    return found


def _listed(place: str) -> Iterator[str]:
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if is_picture_name(entry.name) and not entry.name.startswith("."):
                    yield entry.name
    except OSError:  # then its pictures have no mask
        return
