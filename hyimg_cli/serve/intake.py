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
from hyimg_cli.files import json_of, opened, refuse_constant, replace_file, sync
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.journal.journal import json_line
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.serve.bodies import JSON_BYTES
from hyimg_cli.serve.errors import Refused
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.values import shown

INPUT, MANIFEST, SOURCES = "input.jsonl", "manifest.jsonl", "sources"
MOST_LINES = 50_000
# Of faults so many are told; the last one says how many more there are.
_MOST_FAULTS = 5_000
_KEYS = {"custom_id", "method", "url", "body"}
# Fields of a line that name files.
_FILES = ("images", "region")

Fault = dict[str, Any]


class Intake:
    """One batch's folder while its input is read."""

    def __init__(self, folder: Path, endpoint: str, owner: str, wire: Wire) -> None:
        self._folder, self._endpoint, self._owner, self._wire = folder, endpoint, owner, wire

    def accept(self, settings: Mapping[str, Setting]) -> list[Fault]:
        """Write the manifest, or return its faults and write none. Raises StorageError."""
        faults, lines = dict[int, list[Fault]](), list[bytes]()
        with disk_errors(self._folder):
            make_folders(self._folder / SOURCES)
            for number, raw in self._raw_lines():
                try:
                    lines.append(json_line(self._line(raw, number)) if raw.strip() else b"\n")
                except Refused as bad:
                    faults[number] = [_fault(number, bad.param, bad)]
                    lines.append(b"\n")
        data = b"".join(lines)
        manifest = manifest_of(data, MANIFEST, folder=self._folder)
        # Where no line is left, that it is empty is said of the file alone.
        if data.strip() or not faults:
            for error in runner.examine(manifest, settings)[1]:
                place = re.fullmatch(rf"{MANIFEST}:([0-9]+)(?:: (.*))?", error.where, re.DOTALL)
                number, param = (int(place[1]), place[2] or "") if place else (0, error.where)
                faults.setdefault(number, []).append(_fault(number, param, error))
        found = [fault for number in sorted(faults) for fault in faults[number]]
        if len(found) > _MOST_FAULTS:
            more = len(found) - _MOST_FAULTS + 1
            rest = Refused(400, f"{more:,} more faults are not listed", code="batch.more-faults")
            found[_MOST_FAULTS - 1 :] = [_fault(0, "", rest)]
        if not found:
            with disk_errors(self._folder):
                sync(self._folder / SOURCES)
                replace_file(self._folder / MANIFEST, data)
        return found

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines of the input with their numbers. The last one may be a fault of the file."""
        with opened(self._folder / INPUT) as file:
            number = 0
            while raw := file.readline(JSON_BYTES):
                number += 1
                yield number, raw
                if number > MOST_LINES or (len(raw) == JSON_BYTES and not raw.endswith(b"\n")):
                    return

    def _line(self, raw: bytes, number: int) -> dict[str, Any]:
        """A line of the input as one of the manifest. Raises Refused."""
        if number > MOST_LINES:
            what = f"the file has more than {MOST_LINES:,} lines"
            raise Refused(400, what, hint="make several batches", code="batch.too-many-lines")
        try:
            if len(raw) == JSON_BYTES:
                raise ValueError(f"the line has more than {JSON_BYTES:,} bytes")
            entry = json_of(raw.decode(), parse_constant=refuse_constant)
        except ValueError as error:
            raise Refused(400, f"this is not JSON: {error}", code="batch.bad-json") from None
        if not isinstance(entry, dict) or entry.keys() != _KEYS:
            what = f"a line is an object of {', '.join(sorted(_KEYS))}"
            raise Refused(400, what, code="batch.bad-line")
        is_right = {
            "custom_id": isinstance(entry["custom_id"], str),
            "method": entry["method"] == "POST",
            "url": entry["url"] == self._endpoint,
            "body": isinstance(entry["body"], dict),
        }
        for name in (name for name, right in is_right.items() if not right):
            what = f"{name} is {shown(entry[name])}"
            hint = f"the batch's lines are POST to {self._endpoint}"
            raise Refused(400, what, param=name, hint=hint, code="batch.bad-line")
        line = self._wire.line_of(self._endpoint, entry["body"], self._owner)
        own = {name: self._own(line[name]) for name in _FILES if name in line}
        return {"custom_id": entry["custom_id"]} | line | own

    def _own(self, value: Any) -> Any:
        """A path among the uploads as one in the batch's folder, with its file; others as they are:
        the region of an edit may be numbers.
        """
        if isinstance(value, list):
            return [self._own(one) for one in value]
        if not isinstance(value, str) or Path(value).parent != self._wire.uploads.folder:
            return value
        path = Path(value)
        own = self._folder / SOURCES / path.name
        with suppress(FileExistsError):
            link(path, own)
        return f"{SOURCES}/{path.name}"


def link(source: Path, path: Path) -> None:
    """Put a file under a second name, where the disk can, or a copy."""
    try:
        os.link(source, path)
    except PermissionError:
        shutil.copyfile(source, path)


def _fault(number: int, param: str, error: HyimgError) -> Fault:
    message = f"{error.what} ({error.hint})" if error.hint else error.what
    return {"line": number or None, "param": param or None, "code": error.code, "message": message}
