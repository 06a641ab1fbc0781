"""Files that stand whole or not at all, and the disk's refusals in plain words.

Below every room that writes files: rooms of one layer may not import each other.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hyimg_cli.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_REFUSED = (
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EFBIG,
    errno.EBUSY,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENODEV,
    errno.ENXIO,
)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest above it that is there: what it would be made in."""
    return next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name under which to write a file or a folder; after the block it stands at `path`, whole.

    A block that raises leaves nothing, and what stood at `path` stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(temporary)
    try:
        yield temporary
        for file in [temporary, *(temporary.iterdir() if temporary.is_dir() else ())]:
            _sync(file)
        if path.is_dir():
            remove(path)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        remove(temporary)
        raise


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, or a folder with all in it, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


def is_of_the_disk(number: int | None) -> bool:
    """Whether an errno tells of the disk; a library that writes has other errors too."""
    return number in (*_FULL, *_FORBIDDEN, *_REFUSED)


def storage_error(error: OSError, folder: Path) -> StorageError:
    """What an error of the disk means for `folder`, in plain words."""
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
