"""What `hyimg pull` would fetch of a hub id, and whether this machine can run it, before it comes.

Small files and the headers of weights come into a temporary folder, with holes for the numbers. The
same code that reads a checkpoint and counts its memory reads this one.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hyimg_cli.doctor.check import Check
from hyimg_cli.doctor.models import image_memory, video_memory
from hyimg_cli.errors import CheckpointError, HyimgError, StorageError
from hyimg_cli.loading import hub
from hyimg_cli.loading.single_file import SUFFIXES, read_single_file
from hyimg_cli.models import fetching, licences, registry, releases
from hyimg_cli.models.architectures import architecture_of
from hyimg_cli.settings.run import JobKind, RunConfig
from hyimg_cli.spec.units import bytes_text, names_text


@dataclass(frozen=True)
class Offer:
    """The files of a hub id that hyimg reads.

    `parts`: bytes by part, and of the small files; `names`: of all these files; `missing`: those
    that are not in the cache yet, with their bytes; `left_out`: files that are not read. `memory`:
    whether one job fits on this machine. `example`: a command that uses the model. `file`: the one
    file of weights that was asked for.
    """

    listing: hub.Listing
    makes: JobKind
    licence: str
    parts: Mapping[str, int]
    names: Sequence[str]
    missing: Mapping[str, int]
    left_out: Mapping[str, int]
    memory: Check
    example: str
    file: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def to_fetch(self) -> int:
        return sum(self.missing.values())


def offer(model: str, revision: str | None, config: RunConfig) -> Offer:
    """Ask the hub what there is to fetch; nothing comes into its cache.

    Raises CheckpointError for a model that hyimg does not run, or that the hub does not give.
    """
    listing = hub.listed(model, revision)
    with TemporaryDirectory() as place:
        folder = Path(place) / model.rpartition("/")[2]
        weights = registry.write_skeleton(listing, folder)
        small = fetching.small(listing, folder)
        makes = registry.makes(folder)
        licence = licences.licence_in(folder)
        if example := registry.helps(folder):
            memory = Check("ok", "it makes nothing by itself")
        else:
            memory = _memory(folder, makes, config)
            example = _example(model, revision, str(folder), makes)
    if licence == licences.UNKNOWN:
        licence = licences.licence_of_release(model)
    names = [*small, *(one for files in weights.values() for one in files)]
    parts = {part: sum(listing.files[one] for one in files) for part, files in weights.items()}
    parts["configuration"] = sum(listing.files[one] for one in small)
    left_out = {name: size for name, size in listing.files.items() if name not in set(names)}
    missing = hub.missing(listing, names)
    return Offer(listing, makes, licence, parts, names, missing, left_out, memory, example)


def offer_file(model: str, file: str, revision: str | None) -> Offer:
    """Ask the hub for one file of a repository: a network that replaces a checkpoint's own.

    Raises CheckpointError for a file that is not a network of a model that hyimg runs.
    """
    listing = hub.listed(model, revision)
    if file not in listing.files:
        others = sorted(one for one in listing.files if one.endswith(SUFFIXES))
        what, hint = f"{model} has no file {file}", f"it has {names_text(others) or 'no weights'}"
        raise CheckpointError(what, hint=hint, code="checkpoint.missing-file")
    small = [name for name in ("README.md",) if name in listing.files]
    with TemporaryDirectory() as place:
        folder = Path(place)
        if small:
            hub.fetch_small(listing, small, folder)
        hub.copy_header(listing, file, copied := folder / Path(file).name)
        header = read_single_file(copied)
        network, licence = architecture_of(header), licences.licence_in(folder)
    size = sum(one.bytes for one in header.tensors.values())
    what = f"a transformer of {network.name}, {header.format}, with {bytes_text(size)} of weights"
    memory = Check("ok", f"{what}; the other parts are those of --components")
    # A name of the hub is that of its branch main.
    path = shlex.quote(str(hub.place_of(listing, file)) if revision else f"{model}/{file}")
    like = next(iter(releases.meant_by(file)), "FOLDER_OR_ID")
    example = f'hyimg generate photos --prompt "make it evening" --model {path} --components {like}'
    names = [*small, file]
    left_out = {name: size for name, size in listing.files.items() if name not in names}
    parts, missing = {"transformer": listing.files[file]}, hub.missing(listing, names)
    return Offer(
        listing, "pictures", licence, parts, names, missing, left_out, memory, example, file
    )


def refuse_full_disk(offered: Offer) -> None:
    """Raise StorageError if the disk of the hub's cache cannot hold what must come."""
    free = hub.free_bytes() + hub.partial_bytes(offered.listing.model)
    if offered.to_fetch > free:
        what = f"{bytes_text(offered.to_fetch)} must come, and {bytes_text(free)} are free"
        hint = "free some space, or set HF_HOME to a folder on a larger disk"
        raise StorageError(what, where=hub.cache_folder(), hint=hint, code="storage.full")


def _memory(folder: Path, makes: JobKind, config: RunConfig) -> Check:
    """Return the doctor's check of memory for the checkpoint in a folder."""
    names, check = {"video_model": str(folder)}, video_memory
    if makes == "pictures":
        names, check = {"model": str(folder)}, image_memory
    choice: Any = replace(config.model, revision=None)
    try:
        return check(replace(config, model=replace(choice, **names)))
    except HyimgError as error:
        return Check("failed", error.what, error.hint)


def _example(model: str, revision: str | None, folder: str, makes: JobKind) -> str:
    """Return a command that uses a model, whose files or headers are in `folder`."""
    more = f" --revision {revision}" if revision else ""
    if makes == "pictures":
        edits = registry.model_card(folder).most_images
        inputs = 'photos --prompt "make it evening"' if edits else "prompts.txt"
        return f"hyimg generate {inputs} --model {model}{more}"
    starts = registry.video_card(folder).needs_start
    inputs = 'photos --prompt "the camera moves in slowly"' if starts else "prompts.txt"
    task = "i2v" if starts else "t2v"
    return f"hyimg generate {inputs} --task {task} --video-model {model}{more}"
