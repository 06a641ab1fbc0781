"""A dataset counted again from its files, and what differs from its dataset.json."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.errors import UsageError
from hyimg_cli.export.columns import (
    FOLDERS,
    ROW_SHA256,
    dataset_digest,
    row_digest,
)
from hyimg_cli.export.dataset import INFO, REJECTED, SHARD_NAME, read_info, shard_digest
from hyimg_cli.export.formats import FORMATS
from hyimg_cli.spec.units import counted


class Verified(NamedTuple):
    """A dataset's hash and rows as counted, and what differs from what it says: a line each."""

    dataset_sha256: str
    rows: int
    differences: list[str]


def verify(folder: Path) -> Verified:
    """Read every file of a dataset. Raises UsageError where the folder does not hold a finished
    one, MachineError where pyarrow is needed and missing.
    """
    info = read_info(folder)
    if not info or info.get("format") not in FORMATS:
        hint = f"a finished export has {INFO}; run the export again to complete it"
        raise UsageError("no finished dataset", where=folder, hint=hint, code="export.no-dataset")
    files: dict[str, Any] = info["files"]
    differences, hashes = list[str](), list[str]()
    for name, known in files.items():
        if name == REJECTED:
            differences += _compare_bytes(folder, name, known)
        elif SHARD_NAME.fullmatch(name):
            found, hashed = _compare_rows(folder, name, info["format"], known)
            differences += found
            hashes += hashed
        else:
            differences.append(f"{name}: this name is not a shard's")
    for place in FOLDERS.values():
        names = sorted(f"{place}/{one.name}" for one in (folder / place).glob("*"))
        differences += [f"{one}: not part of the dataset" for one in names if one not in files]
    found = dataset_digest(hashes)
    if found != info.get("dataset_sha256"):
        differences.append(f"dataset hash: {found}, expected {info.get('dataset_sha256')}")
    return Verified(found, len(hashes), differences)


def _compare_bytes(folder: Path, name: str, known: Any) -> Iterator[str]:
    try:
        expected = known.get("sha256") if isinstance(known, dict) else None
        if shard_digest(folder / name) != expected:
            yield f"{name}: its bytes differ"
    except FileNotFoundError:
        yield f"{name}: missing"
    except OSError as error:
        yield f"{name}: cannot be read: {error.strerror}"


def _compare_rows(folder: Path, name: str, form: str, known: Any) -> tuple[list[str], list[str]]:
    """What differs in a shard, and the digests of its rows."""
    differences, hashes = list(_compare_bytes(folder, name, known)), list[str]()
    match = SHARD_NAME.fullmatch(name)
    assert match is not None
    config = next(one for one, place in FOLDERS.items() if place == match[1])
    try:
        for row in FORMATS[form].read(folder / name) if (folder / name).exists() else ():
            hashes.append(row_digest(config, match[2], row))
            if hashes[-1] != row.get(ROW_SHA256):
                differences.append(f"{name}: the row {row.get('id')!r} was changed")
    except (OSError, ValueError) as error:
        differences.append(f"{name}: cannot be read to its end: {error}")
    if isinstance(known, dict) and known.get("rows") != len(hashes):
        differences.append(f"{name}: {counted(len(hashes), 'row')}, expected {known.get('rows')}")
    return differences, hashes
