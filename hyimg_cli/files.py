"""Read files within size limits, write files whole or not at all, and explain disk errors.

In the layer below every room that reads or writes. Open whatever a user names with `opened` alone:
a pipe, a device or a socket would hang the run. Pass every place to write or remove through
`refuse_links`: a link in it may point to other people's files.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hyimg_cli import remote
from hyimg_cli.addresses import address_of
from hyimg_cli.errors import OutputFolderError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_REFUSED = (
    *(errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.EFBIG, errno.EBUSY, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.ENODEV, errno.ENXIO),
)

# Most bytes that are read of a kind of file: many times what an honest one has.
SETTINGS_BYTES = 10_000_000  # a recipe, a scenario, a run's record
TABLE_BYTES = 200_000_000  # a checkpoint's JSON, a tokenizer
MANIFEST_BYTES = 1_000_000_000
JOURNAL_BYTES = 4_000_000_000  # 200,000 jobs with texts of the maximum length
LATENTS_BYTES = 10_000_000_000  # several times a film of minutes
_PIECE_BYTES = 1 << 20
# Maximum levels of a JSON value: twice a manifest's limit, and far below Python's limit for
# writing.
MAX_DEPTH = 200
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# A shell's `<(…)`, and standard input by its name: already open, so opening does not wait.
_OWN_STREAM = re.compile(r"/dev/stdin|/(dev|proc/self)/fd/[0-9]+")


class UnfitFile(OSError):
    """A path that is not a regular file, or is too large for its kind.

    `strerror` says so in plain words; `errno` is EINVAL, EFBIG, or ELOOP for a link in the place of
    a file to write.
    """

    strerror: str

    def __str__(self) -> str:
        return self.strerror


def json_of(text: str | bytes | bytearray, **how: Any) -> Any:
    """Parse JSON; `how` goes to `json.loads`. Raises ValueError, also for very deep nesting."""
    try:
        value = json.loads(text, **how)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Most texts do not have this many brackets.
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value


def refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN and Infinity, which only Python reads; for `parse_constant`."""
    raise ValueError(f"{name} is not a JSON number")


def is_deeper(value: Any, levels: int) -> bool:
    """Return True if lists and objects are nested more than `levels` deep."""
    parts = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return parts is not None and (not levels or any(is_deeper(one, levels - 1) for one in parts))


def opened(path: Path, most: int | None = None, *, or_stream: bool = False) -> io.BufferedReader:
    """Open a regular file of at most `most` bytes for reading; links are followed.

    Of an address, a copy is opened. Never waits for another process or touches a device.
    `or_stream` allows a pipe or terminal that this process was given: `/dev/stdin`, `/dev/fd/N`.
    Raises OSError as `open` does, UnfitFile if the path is not a regular file or is too large.
    """
    if address := address_of(path):
        if (copy := remote.copy_of(address, most)) is not None:
            return copy
        raise UnfitFile(errno.EFBIG, f"the file is too large (limit {most:,} bytes)", address)
    is_stream = or_stream and _OWN_STREAM.fullmatch(str(path)) is not None

    def opener(_name: str, flags: int) -> int:
        if not is_stream:
            return descriptor_of(path, flags, most)
        # The writer of the pipe may have exited, which means the end of the file.
        descriptor = os.open(path, flags | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        return descriptor

    # Libraries that receive the file expect its name to be a text.
    return open(str(path), "rb", opener=opener)


def bytes_of(path: Path, most: int, *, or_stream: bool = False) -> bytes:
    """Read a regular file of at most `most` bytes, even if it grows meanwhile.

    `or_stream`, and what it raises: as `opened`.
    """
    with opened(path, most, or_stream=or_stream) as file:
        return bounded(file, most, str(path), expected=os.fstat(file.fileno()).st_size)


def text_of(path: Path, most: int, *, encoding: str = "utf-8", or_stream: bool = False) -> str:
    """Read a file as text with line feeds only. Raises UnicodeDecodeError, too."""
    data = bytes_of(path, most, or_stream=or_stream)
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding).read()


def bounded(stream: BinaryIO, most: int, name: str, *, expected: int = 0) -> bytes:
    """Read the rest of a buffered stream, in one piece if it has `expected` bytes.

    Raises UnfitFile above `most` bytes.
    """
    pieces, left = [], most + 1
    at_once = max(expected + 1, _PIECE_BYTES)
    while left:
        asked = min(left, at_once)
        pieces.append(stream.read(asked) or b"")
        left -= len(pieces[-1])
        # At a terminal, reading again would wait again.
        if len(pieces[-1]) < asked:
            return b"".join(pieces)
    raise UnfitFile(errno.EFBIG, f"the file is too large (limit {most:,} bytes)", name)


