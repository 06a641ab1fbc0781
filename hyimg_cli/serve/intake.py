"""A batch's input file made into its manifest: every fault by line, files under names of its own.

input.jsonl   the file as it was uploaded
manifest.jsonl   line by line the same requests; a line here has the number that it has there
sources/<sha256>   the pictures that they name, whatever becomes of the uploads
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyimg_cli.engine import runner
from hyimg_cli.errors import HyimgError
from hyimg_cli.files import opened, replace_file, sync
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.journal.journal import json_line
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.serve.bodies import JSON_BYTES, json_object
from hyimg_cli.serve.errors import Refused, bad_request, refusal_of
from hyimg_cli.serve.results import MANIFEST
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.values import shown

INPUT, SOURCES = "input.jsonl", "sources"
MOST_LINES = 50_000
# The last fault of a longer list says how many more there are.
_MOST_FAULTS = 1_000
_KEYS = {"custom_id": str, "method": str, "url": str, "body": dict}
# Fields of a line that name files.
_FILES = ("images", "region")

Fault = dict[str, Any]


def write_manifest(
    folder: Path, endpoint: str, owner: str, wire: Wire, settings: Mapping[str, Setting]
) -> list[Fault]:
    """Make the manifest of a batch's folder, or return the faults of its input and make none.

    Raises StorageError.
    """
    faults, lines = dict[int, list[Fault]](), list[bytes]()
    with disk_errors(folder):
        make_folders(folder / SOURCES)
        for number, raw in _raw_lines(folder / INPUT):
            try:
                line = _line_of(raw, number, endpoint, owner, wire) if raw.strip() else None
            except Refused as refused:
                line, faults[number] = None, [_fault(number, refused)]
            if line is not None:
                line |= {name: _own(line[name], folder, wire) for name in _FILES if name in line}
            lines.append(b"\n" if line is None else json_line(line))
    data = b"".join(lines)
    # Where no line is left of a faulty file, do not add that it is empty.
    if data.strip() or not faults:
        for error in runner.examine(manifest_of(data, MANIFEST, folder=folder), settings)[1]:
            place = re.match(rf"{MANIFEST}:([0-9]+)", error.where)
            number = int(place[1]) if place else 0
            faults.setdefault(number, []).append(_fault(number, error))
    found = [fault for number in sorted(faults) for fault in faults[number]]
    if len(found) > _MOST_FAULTS:
        what = f"{len(found) - _MOST_FAULTS + 1:,} more faults are not listed"
        found[_MOST_FAULTS - 1 :] = [_fault(0, bad_request("", what, "batch.more-faults"))]
    if not found:
        with disk_errors(folder):
            sync(folder / SOURCES)
            replace_file(folder / MANIFEST, data)
    return found


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers. The last one may be a fault of the file."""
    with opened(path) as file:
        number = 0
        while raw := file.readline(JSON_BYTES):
            number += 1
            yield number, raw
            if number > MOST_LINES or (len(raw) == JSON_BYTES and not raw.endswith(b"\n")):
                return


def _line_of(raw: bytes, number: int, endpoint: str, owner: str, wire: Wire) -> dict[str, Any]:
    """A line of the input as one of the manifest. Raises Refused."""
    if number > MOST_LINES:
        what, hint = f"the file has more than {MOST_LINES:,} lines", "make several batches"
        raise bad_request("", what, "batch.too-many-lines", hint)
    try:
        if len(raw) == JSON_BYTES:
            raise ValueError(f"the line has more than {JSON_BYTES:,} bytes")
        entry = json_object(raw)
    except (ValueError, TypeError) as error:
        raise bad_request("", f"this is not JSON: {error}", "batch.bad-json") from None
    if entry.keys() != _KEYS.keys():
        what = f"a line is an object of {', '.join(sorted(_KEYS))}"
        raise bad_request("", what, "batch.bad-line")
    expected = {"method": "POST", "url": endpoint}
    for name, kind in _KEYS.items():
        if not isinstance(entry[name], kind) or entry[name] != expected.get(name, entry[name]):
            hint = f"the batch's lines are POST to {endpoint}"
            raise bad_request(name, f"{name} is {shown(entry[name])}", "batch.bad-line", hint)
    return {"custom_id": entry["custom_id"]} | wire.line_of(endpoint, entry["body"], owner)


def _own(value: Any, folder: Path, wire: Wire) -> Any:
    """Paths among the uploads as paths in the batch's folder, with their files; a region may be
    numbers.
    """
    if isinstance(value, list):
        return [_own(one, folder, wire) for one in value]
    if not isinstance(value, str) or Path(value).parent != wire.uploads.folder:
        return value
    path = Path(SOURCES, Path(value).name)
    with suppress(FileExistsError):
        link(Path(value), folder / path)
    return str(path)


def link(source: Path, path: Path) -> None:
    """Put a file under a second name, where the disk can, or a copy."""
    try:
        os.link(source, path)
    except PermissionError:
        shutil.copyfile(source, path)


def _fault(number: int, error: HyimgError) -> Fault:
    refused = refusal_of(error)
    shown = {"line": number or None, "param": refused.param or None}
    return shown | {"code": refused.code, "message": refused.message}
