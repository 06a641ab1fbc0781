"""Find pairs of files, folders, runs or bench variants to compare.

Folders are paired by name, runs by custom_id.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from hyimg_cli.addresses import address_of
from hyimg_cli.errors import UsageError
from hyimg_cli.files import TABLE_BYTES, json_of, text_of
from hyimg_cli.journal.journal import RESULTS, RunFolder
from hyimg_cli.journal.past_run import output_files
from hyimg_cli.media.frames import VIDEO_SUFFIXES
from hyimg_cli.mistyped import nearest_path
from hyimg_cli.settings.name_template import files_in_order, fold_name
from hyimg_cli.spec.units import listed

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif")
BENCH_JSON = "bench.json"
# The folders with the pictures of a bench's variants; it has at least two.
VARIANTS = tuple("ABCD")
# In this folder, in a subfolder, or in a subfolder's subfolder such as in runs/.
_BENCH_PLACES = (BENCH_JSON, f"*/{BENCH_JSON}", f"*/*/{BENCH_JSON}")


@dataclass(frozen=True)
class Pair:
    """Two files, or two folders of frames, compared under one name.

    Raises UsageError for a video and a picture.
    """

    name: str
    a: Path
    b: Path

    def __post_init__(self) -> None:
        if is_video(self.a) != is_video(self.b):
            hint = f"give two of one kind; the other is {self.b}"
            raise _fault("one is a video and the other a picture", self.a, hint)

    @property
    def kind(self) -> Literal["image", "video"]:
        """`video` for what has frames: video files and folders of frames."""
        return "video" if is_video(self.a) else "image"


@dataclass(frozen=True)
class Pairing:
    """The pairs, and the names that have no counterpart."""

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def unpaired(self) -> str:
        """Names without counterpart as a sentence; empty if all have one."""
        return listed({"only in A": self.only_a, "only in B": self.only_b})


def is_video(path: Path) -> bool:
    """Return whether a path is measured frame by frame."""
    return path.suffix.lower() in VIDEO_SUFFIXES or os.path.isdir(path)


def find_pairs(
    a: Path, b: Path | None = None, *, allow_unpaired: bool = False, as_video: bool = False
) -> Pairing:
    """Return the pairs that a command line names.

    `allow_unpaired`: names without counterpart are not an error. `as_video`: each folder has the
    frames of one video, in natural order. Raises UsageError if nothing can be paired.
    """
    for path in (a, *([] if b is None else [b])):
        _refuse_address(path)
        if not os.path.exists(path):
            hint = nearest_path(str(path)) or "give two files, two folders or two runs"
            raise _fault("file or folder not found", path, hint, slug="missing")
    if b is None:
        raise _fault("it needs another to compare with", a, "give a second file or folder")
    pairing = _two_sided(a, b, as_video)
    if pairing.unpaired and not allow_unpaired:
        hint = "to skip them, add --allow-unpaired"
        raise UsageError(pairing.unpaired, hint=hint, code="eval.unpaired")
    if not pairing.pairs:
        raise _fault("nothing to compare", a, slug="nothing")
    return pairing


def run_pairs(a: Path, b: Path, *, by_frame: bool = False) -> Pairing:
    """Return the files of the same job in two runs. A failed job has no counterpart."""
    return _match_names(output_files(a, by_frame=by_frame), output_files(b, by_frame=by_frame))


def folder_pairs(a: Path, b: Path) -> Pairing:
    """Return pictures and videos of the same name in two folders, including subfolders.

    Names may differ in case, in how an accent is encoded, and in their suffixes (`cat.png` and
    `cat.jpg`), if only one file of each folder has the name.
    """
    return _match_names(_media_in(a), _media_in(b), fold_name, _stem, _folded_stem)


def newest_bench(folder: Path, comparison: str) -> Path | None:
    """Return the newest folder of the bench of this name in or under `folder`, if any.

    A folder without pictures of two variants does not count.
    """
    found = []
    for path in (path for place in _BENCH_PLACES for path in folder.glob(place)):
        if all((path.parent / side).is_dir() for side in VARIANTS[:2]):
            with suppress(OSError, ValueError):
                entry = json_of(text_of(path, TABLE_BYTES))
                if isinstance(entry, dict) and entry.get("name") == comparison:
                    found.append(path.parent)
    return max(found, key=lambda bench: (bench / BENCH_JSON).stat().st_mtime_ns, default=None)


def bench_sides(bench: Path) -> list[tuple[str, Path, Path]]:
    """Pair the first variant of a bench with each other one: a title and the two folders."""
    variants = json_of(text_of(bench / BENCH_JSON, TABLE_BYTES)).get("variants", {})
    label = {side: variants.get(side.lower(), {}).get("label", side) for side in VARIANTS}
    first, *others = (side for side in VARIANTS if (bench / side).is_dir())
    return [(f"{label[first]} vs {label[one]}", bench / first, bench / one) for one in others]


def _two_sided(a: Path, b: Path, as_video: bool) -> Pairing:
    if os.path.isdir(a) != os.path.isdir(b):
        folder, file = (a, b) if a.is_dir() else (b, a)
        hint = f"give two folders or two files; {file} is a file"
        raise _fault("one is a folder and the other a file", folder, hint)
    if not a.is_dir() or as_video:
        name = a.name if a.name == b.name else f"{a.name}, {b.name}"
        return Pairing((Pair(name, a, b),))
    is_a_run, is_b_run = (RunFolder(folder).is_run for folder in (a, b))
    if is_a_run == is_b_run:
        return run_pairs(a, b) if is_a_run else folder_pairs(a, b)
    run, other = (a, b) if is_a_run else (b, a)
    hint = f"for its pictures give {run / 'outputs'}; {other} holds no {RESULTS}"
    raise _fault("one is a run of hyimg generate and the other is not", run, hint)


def _media_in(folder: Path) -> dict[str, Path]:
    """Return pictures and videos by name; other files and hidden ones are skipped."""
    known = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
    return {
        path.relative_to(folder).as_posix(): path
        for path in files_in_order(folder, "**/*")
        # A pipe or a device is not skipped: opening it reports it.
        if path.suffix.lower() in known and path.exists() and not path.is_dir()
    }


def _stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()


def _folded_stem(name: str) -> str:
    return fold_name(_stem(name))


def _match_names(
    in_a: Mapping[str, Path], in_b: Mapping[str, Path], *forms: Callable[[str], str]
) -> Pairing:
    """Pair files of the same name, and then, for each form of a name, those alone with it."""
    partner = {name: name for name in in_a if name in in_b}
    taken = set(partner)
    for form in forms:
        of_a, of_b = _alone(in_a, form), _alone(in_b, form)
        for key in of_a.keys() & of_b.keys():
            if of_a[key] not in partner and of_b[key] not in taken:
                partner[of_a[key]] = of_b[key]
                taken.add(of_b[key])
    return Pairing(
        tuple(
            Pair(_shared(a, partner[a]), in_a[a], in_b[partner[a]]) for a in in_a if a in partner
        ),
        tuple(name for name in in_a if name not in partner),
        tuple(name for name in in_b if name not in taken),
    )


def _shared(a: str, b: str) -> str:
    """Return the name of a pair: without the suffixes, if they differ."""
    suffixes = [PurePosixPath(name).suffix.lower() for name in (a, b)]
    return a if suffixes[0] == suffixes[1] else _stem(a)


def _alone(names: Iterable[str], form: Callable[[str], str]) -> dict[str, str]:
    """Return the names by their form, without forms that several have."""
    counts = Counter(map(form, names))
    return {key: name for name in names if counts[key := form(name)] == 1}


def _refuse_address(place: Path | str) -> None:
    if address := address_of(place):
        what = f"{address} is in an object store, and eval compares files on this machine"
        hint = f"copy the run to this machine: hyimg merge {address} -o FOLDER"
        raise UsageError(what, hint=hint, code="eval.address")


def _fault(what: str, where: Path, hint: str = "", *, slug: str = "pairs") -> UsageError:
    return UsageError(what, where=where, hint=hint, code=f"eval.{slug}")
