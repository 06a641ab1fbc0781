"""The file of a journal: whole lines, appended, and kept where somebody touches it meanwhile."""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
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
    sync_folder,
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
        self._ours: dict[str, bytes] = {}
        self._go_on_in(_opened(path))

    def close(self) -> None:
        os.close(self._file)

    def append(self, lines: Sequence[tuple[str, bytes]]) -> None:
        """Add lines, each with the job that it is about; all are on disk when this returns.

        Raises JournalError where the file was touched meanwhile: the lines are in it all the same.
        Raises OSError where the disk refuses: nothing of the lines is left.
        """
        fault, data = None, b"".join(line for _, line in lines)
        with suppress(FileNotFoundError):  # a folder that was moved has its journal with it
            fault = self._mended()
        length = os.fstat(self._file).st_size
        try:
            write_all(self._file, data)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, length)
            raise
        self._ours.update(lines)
        self._end, self._last = length + len(data), lines[-1][1]
        # A copy that was put in the file's place shows only now.
        fault = self._mended() or fault
        if fault is not None:
            raise fault

    def confirm(self) -> None:
        """Raises as `append` does where the file was touched since."""
        fault = self._mended()
        if fault is not None:
            raise fault

    def _go_on_in(self, file: int) -> None:
        self._file, self._end = file, os.fstat(file).st_size
        # What an earlier run wrote last is looked at as what this one did.
        length = min(self._end, _TAIL_BYTES)
        self._last = os.pread(file, length, self._end - length)

    def _stands(self) -> bool:
        """True if the file of this name ends with the last line, where that was put."""
        try:
            found = descriptor_of(self._path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnfitFile):
            return False
        try:
            if os.fstat(found).st_size != self._end:
                return False
            return os.pread(found, len(self._last), self._end - len(self._last)) == self._last
        finally:
            os.close(found)

    def _mended(self) -> JournalError | None:
        """None where the file is as it was left. Else what to say of it: the last line of each of
        this run's jobs is then in what stands there now; where no outcome is, all lines are.
        """
        if self._stands():
            return None
        happened = self._cleared()
        file = _opened(self._path)
        try:
            lost: list[bytes] = []
            there = _attempts(_outcomes(_bytes_of(file)))
            if not there:
                lost = _outcomes(_bytes_of(self._file))
                there = _attempts(lost)
            lost += [
                line for job, line in self._ours.items() if there.get(job, -1) < _attempt(line)
            ]
            write_all(file, b"".join(lost))
            os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._go_on_in(file)
        return JournalError(
            f"{self._path.name} was {happened} while the run was writing it",
            where=self._path,
            hint=f"lines put back: {len(lost)}; run the same command again: it resumes, and makes "
            "again what has no line",
        )

    def _cleared(self) -> str:
        """The fault that happened to the file. Something else under its name gets another name."""
        if not os.path.lexists(self._path):
            return "removed"
        happened = "changed or replaced by another program"
        if _may_be_journal(self._path):
            return happened
        names = (self._path.with_name(f"{self._path.name}.other{n or ''}") for n in count())
        other = next(name for name in names if not os.path.lexists(name))
        self._path.rename(other)
        return f"{happened} (what stood there is {other.name} now)"


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


def _outcomes(data: bytes) -> list[bytes]:
    """The lines that hold an outcome, each with its end."""
    return [line + b"\n" for line in data.split(b"\n") if entry_of(line) is not None]


def _attempts(lines: Iterable[bytes]) -> dict[str, int]:
    """Which attempt at each job the last line about it tells of."""
    return {json.loads(line)["custom_id"]: _attempt(line) for line in lines}


def _attempt(line: bytes) -> int:
    attempt = json.loads(line).get("attempt")
    return attempt if isinstance(attempt, int) else 0


def _may_be_journal(path: Path) -> bool:
    """True if it is a file that has an outcome, or nothing."""
    if not path.is_file():
        return False
    data = bytes_of(path, JOURNAL_BYTES)
    return not data.strip() or bool(_outcomes(data))


def _bytes_of(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _opened(path: Path) -> int:
    """The journal opened for appending, ending in a whole line."""
    journal = descriptor_of(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        data = bytes_of(path, JOURNAL_BYTES)
        whole = whole_lines(data)
        os.ftruncate(journal, len(whole))
        if whole and not whole.endswith(b"\n"):
            write_all(journal, b"\n")
        sync_folder(path.parent)
    except BaseException:
        os.close(journal)
        raise
    return journal
