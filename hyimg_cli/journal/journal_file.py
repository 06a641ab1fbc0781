"""The file of a journal, and the outcomes in it.

Whole lines are appended unless another process changed the file. Outcomes are untrusted: files
are opened and removed by the paths in them.
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

# Bytes at the end of an existing file that are compared; most lines are no longer.
_TAIL_BYTES = 4096
_NO_JSON = "it is not valid JSON"


class JournalFile:
    """A journal open for appending; detects if it is removed, replaced or changed during a run.

    It reads the file under that name to detect this, because inode numbers are not trusted.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and remove an incomplete last line. Raises OSError."""
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
        # The end of an earlier run's lines is checked like the lines of this run.
        self._end, self._last = len(whole), whole[-_TAIL_BYTES:]

    def close(self) -> None:
        os.close(self._file)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the file, each with its end."""
        with opened(self._path, JOURNAL_BYTES) as file:
            yield from file

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines; all are on disk when this returns.

        Raises as `confirm` does if the file was changed: before the lines are written, or after
        them if it happened at the same time. Raises OSError if the disk refuses; then nothing of
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
        # Only now can a copy that replaced the file be detected.
        self.confirm()

    def confirm(self) -> None:
        """Raise JournalError if the file has changed since this run last wrote it.

        Raises OSError if its folder is gone.
        """
        gone = FileNotFoundError, NotADirectoryError, IsADirectoryError, UnfitFile
        with suppress(*gone), opened(self._path) as file:
            # The file of this name must end with the last line, at the offset of that line.
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
    """Yield the outcomes in the bytes of a journal whose first line has number `first`.

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
    """Return the first field of an outcome with a wrong type or path; empty if there is none.

    Any field may be missing: a picture does not have all fields of a video.
    """
    from pydantic import ValidationError

    try:
        # pydantic rejects half a surrogate pair, so replace it; contents of texts are not checked.
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
    """Return pydantic's reader of a line; built only when needed, because it takes 0.2 s."""
    from pydantic import ConfigDict, TypeAdapter

    @dataclass(frozen=True)
    class Line(Outcome):
        outputs: tuple[VideoFile, ...] = ()  # no field of a picture conflicts with these
        __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    return TypeAdapter(Line)
