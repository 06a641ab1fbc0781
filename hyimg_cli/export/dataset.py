"""A dataset's folder: planned whole, written shard by shard, resumed after any kill.

    DATASET/  dataset.json   README.md   rejected.jsonl   .export.json (until it is complete)
              data/train-00000-of-00002.parquet    preference/…    (.tar; a folder)

`.export.json` has the digest of the plan, and of each shard that is whole. A shard is written under
a temporary name and renamed. dataset.json is written last.
"""

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.export.columns import FOLDERS, Columns, columns_of, dataset_digest
from hyimg_cli.export.formats import FORMATS, MAX_GROUP_BYTES, by_size, bytes_in, write_rows
from hyimg_cli.export.rows import Row
from hyimg_cli.files import (
    TABLE_BYTES,
    bytes_of,
    json_of,
    refuse_links,
    remove,
    replace_file,
    replacing,
)
from hyimg_cli.journal.disk import disk_errors, in_use, make_folders
from hyimg_cli.journal.journal import json_line
from hyimg_cli.spec import digest

CARD, INFO, REJECTED, STATE = "README.md", "dataset.json", "rejected.jsonl", ".export.json"
# A shard, by its configuration's folder and its split.
SHARD_NAME = re.compile(
    r"(data|preference|answers)/(train|validation|test)-[0-9]{5}-of-[0-9]{5}(?:\.parquet|\.tar)?"
)
Info = dict[str, Any]
# What dataset.json has beside the facts: counted from the rows.
_COUNTED = {"dataset_sha256", "counts", "plan", "files"}


class DatasetShard(NamedTuple):
    """A file or folder of rows of one configuration and split; `first`: number of the first row."""

    name: str
    rows: Sequence[Row]
    first: int

    @property
    def config(self) -> str:
        return self.rows[0].config