def descriptor_of(path: Path, flags: int, most: int | None = None) -> int:
    """Open a regular file with `flags`; for writing, not through a link. Raises as `opened`."""
    # Check the path first, because opening alone rewinds a tape; the check of the open file
    # decides.
    if os.path.exists(path) or not flags & os.O_CREAT:
        refuse_unfit(path, os.stat(path), most)
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
        if path.is_symlink():
            what = "the path is a link; writing to it would change another file"
            raise UnfitFile(errno.ELOOP, what, str(path))
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    try:
        refuse_unfit(path, os.fstat(descriptor), most)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_unfit(path: Path, status: os.stat_result, most: int | None = None) -> None:
    """Raise as `opened` unless the status is that of a regular file of at most `most` bytes."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "another kind of file")
        raise UnfitFile(errno.EINVAL, f"this is {kind}, not a regular file", str(path))
    if most is not None and status.st_size > most:
        what = f"the file is too large ({status.st_size:,} bytes, limit {most:,})"
        raise UnfitFile(errno.EFBIG, what, str(path))


def refuse_links(place: Path, folder: Path) -> None:
    """Raise UnfitFile if a link leads from `folder` to a `place` outside it."""
    root = os.path.realpath(folder)
    if os.path.commonpath((root, os.path.realpath(place))) != root:
        raise UnfitFile(errno.ELOOP, "a link leads out of the folder", str(place))


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))


def replace_file(path: Path, data: bytes | Iterable[bytes], **how: bool) -> None:
    """Write `data` to `path`, all of it or nothing; `how` goes to `replacing`."""
    with replacing(path, **how) as temporary, open(temporary, "xb", buffering=0) as file:
        for piece in (data,) if isinstance(data, bytes) else data:
            write_all(file.fileno(), piece)


@contextlib.contextmanager
def replacing(path: Path, *, is_lasting: bool = True, syncs_folder: bool = True) -> Iterator[Path]:
    """Give a temporary name to write a file or folder to; afterwards it replaces `path`, whole.

    If the block raises, `path` keeps its old content. `is_lasting=False`: does not wait for the
    disk, so a power cut may lose the file. `syncs_folder=False`: the caller syncs the folder, once
    for many files.
    """
    # With the thread's id: other threads may write the same name at the same time.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    remove(temporary)
    try:
        yield temporary
        is_folder = temporary.is_dir()
        for file in [temporary, *(temporary.iterdir() if is_folder else ())] if is_lasting else ():
            sync(file)
        if is_folder and path.is_dir():
            remove(path)
        os.replace(temporary, path)
        if is_lasting and syncs_folder:
            sync(path.parent)
    except BaseException:
        remove(temporary)
        raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as the disk needs."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync(path: Path) -> None:
    """Make a file's data, or the names in a folder, survive a power cut, if the disk can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def is_of_the_disk(number: int | None) -> bool:
    """Return True if an errno is the disk's; libraries have others."""
    return number in (*_FULL, *_FORBIDDEN, *_REFUSED)


def storage_error(error: OSError, folder: Path) -> StorageError | OutputFolderError:
    """Return the error for an OSError in `folder`, in plain words."""
    if address_of(folder):
        hint = "check the address, the credentials and the network, then run the command again"
        what = f"the store reported an error: {error.strerror or error}"
        return StorageError(what, where=folder, hint=hint, code="storage.store", retryable=True)
    if isinstance(error, UnfitFile):
        what, where = error.strerror, error.filename
        hint = "remove it, or choose another folder with -o"
        if error.errno == errno.ELOOP:
            return OutputFolderError(what, where=where, hint=hint, code="output.link")
        return StorageError(what, where=where, hint=hint, code="storage.not-a-file")
    if error.errno in _FULL:
        hint = "free some space, then run the same command again to resume"
        return StorageError("the disk is full", where=folder, hint=hint, code="storage.full")
    if error.errno in _FORBIDDEN:
        hint = "choose a writable folder with -o"
        what = "the folder is not writable"
        return StorageError(what, where=folder, hint=hint, code="storage.read-only")
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
        hint = "create or restore it, or choose another one, then run the command again"
        return StorageError(
            "the folder does not exist", where=folder, hint=hint, code="storage.gone"
        )
    what = f"the disk reported an error: {error.strerror}"
    return StorageError(what, where=folder, hint="check the disk", code="storage.failed")
