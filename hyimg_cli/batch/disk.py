"""Files that stand whole or not at all, a folder's lock, and the disk's refusals in plain words."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hyimg_cli.errors import OutputFolderError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed, by us or by the end of the process."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        write_all(lock, f"process {os.getpid()} on {socket.gethostname()} since {started}".encode())
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
        os.close(lock)
        raise OutputFolderError(
            f"another run is writing to this folder: {holder}",
            where=str(path.parent),
            hint="wait for it, stop it, or choose another folder",
            code="output.in-use",
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def make_folders(path: Path) -> None:
    """Makes `path`, a folder in the output folder, and what is missing above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OutputFolderError(
            "a file stands where the output folder should be",
            where=str(path.parent),
            hint="choose another folder with -o",
            code="output.not-a-folder",
        ) from None


def remove_temporaries(folder: Path) -> None:
    """Removes what a killed run had not yet given its final name."""
    for leftover in folder.glob(".*.[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            write_all(file.fileno(), data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, however little the disk takes at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` survive a power cut; some disks cannot, and need not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns the disk's refusals into StorageError."""
    try:
        yield
    except OSError as error:
        raise _storage_error(error, folder) from error


def _storage_error(error: OSError, folder: Path) -> StorageError:
    where = str(folder)
    if error.errno in _FULL:
        hint = "free some space and run the same command again: it resumes"
        return StorageError("the disk is full", where=where, hint=hint, code="storage.full")
    if error.errno in _FORBIDDEN:
        hint = "choose a folder that can be written with -o"
        what = "the folder cannot be written"
        return StorageError(what, where=where, hint=hint, code="storage.read-only")
    what = f"the disk refused: {error.strerror}"
    return StorageError(what, where=where, hint="check the disk", code="storage.failed")
