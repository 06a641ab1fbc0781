"""Find the pictures that a command line names: files, folders and patterns."""

import glob
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

from hyimg_cli.addresses import scheme_of
from hyimg_cli.errors import HyimgError, ManifestError
from hyimg_cli.manifest.line import fault
from hyimg_cli.media.kinds import RAW_HINT, RAW_SUFFIXES, SUFFIXES, UNREAD_SUFFIXES
from hyimg_cli.mistyped import nearest_path
from hyimg_cli.settings.name_template import natural_order
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.job import EDIT_SUFFIXES
from hyimg_cli.spec.options import Region
from hyimg_cli.spec.units import names_text

_OF_A_RUN = ("results.jsonl", "manifest.resolved.jsonl")
_NAMED = 3
_MISSING = "give a folder, files or a quoted pattern"
# What the name of a mask next to its picture adds to the picture's.
_MASK = ".mask"
# Folders that NAS boxes, Windows, macOS and photo programs keep among pictures: thumbnails, deleted
# files and snapshots. Names with a dot in front are hidden anyway.
_OF_SYSTEMS = re.compile(
    r"@eaDir|@Recycle|@Recently-Snapshot|@tmp|#recycle|#snapshot|~snapshot|\$RECYCLE\.BIN|RECYCLER|"
    r"System Volume Information|lost\+found|found\.[0-9]{3}|__MACOSX|Network Trash Folder|"
    r"Temporary Items|.+\.(lrdata|photoslibrary|photolibrary|aplibrary)",
    re.IGNORECASE,
)
# Reasons to leave out files and folders: the wording for one, and for several.
_REASONS = {
    "other": ("file that is not an image", "files that are not images"),
    "raw": ("camera RAW file", "camera RAW files"),
    "unread": (
        "picture of a kind that is not supported (convert it)",
        "pictures of kinds that are not supported (convert them)",
    ),
    "below": ("subfolder (add --recursive)", "subfolders (add --recursive)"),
    "system": (
        "folder of thumbnails, deleted files or snapshots",
        "folders of thumbnails, deleted files or snapshots",
    ),
    "unreadable": ("subfolder that cannot be read", "subfolders that cannot be read"),
    "unnamed": (
        "file whose name is not UTF-8 (rename it)",
        "files whose names are not UTF-8 (rename them)",
    ),
    "linked": ("linked folder", "linked folders"),
    "run": ("folder of an earlier run", "folders of an earlier run"),
    "edit": ("file of an earlier edit", "files of earlier edits"),
}


@dataclass(frozen=True)
class Sources:
    """Pictures in natural order: names relative to `base` (with `/`), and the paths to open.

    `base`: the common folder of the arguments. `notes`: one line for each kind of skipped file.
    `masks`: the masks next to pictures, as `cat.mask.png` is next to `cat.jpg`, by the pictures'
    names; they are not pictures to edit. `regions`: where the pictures may be edited, by their
    names.
    """

    base: Path
    files: dict[str, Path]
    notes: tuple[str, ...] = ()
    masks: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)


def is_pattern(argument: str) -> bool:
    """Return True if an argument is a pattern: `photos/*.jpg`, quoted."""
    return glob.has_magic(argument) and not os.path.lexists(argument)


