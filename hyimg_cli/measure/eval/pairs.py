"""What is compared with what: files, folders by name, runs by custom_id, a manifest of pairs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyimg_cli.errors import HyimgError, ManifestError, UsageError
from hyimg_cli.files import MANIFEST_BYTES, text_of
from hyimg_cli.journal.journal import RESULTS, RunFolder
from hyimg_cli.media.frames import VIDEO_SUFFIXES

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif")
Kind = Literal["image", "video"]
_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Pair:
    """Two files, or two folders of frames, that are compared under one name."""

    name: str
    a: Path
    b: Path

    @property
    def kind(self) -> Kind:
        """`video` for what has frames: video files and folders of frames."""
        return "video" if is_video(self.a) or is_video(self.b) else "image"


@dataclass(frozen=True)
class Pairing:
    """The pairs, and what has no counterpart, with the reason where there is one to tell."""

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairingRule:
    """`allow_unpaired`: names without counterpart are told, and no error. `as_video`: two folders
    are the frames of one video each, in the order of their names.
    """

    allow_unpaired: bool = False
    as_video: bool = False


def is_video(path: Path) -> bool:
    """Whether a path is measured frame by frame."""
    return path.suffix.lower() in VIDEO_SUFFIXES or path.is_dir()


def find_pairs(a: Path, b: Path | None, rule: PairingRule) -> Pairing:
    """The pairs that a command line means.

    `a` alone is a manifest of pairs. Raises UsageError where nothing can be paired, where names
    stay without counterpart and that is not allowed, ManifestError for faults of the manifest.
    """
    for path in (a, *([] if b is None else [b])):
        if not path.exists():
            raise _usage("there is no such file or folder", path, slug="missing")
    pairing = _manifest_pairs(a) if b is None else _two_sided(a, b, rule)
    if (pairing.only_a or pairing.only_b) and not rule.allow_unpaired:
        hint = "--allow-unpaired leaves them out"
        raise UsageError(unpaired_text(pairing), hint=hint, code="eval.unpaired")
    if not pairing.pairs:
        raise UsageError("there is nothing to compare", where=str(a), code="eval.nothing")
    return pairing


def unpaired_text(pairing: Pairing) -> str:
    """What has no counterpart, in words; empty where all has one."""
    sides = (("only in A", pairing.only_a), ("only in B", pairing.only_b))
    return "; ".join(f"{len(names)} {where}: {_some(names)}" for where, names in sides if names)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _two_sided(a: Path, b: Path, rule: PairingRule) -> Pairing:
    if a.is_dir() != b.is_dir():
        folder, file = (a, b) if a.is_dir() else (b, a)
        raise _usage("one is a folder and the other a file", folder, f"the file is {file}")
    if not a.is_dir() or rule.as_video:
        name = a.name if a.name == b.name else f"{a.name}, {b.name}"
        return Pairing((_of_one_kind(Pair(name, a, b)),))
    if is_run(a) != is_run(b):
        run, other = (a, b) if is_run(a) else (b, a)
        hint = f"for its pictures give {run / 'outputs'}; {other} holds no {RESULTS}"
        raise _usage("one is a run of hyimg generate and the other is not", run, hint)
    return _run_pairs(a, b) if is_run(a) else _folder_pairs(a, b)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run of `hyimg generate`."""
    return (folder / RESULTS).exists()


def _of_one_kind(pair: Pair) -> Pair:
    if is_video(pair.a) != is_video(pair.b):
        raise _usage("one is a video and the other a picture", pair.a, f"the other is {pair.b}")
    return pair


def _folder_pairs(a: Path, b: Path) -> Pairing:
    """Pictures and videos of the same name, in subfolders too; other files are passed over."""
    return _matched(_media_in(a), _media_in(b))


def _media_in(folder: Path) -> dict[str, Path]:
    known = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
    files = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in known)
    # A pipe or a device is told of when it is opened, not passed over.
    present = (path for path in files if path.exists() and not path.is_dir())
    found = {path.relative_to(folder).as_posix(): path for path in present}
    return {name: path for name, path in found.items() if not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _run_pairs(a: Path, b: Path) -> Pairing:
    """Results of the same custom_id. A failed job has no picture, and so no counterpart."""
    return _matched(_outputs_of(a), _outputs_of(b))


def _outputs_of(run: Path) -> dict[str, Path]:
    return {
        entry["custom_id"] + (f"[{number}]" if number else ""): run / output["path"]
        for entry in RunFolder(run).results().values()
        if entry.get("status") == "done"
        for number, output in enumerate(entry.get("outputs") or ())
    }


def _matched(in_a: Mapping[str, Path], in_b: Mapping[str, Path]) -> Pairing:
    return Pairing(
        tuple(_of_one_kind(Pair(name, in_a[name], in_b[name])) for name in in_a if name in in_b),
        tuple(name for name in in_a if name not in in_b),
        tuple(name for name in in_b if name not in in_a),
    )


def _manifest_pairs(path: Path) -> Pairing:
    """Pairs of a JSONL file with an object {"a", "b"} on each line, `name` if you like.

    Paths are relative to the manifest.
    """
    if path.is_dir():
        raise _usage("one folder alone cannot be compared", path, "give a second one")
    if path.suffix != ".jsonl":
        raise _usage("one file alone cannot be compared", path, "give a second, or a .jsonl file")
    faults: list[HyimgError] = []
    pairs: list[Pair] = []
    for number, line in _lines(path):
        try:
            pairs.append(_of_one_kind(_pair(line, path.parent)))
        except HyimgError as error:
            where = f"{path.name}:{number}"
            code, what = "manifest.pair", error.what
            faults.append(UsageError(what, where=where, hint=error.hint, code=code))
    if faults:
        raise ManifestError(faults, where=path.name)
    return Pairing(tuple(pairs))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = text_of(path, MANIFEST_BYTES, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _usage("the manifest cannot be read", path, str(error)) from None
    yield from ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())


def _pair(line: str, folder: Path) -> Pair:
    shape = 'a line is an object like {"a": "one.png", "b": "other.png"}'
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}", hint=shape) from None
    if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
        raise UsageError("this is not an object of texts", hint=shape)
    unknown, missing = entry.keys() - {"a", "b", "name"}, {"a", "b"} - entry.keys()
    if unknown or missing:
        found = [f"unknown: {', '.join(sorted(unknown))}"] if unknown else []
        found += [f"missing: {', '.join(sorted(missing))}"] if missing else []
        raise UsageError("; ".join(found), hint=f"{shape}; name is a third key")
    paths = [folder / entry[side] for side in ("a", "b")]
    absent = [str(path) for path in paths if not path.exists()]
    if absent:
        raise UsageError(f"there is no {' and no '.join(absent)}", hint="relative to the manifest")
    return Pair(entry.get("name") or entry["b"], *paths)


def _usage(what: str, where: Path, hint: str = "", *, slug: str = "pairs") -> UsageError:
    return UsageError(what, where=str(where), hint=hint, code=f"eval.{slug}")
