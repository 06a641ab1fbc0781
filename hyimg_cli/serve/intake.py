"""Turn a batch's input file into its manifest, with its faults, and pictures in its folder.

input.jsonl          the file as uploaded
manifest.jsonl       the same requests; each keeps its line number
sources/<sha256>     their pictures, which stay when the uploads are deleted
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hyimg_cli.engine import runner
from hyimg_cli.errors import HyimgError
from hyimg_cli.files import opened, replace_file, sync
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.journal.journal import json_line
from hyimg_cli.manifest.ids import IdClaims
from hyimg_cli.manifest.manifest import line_number, manifest_of
from hyimg_cli.serve.bodies import JSON_BYTES, json_object
from hyimg_cli.serve.errors import Refused, bad_request, refusal_of
from hyimg_cli.serve.results import MANIFEST, REQUEST_ID
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.values import shown

INPUT, SOURCES = "input.jsonl", "sources"
MOST_LINES = 50_000
# The last fault of a longer list gives the number of the others.
_MOST_FAULTS = 1_000
# Fields of a line that may name files.
_FILES = ("images", "region")
_KEYS = {"custom_id": str, "method": str, "url": str, "body": dict}
_KINDS = {str: "text", dict: "an object"}

Fault = dict[str, Any]


def write_manifest(folder: Path, endpoint: str, owner: str, wire: Wire) -> list[Fault]:
    """Write the manifest of a batch's folder, or return the faults of its input and write none.

    Raises StorageError.
    """
    faults, lines, claims = dict[int, list[Fault]](), list[bytes](), IdClaims()
    with disk_errors(folder):
        make_folders(folder / SOURCES)
        for number, raw in _raw_lines(folder / INPUT):
            line = dict[str, Any]()
            try:
                if raw.strip():
                    asked = _line_of(raw, number, endpoint, owner, wire)
                    line = _with_job_id(asked, number, claims)
            except Refused as refused:
                faults[number] = [_fault(number, refused)]
            line |= {name: _own(line[name], folder, wire) for name in _FILES if name in line}
            lines.append(json_line(line) if line else b"\n")
    data = b"".join(lines)
    # If every line is faulty, do not report an empty file as well.
    if data.strip() or not faults:
        manifest = manifest_of(data, MANIFEST, folder=folder)
        for error in runner.examine(manifest, wire.settings)[1]:
            number = line_number(manifest, error)
            sent = json.loads(lines[number - 1]) if number else {}
            faults.setdefault(number, []).append(_fault(number, error, sent))
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
    """Yield a file's lines with their numbers; the last one may exceed a limit."""
    with opened(path) as file:
        for number, raw in enumerate(iter(partial(file.readline, JSON_BYTES), b""), 1):
            yield number, raw
            if number > MOST_LINES or (len(raw) == JSON_BYTES and not raw.endswith(b"\n")):
                return


def _line_of(raw: bytes, number: int, endpoint: str, owner: str, wire: Wire) -> dict[str, Any]:
    """Return a line of the input as a line of the manifest. Raises Refused."""
    if number > MOST_LINES:
        what, hint = f"the file has more than {MOST_LINES:,} lines", "split it into several batches"
        raise bad_request("", what, "batch.too-many-lines", hint)
    if len(raw) == JSON_BYTES:
        raise bad_request("", f"the line has more than {JSON_BYTES:,} bytes", "batch.bad-json")
    entry = {"method": "POST"} | json_object(raw, "the line", "batch.bad-json")
    for name in entry.keys() ^ _KEYS.keys():
        what = f"unknown key {shown(name)}" if name in entry else f"the line has no {name}"
        hint = f"a line has the keys {', '.join(_KEYS)}"
        raise bad_request(name, what, "batch.bad-line", hint)
    for name, kind in _KEYS.items():
        if not isinstance(entry[name], kind):
            what = f"{name} is {shown(entry[name])}, expected {_KINDS[kind]}"
            raise bad_request(name, what, "batch.bad-line")
    if (entry["method"].upper(), entry["url"]) != ("POST", endpoint):
        name = "url" if entry["url"] != endpoint else "method"
        hint = f"each line of this batch must be a POST to {endpoint}"
        raise bad_request(name, f"{name} is {shown(entry[name])}", "batch.bad-line", hint)
    line = wire.line_of(endpoint, entry["body"], owner)
    line.pop(REQUEST_ID, None)
    return {"custom_id": entry["custom_id"]} | line


def _with_job_id(line: dict[str, Any], number: int, claims: IdClaims) -> dict[str, Any]:
    """Return a line with an id that can name its job, and with the request's own.

    Raises Refused.
    """
    asked, count = line["custom_id"], line.get("n", 1)
    named = {"custom_id": asked, "n": count if type(count) is int else 1}
    for error in claims.claim_request(named, number, "custom_id"):
        raise bad_request("custom_id", error.what, error.code, error.hint)
    if named["custom_id"] == asked:
        return line
    return line | {"custom_id": named["custom_id"], REQUEST_ID: asked}


def _own(value: Any, folder: Path, wire: Wire) -> Any:
    """Link uploads into the batch's folder and return their paths there; a box is unchanged."""
    if isinstance(value, list):
        return [_own(one, folder, wire) for one in value]
    if not isinstance(value, str) or Path(value).parent != wire.uploads.folder:
        return value
    path = Path(SOURCES, Path(value).name)
    with suppress(FileExistsError):
        link(Path(value), folder / path)
    return str(path)


def link(source: Path, path: Path) -> None:
    """Give a file a second name, or copy it if the disk does not support links."""
    try:
        os.link(source, path)
    except PermissionError:
        shutil.copyfile(source, path)


def _fault(number: int, error: HyimgError, sent: Iterable[str] = ()) -> Fault:
    refused = refusal_of(error, sent)
    shown = {"line": number or None, "param": refused.param or None}
    return shown | {"code": refused.code, "message": refused.message}
