"""The formats of a shard: how rows become a file or a folder, and are read back.

parquet     one file; a picture is {bytes, path}, as `datasets` has it; nothing is compressed
webdataset  one tar; a row is NUMBER.json and NUMBER.COLUMN.SUFFIX, since a key ends at its
            first dot and ids may have some
folder      a folder with metadata.jsonl, whose *_file_name columns name the pictures beside it
"""

import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.errors import require
from hyimg_cli.export.columns import Columns, Kind, Picture, without_nulls
from hyimg_cli.files import JOURNAL_BYTES, bytes_of, json_of, opened
from hyimg_cli.journal.journal import json_line
from hyimg_cli.media.images import MAX_SOURCE_BYTES

MAX_GROUP_BYTES = 64_000_000
METADATA = "metadata.jsonl"
_MEMBER = re.compile(r"([0-9]+)\.(?:json|([a-z]+)([0-9]*)\.([a-z0-9]+))")
_PATHS = ("_file_name", "_file_names")


class Format(NamedTuple):
    """A format. `write`: path, kinds of the columns, number of the first row, rows; `read`: the
    rows of a path, without nulls, and raises OSError or ValueError where it is damaged.
    """

    suffix: str
    write: Callable[[Path, Mapping[str, Kind], int, Iterable[Columns]], None]
    read: Callable[[Path], Iterator[Columns]]


def _write_parquet(
    path: Path, kinds: Mapping[str, Kind], first: int, rows: Iterable[Columns]
) -> None:
    require("pyarrow", extra="export")
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([(name, _arrow_type(kind)) for name, kind in kinds.items()])
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    with parquet.ParquetWriter(path, schema, write_statistics=False, **how) as writer:
        for group in _groups(rows):
            columns = [{n: _in_parquet(v) for n, v in row.items()} for row in group]
            writer.write_table(pa.Table.from_pylist(columns, schema), row_group_size=len(group))


def _groups(rows: Iterable[Columns]) -> Iterator[list[Columns]]:
    """Rows in groups that have no more pictures than MAX_GROUP_BYTES, or one row."""
    group, nbytes = list[Columns](), 0
    for row in rows:
        more = sum(len(picture.data) for _, _, picture in _pictures(row))
        if group and nbytes + more > MAX_GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(row)
        nbytes += more
    if group:
        yield group


def _arrow_type(kind: Kind) -> Any:
    import pyarrow as pa

    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _arrow_type(one)) for name, one in kind.items()])
    if kind == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return {"bool": pa.bool_(), "int64": pa.int64(), "float64": pa.float64()}.get(kind, pa.string())


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
        return None if value["bytes"] is None else Picture(value["bytes"], suffix)
    return [_from_parquet(one) for one in value] if isinstance(value, list) else value


def _write_tar(path: Path, kinds: Mapping[str, Kind], first: int, rows: Iterable[Columns]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, row in enumerate(rows, first):
            members = [(f"{name}.{p.suffix}", p.data) for name, _, p in _pictures(row)]
            members += [("json", json_line(without_nulls(_facts(row))))]
            for name, data in members:
                member = tarfile.TarInfo(f"{number:09}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _read_tar(path: Path) -> Iterator[Columns]:
    with opened(path) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                named = ((_MEMBER.fullmatch(member.name), member) for member in tar)
                for _, members in groupby(named, lambda one: one[0] and one[0][1]):
                    yield _row_of(
                        (match, tar.extractfile(member)) for match, member in members if match
                    )
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error


def _row_of(members: Iterable[tuple[re.Match[str], Any]]) -> Columns:
    row: Columns = {}
    for match, file in members:
        data = file.read() if file else b""
        _, column, index, suffix = match.groups()
        if column is None:
            row |= _facts_in(data)
        elif index:
            row.setdefault(column, []).append(Picture(data, suffix))
        else:
            row[column] = Picture(data, suffix)
    return row


def _write_folder(
    path: Path, kinds: Mapping[str, Kind], first: int, rows: Iterable[Columns]
) -> None:
    path.mkdir()
    with (path / METADATA).open("xb") as metadata:
        for number, row in enumerate(rows, first):
            line = without_nulls(_facts(row))
            for name, column, picture in _pictures(row):
                file = f"{number:09}.{name}.{picture.suffix}"
                (path / file).write_bytes(picture.data)
                if name == column:
                    line[f"{column}_file_name"] = file
                else:
                    line.setdefault(f"{column}_file_names", []).append(file)
            metadata.write(json_line(line))


def _read_folder(path: Path) -> Iterator[Columns]:
    with opened(path / METADATA, JOURNAL_BYTES) as file:
        for line in file:
            row = _facts_in(line)
            for name in [name for name in row if name.endswith(_PATHS)]:
                files, column = row.pop(name), name[: name.rindex("_file_name")]
                if isinstance(files, list):
                    row[column] = [_read_beside(path, one) for one in files]
                else:
                    row[column] = _read_beside(path, files)
            yield row


def _read_beside(folder: Path, name: Any) -> Picture:
    if not isinstance(name, str) or not _MEMBER.fullmatch(name):
        raise ValueError(f"{name!r} does not name a picture of this folder")
    return Picture(bytes_of(folder / name, MAX_SOURCE_BYTES), name.rpartition(".")[2])


def _facts_in(text: bytes) -> Columns:
    """The columns in a JSON text. Raises ValueError."""
    found = json_of(text)
    if not isinstance(found, dict):
        raise ValueError("a row is not a JSON object")
    return found


def _pictures(row: Columns) -> Iterator[tuple[str, str, Picture]]:
    """The pictures of a row: `source0` or `result`, the column, the picture."""
    for column, value in row.items():
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, Picture):
                yield f"{column}{index}" if isinstance(value, list) else column, column, one


def _facts(row: Columns) -> Columns:
    """The columns of a row that are no pictures."""
    columns = {column for _, column, _ in _pictures(row)}
    return {name: value for name, value in row.items() if name not in columns}


FORMATS = {
    "parquet": Format(".parquet", _write_parquet, _read_parquet),
    "webdataset": Format(".tar", _write_tar, _read_tar),
    "folder": Format("", _write_folder, _read_folder),
}
