"""The formats of a shard: how rows become a file or a folder, and are read back.

parquet     one file; a picture is {bytes, path}, as `datasets` has it; nothing is compressed
webdataset  one tar; a row is NUMBER.json and NUMBER.COLUMN.SUFFIX, since a key ends at its
            first dot and ids may have some
folder      a folder of the tar's members
"""

import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from hyimg_cli.errors import require
from hyimg_cli.export.columns import Columns, Kind, Picture, pictures_in, without_nulls
from hyimg_cli.files import bytes_of, json_of, opened
from hyimg_cli.journal.journal import json_line
from hyimg_cli.media.source_files import MAX_SOURCE_BYTES

T = TypeVar("T")
# The suffix of a shard's name, by format.
FORMATS = {"parquet": ".parquet", "webdataset": ".tar", "folder": ""}
MAX_GROUP_BYTES = 64_000_000
_MEMBER = re.compile(r"([0-9]+)\.(?:json|([a-z]+)([0-9]*)\.([a-z0-9]+))")


def write_rows(
    path: Path, form: str, rows: Sequence[Columns], kinds: Mapping[str, Kind], first: int
) -> None:
    """Write a shard; `kinds`: of its columns, `first`: number of its first row."""
    if form == "parquet":
        _write_parquet(path, rows, kinds)
    elif form == "folder":
        path.mkdir()
        for name, data in _members(rows, first):
            (path / name).write_bytes(data)
    else:
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in _members(rows, first):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def read_rows(path: Path, form: str) -> Iterator[Columns]:
    """Yield the rows of a shard. Raises OSError, or ValueError if it is damaged."""
    if form == "parquet":
        return _read_parquet(path)
    return _rows_in(_in_folder(path) if form == "folder" else _in_tar(path))


def by_size(rows: Sequence[T], size: Callable[[T], int], most: int) -> Iterator[Sequence[T]]:
    """Yield rows in groups whose sizes add up to at most `most`, or groups of one row."""
    start, nbytes = 0, 0
    for end, row in enumerate(rows):
        nbytes += (more := size(row))
        if nbytes > most and end > start:
            yield rows[start:end]
            start, nbytes = end, more
    yield rows[start:]


def bytes_in(row: Columns) -> int:
    """Return the bytes of a row's pictures."""
    return sum(picture.nbytes for _, _, picture in pictures_in(row))


def _write_parquet(path: Path, rows: Sequence[Columns], kinds: Mapping[str, Kind]) -> None:
    require("pyarrow", extra="export")
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([(name, _arrow_type(kind)) for name, kind in kinds.items()])
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    with parquet.ParquetWriter(path, schema, write_statistics=False, **how) as writer:
        for group in by_size(rows, bytes_in, MAX_GROUP_BYTES):
            columns = [{name: _in_parquet(value) for name, value in row.items()} for row in group]
            writer.write_table(pa.Table.from_pylist(columns, schema), row_group_size=len(group))


def _arrow_type(kind: Kind) -> Any:
    import pyarrow as pa

    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _arrow_type(one)) for name, one in kind.items()])
    if kind == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.type_for_alias(kind)


def _in_parquet(value: Any) -> Any:
    if isinstance(value, Picture):
        return {"bytes": value.data, "path": f"{value.sha256[:16]}.{value.suffix}"}
    return [_in_parquet(one) for one in value] if isinstance(value, list) else value


def _read_parquet(path: Path) -> Iterator[Columns]:
    require("pyarrow", extra="export")
    from pyarrow import ArrowException, parquet

    try:
        with opened(path) as file, parquet.ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                for row in table.read_row_group(group).to_pylist():
                    yield {name: _from_parquet(value) for name, value in row.items()}
    except ArrowException as error:
        raise ValueError(str(error)) from error


def _from_parquet(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        suffix = str(value["path"]).rpartition(".")[2]
        return None if value["bytes"] is None else Picture.of(value["bytes"], suffix)
    return [_from_parquet(one) for one in value] if isinstance(value, list) else value


def _members(rows: Iterable[Columns], first: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of rows, by name."""
    for number, row in enumerate(rows, first):
        facts = dict(row)
        for name, column, picture in pictures_in(row):
            facts.pop(column, None)
            yield f"{number:09}.{name}.{picture.suffix}", picture.data
        yield f"{number:09}.json", json_line(without_nulls(facts))


def _in_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member)
                yield member.name, content.read() if content else b""
    except tarfile.TarError as error:
        raise ValueError(str(error)) from error


def _in_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(path.iterdir()):
        yield file.name, bytes_of(file, MAX_SOURCE_BYTES)


def _rows_in(members: Iterable[tuple[str, bytes]]) -> Iterator[Columns]:
    for _, files in groupby(members, lambda member: member[0].partition(".")[0]):
        row: Columns = {}
        lists: dict[str, dict[int, Picture]] = {}
        for name, data in files:
            if not (match := _MEMBER.fullmatch(name)):
                raise ValueError(f"{name!r} is not a file of a row")
            _, column, index, suffix = match.groups()
            if column is None:
                facts = json_of(data)
                if not isinstance(facts, dict):
                    raise ValueError("a row is not a JSON object")
                row |= facts
            elif index:
                lists.setdefault(column, {})[int(index)] = Picture.of(data, suffix)
            else:
                row[column] = Picture.of(data, suffix)
        yield row | {name: [found[n] for n in sorted(found)] for name, found in lists.items()}
