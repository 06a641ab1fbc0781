"""A bounded cache of bytes on disk, named by content; several processes may share a folder.

    folder/kind/key          an entry: a line with checksum and length, then the bytes
    folder/kind/.key.….tmp   an entry being written; it is renamed when it is whole

The cache never fails a job: a disk error is a miss and a note.
"""

import contextlib
import hashlib
import io
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hyimg_cli.errors import StorageError
from hyimg_cli.files import UnfitFile, nearest_existing, opened, refuse_links

Value = TypeVar("Value")
SOURCE_IMAGES = "source-images"
SOURCE_FILES = "source-files"
CHECKED_SOURCES = "checked-sources"
PROMPT_EMBEDDINGS = "prompt-embeddings"
START_PICTURES = "start-pictures"
RATES = "rates"
CHECKED_CHECKPOINTS = "checked-checkpoints"
QUANTIZED_WEIGHTS = "quantized-weights"
KINDS = (
    SOURCE_IMAGES,
    SOURCE_FILES,
    CHECKED_SOURCES,
    PROMPT_EMBEDDINGS,
    START_PICTURES,
    RATES,
    CHECKED_CHECKPOINTS,
    QUANTIZED_WEIGHTS,
)
_KIND = re.compile(r"[a-z]+(-[a-z]+)*", re.ASCII)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HEADER = re.compile(rb"hyimg-store 1 ([0-9a-f]{64}) ([0-9]{1,18})\n")
_HEADER_BYTES = 128
# Younger files may belong to a process that is still writing.
_ABANDONED_AFTER_S = 3600
# Fraction of the budget after which the folder is listed again, because other processes write to it
# too.
_LOOK_AFTER = 1 / 64


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its size in bytes, and when it was last read or written."""

    kind: str
    key: str
    nbytes: int
    used_ns: int


class DiskStore:
    """Bytes by kind and key (a hex sha256); the least recently used entries are evicted first.

    Without a `folder`, or with a budget of 0, nothing is found or kept.
    """

    def __init__(self, folder: Path | None, budget_bytes: int) -> None:
        self._folder = folder if budget_bytes > 0 else None
        self._budget = budget_bytes
        self._notes: list[str] = []
        self.takes_more = self._folder is not None
        # Bytes that may still be written before the folder is listed again.
        self._unseen = 0

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all entries on disk."""
        return sum(entry.nbytes for entry in self.entries())

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the bytes of an entry, or None; a damaged entry is removed and noted."""
        path = self._path(kind, key)
        return self._data(path, kind, key) if path else None

    def read_through(
        self,
        kind: str,
        key: str,
        make: Callable[[], Value],
        *,
        pack: Callable[[Value], bytes],
        unpack: Callable[[bytes], Value],
    ) -> tuple[Value, bool]:
        """Return an entry's value and whether it was a hit; on a miss, make and keep it.

        `unpack` raises ValueError for bytes that `pack` did not write: such an entry is removed.
        """
        data = self.read(kind, key)
        if data is not None:
            try:
                return unpack(data), True
            except ValueError:
                self.discard(kind, key)
        made = make()
        if self.takes_more:
            self.write(kind, key, pack(made))
        return made, False

    def has(self, kind: str, key: str) -> bool:
        """Return True if an entry has its full length; its checksum is tested on reading."""
        path = self._path(kind, key)
        if path is None:
            return False
        try:
            with opened(path) as file:
                return _read_header(file) is not None
        except OSError:
            return False

    def write(self, kind: str, key: str, data: bytes) -> None:
        """Keep `data` if it fits the budget, and evict entries beyond the budget.

        After the first disk error nothing more is written; existing entries are still read.
        """
        path = self._path(kind, key)
        header = b"hyimg-store 1 %s %d\n" % (_checksum(kind, key, data), len(data))
        if path is None or not self.takes_more or len(header) + len(data) > self._budget:
            return
        try:
            refuse_links(path.parent, path.parent.parent)
            _write_whole(path, header, data)
            self._unseen -= len(header) + len(data)
            if self._unseen < 0:
                self._evict()
        except OSError as error:
            self._stop_taking(error)

    def discard(self, kind: str, key: str) -> None:
        """Remove a damaged entry and note it."""
        path = self._path(kind, key)
        if path is not None:
            self._notes.append(f"a damaged entry of the disk cache ({kind}) was removed")
            with contextlib.suppress(OSError):
                refuse_links(path.parent, path.parent.parent)
                path.unlink(missing_ok=True)

    def take_notes(self) -> tuple[str, ...]:
        """Return the faults since the last call, worded for a result line."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def entries(self) -> list[Entry]:
        """Return every entry, least recently used first. Raises StorageError."""
        with _refusals():
            return self._entries()

    def clear(self, kind: str | None = None) -> list[Entry]:
        """Remove the entries of a kind, or all; return the removed ones. Raises StorageError."""
        with _refusals():
            gone = [entry for entry in self._entries() if kind in (None, entry.kind)]
            for entry in gone:
                self._remove(entry)
            self._remove_abandoned()
        return gone

    def _path(self, kind: str, key: str) -> Path | None:
        if not (_KIND.fullmatch(kind) and _KEY.fullmatch(key)):
            raise ValueError(f"{kind}/{key} cannot name an entry")
        return self._folder / kind / key if self._folder else None

    def _data(self, path: Path, kind: str, key: str) -> bytes | None:
        try:
            with opened(path) as file:
                promised = _read_header(file)
                data = file.read(promised[1]) if promised else b""
        except FileNotFoundError:
            return None
        except UnfitFile:
            self.discard(kind, key)
            return None
        except OSError as error:
            self._stop_taking(error)
            return None
        if promised is None or promised[0] != _checksum(kind, key, data):
            self.discard(kind, key)
            return None
        # Another process may have evicted it, or another user may own it.
        with contextlib.suppress(OSError):
            refuse_links(path.parent, path.parent.parent)
            _touch(path)
        return data

    def _evict(self) -> None:
        self._remove_abandoned()
        entries = self._entries()
        excess = sum(entry.nbytes for entry in entries) - self._budget
        self._unseen = max(0, min(-excess, int(self._budget * _LOOK_AFTER)))
        for entry in entries:
            if excess <= 0:
                return
            self._remove(entry)
            excess -= entry.nbytes

    def _remove(self, entry: Entry) -> None:
        path = self._path(entry.kind, entry.key)
        assert path is not None, "a listed entry lies in a folder"
        path.unlink(missing_ok=True)

    def _entries(self) -> list[Entry]:
        found = [
            Entry(kind, name, status.st_size, status.st_mtime_ns)
            for kind, name, status in self._files()
            if _KEY.fullmatch(name)
        ]
        return sorted(found, key=lambda entry: (entry.used_ns, entry.key))

    def _remove_abandoned(self) -> None:
        """Remove what killed processes were writing."""
        oldest_ns = time.time_ns() - _ABANDONED_AFTER_S * 10**9
        for kind, name, status in self._files():
            is_temporary = _KEY.fullmatch(name[1:65]) and name.endswith(".tmp")
            if self._folder and is_temporary and status.st_mtime_ns < oldest_ns:
                (self._folder / kind / name).unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """Yield kind, name and status of the regular files in the folders of entries."""
        for kind in _list_folder(self._folder) if self._folder else []:
            if _KIND.fullmatch(kind.name) and kind.is_dir(follow_symlinks=False):
                for file in _list_folder(Path(kind.path)):
                    with contextlib.suppress(FileNotFoundError):
                        if file.is_file(follow_symlinks=False):
                            yield kind.name, file.name, file.stat()

    def _stop_taking(self, error: OSError) -> None:
        if self.takes_more:
            reason = error.strerror or type(error).__name__
            self._notes.append(f"the disk cache is read-only for the rest of this run: {reason}")
        self.takes_more = False


