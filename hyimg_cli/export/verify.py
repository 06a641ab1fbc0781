"""Count a dataset again from its files, and report differences from its dataset.json."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.errors import UsageError
from hyimg_cli.export.columns import FOLDERS, ROW_SHA256, dataset_digest, row_digest
from hyimg_cli.export.dataset import (
    INFO,
    REJECTED,
    SHARD_NAME,
    plan_digest,
    read_info,
    shard_digest,
)
from hyimg_cli.export.formats import FORMATS, bytes_in, read_rows
from hyimg_cli.journal.picks import read_lines
from hyimg_cli.spec.units import counted

_CONFIGS = {place: config for config, place in FOLDERS.items()}


class Verified(NamedTuple):
    """A dataset's hash and rows as counted, and one line for each difference from dataset.json."""

    dataset_sha256: str
    rows: int
    differences: list[str]


def verify(folder: Path) -> Verified:
    """Read every file of a dataset except its card.

    Raises UsageError if the folder does not hold a finished dataset, MachineError if pyarrow is
    needed and not installed.
    """
    info = read_info(folder)
    if not info or info.get("format") not in FORMATS:
        hint = f"a finished export has {INFO}; run the export again to complete it"
        raise UsageError("no finished dataset", where=folder, hint=hint, code="export.no-dataset")
    files: dict[str, Any] = info["files"]
    read = {name: _Rows() for name in files}
    differences = [
        f"{name}: {what}"
        for name, own in read.items()
        for what in _differences(folder / name, name, files[name], info["format"], own)
    ]
    for place in FOLDERS.values():
        names = sorted(f"{place}/{one.name}" for one in (folder / place).glob("*"))
        differences += [f"{one}: not part of the dataset" for one in names if one not in files]
    hashes = [one for own in read.values() for one in own.hashes]
    found, counts = dataset_digest(hashes), Counter[str]()
    for name, own in read.items():
        if shard := SHARD_NAME.fullmatch(name):
            counts[f"{_CONFIGS[shard[1]]}/{shard[2]}"] += len(own.hashes)
    if found != info.get("dataset_sha256"):
        differences.append(f"dataset hash: {found}, expected {info.get('dataset_sha256')}")
    if counts != info.get("counts"):
        differences.append(f"counts: {dict(counts)}, expected {info.get('counts')}")
    # Anything else that was changed changes this digest, too.
    rows = [(name, own.hashes) for name, own in read.items() if name != REJECTED]
    if not differences and info.get("plan") != plan_digest(
        info, rows, read_lines(folder / REJECTED)
    ):
        differences.append(f"{INFO}: what it says of licences, rules, scorers or runs was changed")
    return Verified(found, len(hashes), differences)


@dataclass
class _Rows:
    """A file's rows as read: their digests, and the bytes of their pictures."""

    hashes: list[str] = field(default_factory=list)
    nbytes: int = 0


def _differences(path: Path, name: str, known: Any, form: str, own: _Rows) -> Iterator[str]:
    """Yield what differs in a file, and add its rows to `own`."""
    shard = SHARD_NAME.fullmatch(name)
    if not (shard or name == REJECTED) or not isinstance(known, dict):
        yield "not a file name of a dataset"
        return
    config, split = (_CONFIGS[shard[1]], shard[2]) if shard else ("", "")
    try:
        if shard_digest(path) != known.get("sha256"):
            yield "its bytes differ"
        for row in read_rows(path, form) if shard else ():
            own.hashes.append(row_digest(config, split, row))
            own.nbytes += bytes_in(row)
            if own.hashes[-1] != row.get(ROW_SHA256):
                yield f"the row {row.get('id')!r} was changed"
    except FileNotFoundError as error:
        yield "missing" if error.filename == str(path) else f"{error.filename} is missing"
    except (OSError, ValueError) as error:
        yield f"cannot be read to its end: {error}"
    if shard and known.get("rows") != len(own.hashes):
        yield f"{counted(len(own.hashes), 'row')}, expected {known.get('rows')}"
    elif shard and known.get("nbytes") != own.nbytes:
        yield f"pictures of {counted(own.nbytes, 'byte')}, expected {known.get('nbytes')}"
