"""The file of a journal: whole lines, appended unless another process changed it. Also its
outcomes, which are untrusted: files are opened and removed by the paths in them.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from hyimg_cli.addresses import shown_place
from hyimg_cli.errors import JournalError, OutputFolderError
from hyimg_cli.files import (
    JOURNAL_BYTES,
    UnfitFile,
    bytes_of,
    descriptor_of,
    json_of,
    opened,
    refuse_constant,
    sync,
    write_all,
)
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.events import Outcome, VideoFile

# Of a file that is there already, as much of its end is compared as most lines have.
_TAIL_BYTES = 4096
_NO_JSON = "it is not valid JSON"


class JournalFile:
    """A journal open for appending, which somebody may remove, replace or change during a run.

    This is noticed from what can be read under the file's name: inode numbers are not trusted.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it; half a line at its end is taken off. Raises OSError."""
        self._path = path
        self._file = descriptor_of(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            whole = whole_lines(bytes_of(path, JOURNAL_BYTES))
            os.ftruncate(self._file, len(whole))
            if whole and not whole.endswith(b"\n"):
                write_all(self._file, b"\n")
                whole += b"\n"
            sync(path.parent)
        except BaseException:
            self.close()
            raise
        # What an earlier run wrote last is looked at as what this one did.
        self._end, self._last = len(whole), whole[-_TAIL_BYTES:]

    def close(self) -> None:
        os.close(self._file)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines; all are on disk when this returns.

        Raises as `confirm` does if the file was touched: before the lines are written, or after
        them if it happened at the same time. Raises OSError if the disk refuses: then nothing of
        the lines remains.
        """
        self.confirm()
        data = b"".join(lines)
        try:
            write_all(self._file, data)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end, self._last = self._end + len(data), lines[-1]
        # A copy that was put in the file's place shows only now.
        self.confirm()

    def confirm(self) -> None:
        """Raise JournalError if the file has changed since this run last wrote it, OSError if its
        folder is gone.
        """
        gone = FileNotFoundError, NotADirectoryError, IsADirectoryError, UnfitFile
        with suppress(*gone), opened(self._path) as file:
            # The file of this name must end with the last line, where that was put.
            file.seek(self._end - len(self._last))
            if file.read(len(self._last) + 1) == self._last:
                return
        os.stat(self._path.parent)
        is_there = os.path.lexists(self._path)
        happened = "changed or replaced by another program" if is_there else "removed"
        raise JournalError(
            f"{self._path.name} was {happened} while the run was writing it",
            where=self._path,
            hint="restore it if you can, then run the same command again: it resumes, and runs "
            "jobs without a line again",
        )


def outcomes_in(data: bytes, file: Path, first: int = 1) -> Iterator[dict[str, Any]]:
    """Return the outcomes in the bytes of a journal whose first line has number `first`.

    A last line that a kill cut off is skipped. Raises OutputFolderError for any other line that is
    not an outcome.
    """
    for number, line in lines_in(whole_lines(data), first):
        entry = entry_of(line)
        why = _NO_JSON if entry is None else _find_fault(line, entry)
        if entry is None or why:
            raise OutputFolderError(
                f"this line is not a job's result: {why}",
                where=f"{shown_place(file)}:{number}",
                hint="remove the line: its job runs again",
                code="output.damaged-journal",
            )
        yield entry


def lines_in(data: bytes, first: int = 1) -> Iterator[tuple[int, bytes]]:
    """Return the lines that are not empty, with their numbers."""
    return ((n, line) for n, line in enumerate(data.split(b"\n"), first) if line.strip())


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the outcome in a line, or None if it has none."""
    try:
        entry = json_of(line, parse_constant=refuse_constant)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str) else None


def whole_lines(data: bytes) -> bytes:
    """Return `data` without a last line that was cut off; a whole one may lack its newline."""
    end = data.rfind(b"\n") + 1
    return data if entry_of(data[end:]) is not None else data[:end]


def _find_fault(line: bytes, entry: Mapping[str, Any]) -> str:
    """The first field of an outcome that is not of its kind; empty where all are. Any may be
    missing: a picture has not all fields of a video.
    """
    from pydantic import ValidationError

    try:
        # Half a surrogate pair is no JSON to pydantic; what a text says is not looked at.
        _line_adapter().validate_json(re.sub(rb"\\u[dD]", rb"\\ue", line), strict=True)
    except ValidationError as error:
        places = (one["loc"] for one in error.errors() if one["type"] != "missing")
        if (place := next(places, None)) is not None:
            return f"{place[0]} is {shown(entry[str(place[0])])}" if place else _NO_JSON
    for output in entry.get("outputs", ()):
        frames = output.get("frames_path")
        for path in (output.get("path", ""), *([] if frames is None else [frames])):
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path:
                return f"outputs is {shown(entry['outputs'])}"
    return ""


@cache
def _line_adapter() -> Any:
    """pydantic's reader of a line; built where there is one to read: it takes 0.2 s."""
    from pydantic import ConfigDict, TypeAdapter

    @dataclass(frozen=True)
    class Line(Outcome):
        outputs: tuple[VideoFile, ...] = ()  # of a picture's none of its fields is another's
        __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    return TypeAdapter(Line)