def plan_shards(rows: Sequence[Row], form: str, count: int | None = None) -> list[DatasetShard]:
    """Return the shards of the rows.

    `count` shards of each split; None: as many as keep each shard within MAX_GROUP_BYTES of
    pictures, or to one row.
    """
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.config, row.split), []).append(row)
    shards, first = list[DatasetShard](), 0
    for (config, split), own in parts.items():
        pieces: Sequence[Sequence[Row]]
        if count:
            n = min(count, len(own))
            pieces = [own[len(own) * i // n : len(own) * (i + 1) // n] for i in range(n)]
        else:
            pieces = list(by_size(own, lambda row: bytes_in(row.columns), MAX_GROUP_BYTES))
        for number, piece in enumerate(pieces):
            name = f"{FOLDERS[config]}/{split}-{number:05}-of-{len(pieces):05}"
            shards.append(DatasetShard(name + FORMATS[form], piece, first))
            first += len(piece)
    return shards


def write_dataset(
    folder: Path,
    shards: Sequence[DatasetShard],
    rejected: Sequence[Mapping[str, Any]],
    facts: Info,
    card_of: Callable[[Info], str],
    *,
    force: bool = False,
) -> Info:
    """Write the missing files of a dataset, and return the contents of its dataset.json.

    `facts`: the contents of dataset.json other than the hash, counts and files, including its
    `format`; `card_of` makes the card from all of it. Raises OutputFolderError if the folder holds
    anything else, unless it is a dataset and `force` is set; StorageError.
    """
    columns = [row.columns for shard in shards for row in shard.rows]
    rows = [(shard.name, [row.sha256 for row in shard.rows]) for shard in shards]
    plan = plan_digest(facts, rows, rejected)
    with disk_errors(folder), _locked(folder):
        files = _open_state(folder, plan, [shard.name for shard in shards], force)
        for shard in shards:
            path, known = folder / shard.name, files[shard.name] or {}
            if not path.exists() or known.get("sha256") != shard_digest(path):
                files[shard.name] = _write_shard(path, facts["format"], shard, columns)
                _write_json(folder / STATE, {"plan": plan, "files": files})
        replace_file(folder / REJECTED, map(json_line, rejected))
        files[REJECTED] = {"sha256": digest.of_file(folder / REJECTED)}
        every = [row for shard in shards for row in shard.rows]
        hashed = {"dataset_sha256": dataset_digest(row.sha256 for row in every)}
        counts = Counter(f"{row.config}/{row.split}" for row in every)
        info = {**facts, **hashed, "counts": counts, "plan": plan, "files": files}
        if not (folder / CARD).exists():  # the user's own notes stay
            replace_file(folder / CARD, card_of(info).encode())
        _write_json(folder / INFO, info)
        remove(folder / STATE)
    return info


def plan_digest(
    info: Info,
    rows: Sequence[tuple[str, Sequence[str]]],
    rejected: Sequence[Mapping[str, Any]],
) -> str:
    """Return the digest of all that decides a dataset.

    `info`: the contents of its dataset.json, or those that are known before it is written. `rows`:
    the digests of each shard's rows.
    """
    facts = {name: value for name, value in info.items() if name not in _COUNTED}
    return digest.of_json([facts, rows, list(rejected)])


def read_info(folder: Path, name: str = INFO) -> Info:
    """Return the object in dataset.json, or in a similar file; empty if it does not exist.

    Raises OutputFolderError for a damaged one.
    """
    try:
        info = json_of(bytes_of(folder / name, TABLE_BYTES))
        if isinstance(info, dict) and isinstance(info.get("files"), dict):
            return info
    except FileNotFoundError:
        return {}
    except ValueError:
        pass
    raise OutputFolderError(
        f"{name} is damaged",
        where=folder / name,
        hint="export into another folder",
        code="export.damaged",
    )


def shard_digest(path: Path) -> str:
    """Return the hex sha256 of a shard.

    Of its bytes, or of the names and digests of a folder's files.
    """
    if not path.is_dir():
        return digest.of_file(path)
    return digest.of_json({one.name: digest.of_file(one) for one in path.iterdir()})


def _open_state(folder: Path, plan: str, names: Sequence[str], force: bool) -> Info:
    """Return what is known of each of the plan's shards, once the folder holds nothing else."""
    places = [folder / name for name in FOLDERS.values()]
    for place in (folder, *places):
        refuse_links(place, folder)
        for left in place.glob(".*.[0-9]*.tmp"):
            remove(left)
    state = read_info(folder, STATE) or read_info(folder)
    if not state and any(folder.iterdir()):
        what, hint = "the folder holds other files", "choose an empty folder or a new one with -o"
        raise OutputFolderError(what, where=folder, hint=hint, code="export.not-empty")
    if state and state.get("plan") != plan and not force:
        raise OutputFolderError(
            "the folder holds another dataset: its runs, picks or options differ",
            where=folder,
            hint="--force replaces it; or choose another folder with -o",
            code="export.other-dataset",
        )
    known = state["files"] if state.get("plan") == plan else {}
    files = {n: one if isinstance(one := known.get(n), dict) else None for n in names}
    former = {name: None for name in state.get("files", ()) if SHARD_NAME.fullmatch(name)}
    # List the files before removing any: after a kill, the next export still knows all of them.
    _write_json(folder / STATE, {"plan": plan, "files": former | files})
    for name in former.keys() - files.keys():
        remove(folder / name)
    for name in () if known else (INFO, CARD):
        remove(folder / name)
    for place in places:
        with suppress(OSError):
            place.rmdir()  # unless it contains shards
    return files


def _write_shard(path: Path, form: str, shard: DatasetShard, columns: Sequence[Columns]) -> Info:
    path.parent.mkdir(exist_ok=True)
    rows, kinds = [row.written for row in shard.rows], columns_of(shard.config, columns)
    # A folder's pictures are not synced one by one: a shard that a power cut damaged has another
    # digest than the state records, and is written again.
    with replacing(path, is_lasting=form != "folder") as temporary:
        write_rows(temporary, form, rows, kinds, shard.first)
        nbytes = sum(map(bytes_in, rows))
        return {"sha256": shard_digest(temporary), "rows": len(rows), "nbytes": nbytes}


def _write_json(path: Path, value: Info) -> None:
    replace_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder and lock it for this process. Raises OutputFolderError."""
    make_folders(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(folder, "another export") from None
        yield
    finally:
        os.close(descriptor)
