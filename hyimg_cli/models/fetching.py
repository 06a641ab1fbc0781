"""Which files of a hub id are read: no pickles, code, variants or second forms of the weights."""

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading import checkpoint, hub
from hyimg_cli.loading.single_file import SUFFIXES
from hyimg_cli.models.family import Family
from hyimg_cli.spec.units import names_text

FamilyOf = Callable[[Path], Family]


def fetch(
    model: str,
    revision: str | None,
    family_of: FamilyOf,
    *,
    with_weights: bool = True,
    without: str = "",
) -> Path:
    """Return a hub id's folder in the cache, with the files that are read.

    Without `with_weights`, only small files: enough to check and to plan. `without`: a part whose
    weights are not fetched. What is here counts if the hub does not answer. Raises
    CheckpointError, or StorageError for a full disk.
    """
    here = hub.cached(model, revision)
    if not hub.may_fetch():
        if here is None:
            raise hub.not_here(model, revision)
        return here
    try:
        return _fetched(model, revision, family_of, with_weights, without, hub.cache_folder())
    except CheckpointError:
        if here is None or (with_weights and not _has_weights(here, family_of(here), without)):
            raise
        return here


@lru_cache(maxsize=16)  # asked many times in a run, which keeps the commit that it began with
def _fetched(
    model: str,
    revision: str | None,
    family_of: FamilyOf,
    with_weights: bool,
    without: str,
    _cache: Path,
) -> Path:
    listing = hub.listed(model, revision)
    folder = fetch_small(listing)
    if with_weights:
        names = weights(listing, folder, family_of(folder))
        hub.fetch(listing, [one for part in names.keys() - {without} for one in names[part]])
    return folder


def fetch_small(listing: hub.Listing, to: Path | None = None) -> Path:
    """Fetch the small files that are read into the cache, or to another folder; return it."""
    folder = hub.fetch_small(listing, listing.small(), to)
    if names := small(listing, folder):
        hub.fetch_small(listing, names, to)
    return folder


def small(listing: hub.Listing, folder: Path) -> list[str]:
    """Return the small files that are read; those at the top are in `folder`."""
    index = checkpoint.parts_index(folder)
    if index.is_file():
        found = checkpoint.read_json(index).items()
        parts = {name for name, one in found if isinstance(one, list)}
    else:
        parts = {name.partition("/")[0] for name in listing.files if name.count("/") == 1}
    return listing.small({"", *parts})


def weights(listing: hub.Listing, folder: Path, family: Family) -> dict[str, list[str]]:
    """Return the files of weights that are read, by the part that they belong to.

    `folder` has the small files. Raises CheckpointError for a checkpoint of another kind, or whose
    weights are not safetensors.
    """
    found = dict[str, list[str]]()
    for place, stem in family.weights(folder):
        part = "" if place == folder else f"{place.relative_to(folder).as_posix()}/"
        beside = {one.removeprefix(part) for one in listing.files if one.startswith(part)}
        names = checkpoint.weight_names(place, stem, beside)
        if not names or not beside.issuperset(names):
            raise _without_weights(listing, part, [*names, f"{stem}.safetensors"], beside)
        known = found.setdefault(part.rstrip("/") or "model", [])
        known += [f"{part}{one}" for one in names]
    return found


def write_skeleton(listing: hub.Listing, folder: Path, family_of: FamilyOf) -> dict[str, list[str]]:
    """Write a hub id's small files, and its weights' headers with holes for the numbers.

    Whatever asks about a checkpoint without loading it is then answered as for the whole one.
    Returns the `weights`.
    """
    fetch_small(listing, folder)
    found = weights(listing, folder, family_of(folder))
    for name in (one for names in found.values() for one in names):
        hub.copy_header(listing, name, folder / name)
    return found


def _without_weights(
    listing: hub.Listing, part: str, names: Iterable[str], there: Collection[str]
) -> CheckpointError:
    """Return the error of a hub id that lacks the first of these files of a part."""
    lacking = next(one for one in names if one not in there)
    hint = "use an edition of it with safetensors"
    if singles := sorted(one for one in there if one.endswith(SUFFIXES)):
        hint = f"fetch one of its files with: hyimg pull {listing.model} FILE; "
        hint += f"it has {names_text(singles)}"
    what = f"{listing.model} has no {part}{lacking}"
    return checkpoint.fault("no-weights", what, hint=hint)


def _has_weights(folder: Path, family: Family, without: str) -> bool:
    try:
        for place, stem in family.weights(folder):
            if place.name != without:
                checkpoint.weight_files(place, stem)
    except CheckpointError:
        return False
    return True
