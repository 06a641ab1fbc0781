"""The file of a journal: whole lines, appended until somebody else touches it."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyimg_cli.errors import JournalError
from hyimg_cli.files import (
    JOURNAL_BYTES,
    UnfitFile,
    bytes_of,
    descriptor_of,
    json_of,
    refuse_constant,
    sync,
    write_all,
)

# Of a file that is there already, as much of its end is compared as most lines have.
_TAIL_BYTES = 4096


class JournalFile:
    """A journal open for appending. Somebody may remove, replace or change it while a run goes.

    That is noticed by what can be read under the file's name: no disk's file numbers are trusted.
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
            sync(path.parent)
        except BaseException:
            self.close()
            raise
        self._end = os.fstat(self._file).st_size
        # What an earlier run wrote last is looked at as what this one did.
        length = min(self._end, _TAIL_BYTES)
        self._last = os.pread(self._file, length, self._end - length)

    def close(self) -> None:
        os.close(self._file)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines; all are on disk when this returns.

        Raises as `confirm` does where the file was touched: before the lines are written, or, where
        it happened meanwhile, behind them. Raises OSError where the disk refuses: nothing of the
        lines is left.
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
        """Raises JournalError where the file is no longer as this run left it, OSError where its
        folder is gone.
        """
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, UnfitFile):
            found = descriptor_of(self._path, os.O_RDONLY)
            try:
                # The file of this name must end with the last line, where that was put.
                last = os.pread(found, len(self._last), self._end - len(self._last))
                if os.fstat(found).st_size == self._end and last == self._last:
                    return
            finally:
                os.close(found)
        os.stat(self._path.parent)
        is_there = os.path.lexists(self._path)
        happened = "changed or replaced by another program" if is_there else "removed"
        raise JournalError(
            f"{self._path.name} was {happened} while the run was writing it",
            where=self._path,
            hint="put it back if you can, then run the same command again: it resumes, and makes "
            "again what has no line",
        )


def entry_of(line: bytes) -> dict[str, Any] | None:
    """The outcome in a line, or None where it holds none."""
    try:
        entry = json_of(line, parse_constant=refuse_constant)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str) else None


def whole_lines(data: bytes) -> bytes:
    """`data` without a last line that was cut off; a whole last line may lack its newline."""
    end = data.rfind(b"\n") + 1
    return data if entry_of(data[end:]) is not None else data[:end]