def refuse_cache_file(folder: Path | None) -> None:
    """Raise StorageError if the cache folder, or a folder above it, is a file."""
    above = nearest_existing(folder) if folder else None
    if above is not None and not above.is_dir():
        hint = "choose another folder with --cache-dir, or turn the cache off with --no-disk-cache"
        what = "the folder of the disk cache is a file"
        raise StorageError(what, where=above, hint=hint, code="storage.cache")


def _read_header(file: io.BufferedReader) -> tuple[bytes, int] | None:
    """Read the checksum and the length at the start of an entry; None if it is too short."""
    header = file.readline(_HEADER_BYTES)
    parts = _HEADER.fullmatch(header)
    if parts is None or os.fstat(file.fileno()).st_size != len(header) + int(parts[2]):
        return None
    return parts[1], int(parts[2])


def _checksum(kind: str, key: str, data: bytes) -> bytes:
    """Return the hex digest of the bytes and their name: a misnamed entry counts as damaged."""
    checksum = hashlib.sha256(f"{kind}/{key}\n".encode())
    checksum.update(data)
    return checksum.hexdigest().encode()


def _write_whole(path: Path, *parts: bytes) -> None:
    """Write all of `parts` to `path`, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        _touch(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _touch(path: Path) -> None:
    """Mark `path` as used now.

    Both times are set, because file systems differ in how they record access times.
    """
    now = time.time_ns()
    os.utime(path, ns=(now, now), follow_symlinks=False)


def _list_folder(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the disk cache cannot be used: {error.strerror}"
        hint = "choose another folder with --cache-dir"
        where = str(error.filename or "")
        raise StorageError(what, where=where, hint=hint, code="storage.cache") from error