def is_picture_name(name: str) -> bool:
    """Return True if a file's suffix is one that is read as a picture."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_raw_name(name: str) -> bool:
    """Return True if a file's suffix is a camera's raw format, which is not read."""
    return os.path.splitext(name)[1].lower() in RAW_SUFFIXES


def sources(
    arguments: Sequence[str], *, is_recursive: bool, if_missing: Mapping[str, str] | None = None
) -> Sources:
    """Find the pictures that the arguments name. Raises ManifestError with every fault.

    `if_missing`: hints for paths that do not exist. Others get the nearest path.
    """
    search = _Search(is_recursive, if_missing or {})
    bases: dict[str, Path] = {}
    for argument in arguments:
        base = search.add(argument)
        bases.setdefault(os.path.abspath(base), base)
    if not search.faults and not search.found:
        hint = "images are recognized by suffix: .jpg, .png, .webp, .tiff, .heic, .avif, …"
        if raw := next(iter(search.left_out["raw"]), ""):
            hint = RAW_HINT.format(raw, os.path.splitext(raw)[0])
        elif search.left_out["unnamed"]:
            hint = "rename them, so that a manifest can name them"
        elif search.left_out["below"]:
            hint = "add --recursive to include subfolders"
        what = "; ".join(("no images found", *search.notes()))
        where = ", ".join(arguments[:_NAMED])
        search.faults.append(fault("no-pictures", what, where, hint))
    if search.faults:
        raise ManifestError(search.faults)
    beside = search.take_masks()
    base = next(iter(bases.values()))
    if len(bases) > 1:  # the folder that contains all of them
        common = os.path.commonpath(bases)
        is_absolute = any(one.is_absolute() for one in bases.values())
        base = Path(common if is_absolute else os.path.relpath(common))
    names = {
        os.path.relpath(path, os.path.abspath(base)).replace(os.sep, "/"): given
        for path, given in search.found.items()
    }
    files = {name: names[name] for name in sorted(names, key=natural_order)}
    masks = {name: beside[path] for name, path in files.items() if path in beside}
    return Sources(base, files, tuple(search.notes()), masks)


class _Search:
    """The files that the arguments name: pictures, skipped files by reason, and faults."""

    def __init__(self, is_recursive: bool, if_missing: Mapping[str, str]) -> None:
        self.is_recursive, self.if_missing = is_recursive, if_missing
        # Maps absolute paths to the paths as given.
        self.found: dict[str, Path] = {}
        # By reason, the names, each once.
        self.left_out: dict[str, dict[str, None]] = {reason: {} for reason in _REASONS}
        self.repeated = 0
        self.faults: list[HyimgError] = []

    def add(self, argument: str) -> Path:
        """Add an argument's pictures; return the folder to which their names are relative."""
        if is_pattern(argument) and not scheme_of(argument):
            # The folder before the first part with a wildcard.
            parts = [*takewhile(lambda part: not glob.has_magic(part), Path(argument).parts)]
            matches = sorted(glob.glob(argument, recursive=True))
            if not matches:
                hint = "* matches names in one folder, ** folders at any depth"
                if "[" in argument:
                    literal = shlex.quote(argument.replace("[", "[[]"))
                    hint = f"[ begins a set of characters; if names contain it, write {literal}"
                self._refuse("no file matches this pattern", argument, hint)
            for match in matches:
                found = Path(match).parts
                system = [at for at in range(len(parts), len(found)) if _is_system(found[at])]
                if system:
                    self._leave_out("system", str(Path(*found[: system[0] + 1])))
                else:
                    self._add_path(match)
            return Path(*parts)
        self._add_path(argument)
        return Path(argument) if os.path.isdir(argument) else Path(argument).parent

    def _add_path(self, name: str) -> None:
        if os.path.isdir(name):
            for folder, below, files in os.walk(name, onerror=partial(self._not_read, name)):
                below[:] = self._entered(folder, below)
                for file in files:
                    if file.startswith("."):
                        self._leave_out("other", os.path.join(folder, file))
                    else:
                        self._add_file(os.path.join(folder, file))
        elif scheme_of(name):
            hint = 'write one: {"prompt": "…", "images": ["ADDRESS"]}'
            self._refuse("pictures at an address need a manifest", name, hint)
        elif not name or "\0" in name or not os.path.lexists(name):
            hint = self.if_missing.get(name) or nearest_path(name) or _MISSING
            self._refuse("file or folder not found", name or '""', hint)
        else:
            self._add_file(name)

    def _add_file(self, name: str) -> None:
        if is_raw_name(name):
            self._leave_out("raw", name)
        elif os.path.splitext(name)[1].lower() in UNREAD_SUFFIXES:
            self._leave_out("unread", name)
        elif not is_picture_name(name):
            self._leave_out("other", name)
        elif not _is_text(name):
            self._leave_out("unnamed", name)
        elif os.path.abspath(name) in self.found:
            self.repeated += 1
        else:
            self.found[os.path.abspath(name)] = Path(name)

    def _entered(self, folder: str, below: Iterable[str]) -> Iterator[str]:
        """Yield the folders to search.

        Hidden ones, those of systems, links and results of earlier runs are left out.
        """
        for name in below:
            path = os.path.join(folder, name)
            if name.startswith("."):
                self._leave_out("other", path)
            elif _is_system(name):
                self._leave_out("system", path)
            elif not self.is_recursive:
                self._leave_out("below", path)
            elif os.path.islink(path):
                self._leave_out("linked", path)
            elif any(os.path.exists(os.path.join(path, one)) for one in _OF_A_RUN):
                self._leave_out("run", path)
            else:
                yield name

    def take_masks(self) -> dict[Path, list[Path]]:
        """Take out the files that belong to another picture; return the masks by the pictures.

        These are `cat.mask.png` next to `cat.jpg`, and the files that an edit writes next to its
        result: their matte is not a mask that somebody drew.
        """
        by_stem: dict[str, list[str]] = {}
        for path in self.found:
            by_stem.setdefault(os.path.splitext(path)[0], []).append(path)
        masks: dict[Path, list[Path]] = {}
        taken: list[str] = []
        for stem, pictures in by_stem.items():
            names = {kind: f"{stem}{suffix}" for kind, suffix in EDIT_SUFFIXES.items()}
            of_edit = [path for path in names.values() if path in self.found]
            if {names["plain"], names["shown"]}.issubset(of_edit):
                taken += of_edit
                for path in of_edit:
                    self._leave_out("edit", str(self.found[path]))
            elif beside := by_stem.get(f"{stem}{_MASK}"):
                taken += beside
                found = [self.found[path] for path in sorted(beside)]
                masks |= {self.found[path]: found for path in pictures}
        for path in taken:
            del self.found[path]
        return masks

    def _refuse(self, what: str, where: str, hint: str) -> None:
        self.faults.append(fault("missing", what, where, hint))

    def _not_read(self, given: str, error: OSError) -> None:
        """Refuse a folder that the user named if it cannot be read; leave out one below it."""
        if error.filename != given:
            self._leave_out("unreadable", str(error.filename))
            return
        what = f"the folder cannot be read: {error.strerror}"
        self.faults.append(fault("unreadable", what, given))

    def _leave_out(self, reason: str, name: str) -> None:
        self.left_out[reason][name] = None

    def notes(self) -> Iterator[str]:
        """Yield sentences on the skipped files, one for each reason."""
        for reason, (one, many) in _REASONS.items():
            if names := self.left_out[reason]:
                safe = [name if name.isprintable() else shown(name) for name in sorted(names)]
                kind = one if len(names) == 1 else many
                yield f"skipped {len(names):,} {kind}: {names_text(safe, _NAMED)}"
        if self.repeated:
            yield f"used once, though named more than once: {self.repeated}"


def _is_system(name: str) -> bool:
    """Return True if a folder has such a name."""
    return _OF_SYSTEMS.fullmatch(name) is not None


def _is_text(name: str) -> bool:
    """Return True if a name can be written as UTF-8."""
    return not any("\ud800" <= c <= "\udfff" for c in name)
