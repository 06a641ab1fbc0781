"""Files that are read within bounds, files that stand whole or not at all and where they were meant
to, and the disk's refusals in plain words.

Below every room that reads or writes files: rooms of one layer may not import each other. Whatever
a user names, or has in a folder that they name, is opened by `opened` alone: a pipe, a device or a
socket would let a run wait for ever. What is written or removed in such a folder passes
`refuse_links`: a link in it may lead to files of others.
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
SETTINGS_BYTES = 10_000_000  # a recipe, a scenario, the record of a run
TABLE_BYTES = 200_000_000  # a checkpoint's JSON, a tokenizer
MANIFEST_BYTES = 1_000_000_000
JOURNAL_BYTES = 4_000_000_000  # 200,000 jobs with texts of the greatest length
LATENTS_BYTES = 10_000_000_000  # of a film of minutes, several times over
_PIECE_BYTES = 1 << 20
# Levels of a JSON value: twice what a manifest may hold, and far below what Python can write.
MAX_DEPTH = 200
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# A shell's `<(…)`, and standard input by its name: open already, so that no other end is awaited.
_OWN_STREAM = re.compile(r"/dev/stdin|/(dev|proc/self)/fd/[0-9]+")


class UnfitFile(OSError):
    """A name that stands for no regular file, or for one of more bytes than are read of its kind.

    `strerror` says so in plain words; `errno` is EINVAL, EFBIG, or ELOOP where a link is in the way
    of what is to be written.
    """

    strerror: str

    def __str__(self) -> str:
        return self.strerror


def json_of(text: str | bytes | bytearray, **how: Any) -> Any:
    """The value of a JSON text; `how`: as `json.loads` takes it. Raises ValueError, and so for what
    is nested so deeply that nobody could compare, copy or write it.
    """
    try:
        value = json.loads(text, **how)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Most texts have no such number of brackets at all.
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value


def refuse_constant(name: str) -> Any:
    """For `parse_constant`: NaN and Infinity are read by Python alone. Raises ValueError."""
    raise ValueError(f"{name} is not a JSON number")


def is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects stand in one another on more than so many levels."""
    parts = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return parts is not None and (not levels or any(is_deeper(one, levels - 1) for one in parts))


def opened(path: Path, most: int | None = None, *, or_stream: bool = False) -> io.BufferedReader:
    """A regular file, behind links too, open for reading; `most`: the bytes it may have.

    Of an address: a copy of what is there. Never waits for another process, and touches no device.
    `or_stream`: a pipe or a terminal as well, where `path` names one that this process was given:
    `/dev/stdin`, `/dev/fd/N`. Raises OSError as `open` does, UnfitFile for what is no regular file
    or too large.
    """
    if address := address_of(path):
        if (copy := remote.copy_of(address, most)) is not None:
            return copy
        raise UnfitFile(errno.EFBIG, f"the file is too large (limit {most:,} bytes)", address)
    is_stream = or_stream and _OWN_STREAM.fullmatch(str(path)) is not None

    def opener(_name: str, flags: int) -> int:
        if not is_stream:
            return descriptor_of(path, flags, most)
        # Whoever wrote into the pipe may be gone already: then it is at its end.
        descriptor = os.open(path, flags | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        return descriptor

    # Libraries that are given the file want its name to be a text.
    return open(str(path), "rb", opener=opener)


def bytes_of(path: Path, most: int, *, or_stream: bool = False) -> bytes:
    """All of a regular file that has no more than `most` bytes, however it grows meanwhile.

    `or_stream`, and what it raises: as `opened`.
    """
    with opened(path, most, or_stream=or_stream) as file:
        return bounded(file, most, str(path), expected=os.fstat(file.fileno()).st_size)


def text_of(path: Path, most: int, *, encoding: str = "utf-8", or_stream: bool = False) -> str:
    """The same as text, its lines ending in a line feed alone. Raises UnicodeDecodeError too."""
    data = bytes_of(path, most, or_stream=or_stream)
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding).read()


def bounded(stream: BinaryIO, most: int, name: str, *, expected: int = 0) -> bytes:
    """The rest of a buffered stream, in one piece where it is as long as `expected`.

    Raises UnfitFile where that is more than `most` bytes.
    """
    pieces, left = [], most + 1
    at_once = max(expected + 1, _PIECE_BYTES)
    while left:
        asked = min(left, at_once)
        pieces.append(stream.read(asked) or b"")
        left -= len(pieces[-1])
        # At a terminal, to ask again is to wait again.
        if len(pieces[-1]) < asked:
            return b"".join(pieces)
    raise UnfitFile(errno.EFBIG, f"the file is too large (limit {most:,} bytes)", name)


def descriptor_of(path: Path, flags: int, most: int | None = None) -> int:
    """A descriptor of a regular file, opened with `flags`; to write, of no link. Raises as `opened`
    does.
    """
    # It is looked at first, since opening alone rewinds a tape; what counts is what was opened.
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
    """Passes the status of a regular file of at most `most` bytes. Raises as `opened` does."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "another kind of file")
        raise UnfitFile(errno.EINVAL, f"this is {kind}, not a regular file", str(path))
    if most is not None and status.st_size > most:
        what = f"the file is too large ({status.st_size:,} bytes, limit {most:,})"
        raise UnfitFile(errno.EFBIG, what, str(path))


def refuse_links(place: Path, folder: Path) -> None:
    """Pass a place in `folder` in which to write or remove; links that lead to the folder itself
    are its user's. Raises UnfitFile where one in it leads out.
    """
    root = os.path.realpath(folder)
    if os.path.commonpath((root, os.path.realpath(place))) != root:
        raise UnfitFile(errno.ELOOP, "a link leads out of the folder", str(place))


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest above it that is there: what it would be made in."""
    return next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))


def replace_file(path: Path, data: bytes | Iterable[bytes], **how: bool) -> None:
    """Writes `data` to `path`, all of it or nothing; `how`: as `replacing` takes it."""
    with replacing(path, **how) as temporary, open(temporary, "xb", buffering=0) as file:
        for piece in (data,) if isinstance(data, bytes) else data:
            write_all(file.fileno(), piece)


@contextlib.contextmanager
def replacing(path: Path, *, is_lasting: bool = True, syncs_folder: bool = True) -> Iterator[Path]:
    """The name under which to write a file or a folder; after the block it stands at `path`, whole.

    A block that raises leaves nothing, and what stood at `path` stays. `is_lasting` off: a power
    cut may leave nothing of it, and nobody waits for the disk. `syncs_folder` off: the name is made
    to last by who calls, for many files at a time.
    """
    # Of the thread: others of this process may write the same name at the same time.
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


def sync(path: Path) -> None:
    """Make a file's data, or the names in a folder, survive a power cut; some disks cannot sync a
    folder, and need not.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def is_of_the_disk(number: int | None) -> bool:
    """True if an errno tells of the disk; a library that writes has other errors too."""
    return number in (*_FULL, *_FORBIDDEN, *_REFUSED)


def storage_error(error: OSError, folder: Path) -> StorageError | OutputFolderError:
    """Explain an error of the disk for `folder`, in plain words."""
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
