"""The output folder on its disk: its lock, its folders, and disk errors."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hyimg_cli.errors import OutputFolderError, StorageError
from hyimg_cli.files import descriptor_of, nearest_existing, opened, storage_error, write_all


def take_lock(path: Path, held: contextlib.ExitStack, wait_s: float = 0.0) -> int:
    """Return the descriptor of a lock, held until `held` closes it or the process ends.

    Raises OutputFolderError if another process holds it for longer than `wait_s`.
    """
    lock = descriptor_of(path, os.O_RDWR | os.O_CREAT)
    held.callback(os.close, lock)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise in_use(path.parent, find_holder(path)) from None
            time.sleep(0.02)
    os.ftruncate(lock, 0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    write_all(lock, f"process {os.getpid()} on {socket.gethostname()} since {started}".encode())
    return lock


def in_use(folder: Path, holder: str = "") -> OutputFolderError:
    """Return the error of a folder that another run writes to."""
    by = f": {holder}" if holder else ""
    return OutputFolderError(
        f"another run is writing to this folder{by}",
        where=folder,
        hint="wait for it, stop it, or choose another folder",
        code="output.in-use",
    )


def taken_over(folder: Path, holder: str = "") -> StorageError:
    """Return the error of a run that another run has replaced and that must not write any more."""
    by = f": {holder}" if holder else ""
    return StorageError(
        f"another run is writing to this folder{by}; this run lost its lock",
        where=folder,
        hint="wait for it, then run the same command again to resume",
        code="storage.in-use",
    )


def find_holder(lock: Path) -> str:
    """Return the run that holds a lock, as it wrote there; empty if none does."""
    with contextlib.suppress(OSError), opened(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200).decode(errors="replace") or "another process"
    return ""


def is_process(number: int) -> bool:
    """Return True if a process of this number runs on this machine."""
    import psutil

    return bool(psutil.pid_exists(number))


def make_folders(path: Path) -> None:
    """Create `path`, a folder in the output folder, and its missing parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _is_a_file(path) from None


def refuse_place(path: Path) -> None:
    """Raise the error with which `make_folders` would fail; makes nothing.

    Raises OSError if the nearest existing folder is not writable.
    """
    there = nearest_existing(path)
    if not there.is_dir():
        raise _is_a_file(path)
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def _is_a_file(path: Path) -> OutputFolderError:
    return OutputFolderError(
        "the output folder is a file",
        where=path.parent,
        hint="choose another folder with -o",
        code="output.not-a-folder",
    )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise disk errors in the block as StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, folder) from error
