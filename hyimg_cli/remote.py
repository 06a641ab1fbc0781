"""Read files of an object store (`s3://bucket/file`), and create them, with fsspec.

fsspec is imported on first use. All errors of a store's library leave this module as OSError, like
those of a disk.
"""

import contextlib
import errno
import hashlib
import io
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from hyimg_cli.addresses import scheme_of
from hyimg_cli.errors import MachineError, UsageError, installation

logger = logging.getLogger(__name__)
# An extra of hyimg has the library of S3. The package of each other store's library:
_S3 = ("s3", "s3a")
_PACKAGES = {
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
_NO_LIBRARY = "install that library, or copy the files to this machine"
# Most libraries raise these with only a name.
_NUMBERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
_SOURCE_FILES = "source-files"
# For S3 only: botocore's waiting time and tries; other stores' libraries have their own rules. Each
# request has its own connection: an answer that a proxy sends twice would count for the next one.
_S3_PATIENCE = {
    "connector_args": {"keepalive_timeout": 0},
    "connect_timeout": 10,
    "read_timeout": 60,
    "retries": {"max_attempts": 8, "mode": "standard"},
}
# HTTP's answers to a conditional write: the file exists; another request for it is in progress; the
# store does not have conditional writes.
_EXISTS, _CONFLICT, _UNKNOWN = 412, 409, 501
_CONFLICT_PAUSES_S = (0.1, 1.0, 5.0)
# Seconds to wait for a store's first answer, and seconds until a warning says that it is slow.
_FIRST_ANSWER_S, _TOLD_S = 10, 2


class UnusableAddress(OSError):
    """An address of a file that this machine cannot open; `fault` says why, and what to do."""

    def __init__(self, fault: MachineError | UsageError) -> None:
        super().__init__(errno.EINVAL, fault.what, str(fault.where))
        self.fault = fault


class Keeps(Protocol):
    """Copies by kind and key: the disk cache."""

    def read(self, kind: str, key: str) -> bytes | None: ...

    def write(self, kind: str, key: str, data: bytes) -> None: ...


_copies: list[Keeps] = []


def keep_copies_in(store: Keeps) -> None:
    """Have this process keep copies of what it reads, by their content's tag."""
    _copies[:] = [store]


def locate(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises MachineError if a library is missing, UsageError if the address is not usable.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:
        what = f"the address is malformed: {error}"
        raise UsageError(what, where=address, code="usage.address") from None
    if parts.password is not None:
        where = f"{parts.scheme}://…@{parts.hostname or ''}{parts.path}"
        what, hint = (
            "an address must not contain a password",
            "set credentials in the environment",
        )
        raise UsageError(what, where=where, hint=f"{hint} or in a profile", code="usage.password")
    try:
        system = _system(parts.scheme)
    except (MachineError, UsageError) as error:
        error.where = address
        raise
    return system, system._strip_protocol(address)


@cache
def _system(scheme: str) -> Any:
    try:
        import fsspec

        # Other writers' files must be visible, so no listing is kept.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if scheme == "s3":
            options["config_kwargs"] = _S3_PATIENCE
        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        hint = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else _NO_LIBRARY
        hint = installation("s3") if scheme in _S3 else hint
        raise MachineError(
            f"{scheme}:// needs a library that is not installed: {error.name or error}",
            hint=hint,
            code="machine.no-package",
        ) from None
    except (ValueError, TypeError, AttributeError, OSError):
        # No library reports that it needs more than an address, such as an archive or a host.
        raise UsageError(
            f"fsspec cannot open {scheme}:// from an address alone",
            hint="use an address such as s3:// or gs://, or put ./ before a path",
            code="usage.address",
        ) from None


@cache
def _answers(store: str) -> bool:
    """Return True if a store answers in time, whatever the answer."""
    system, path = locate(store)
    has_answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            system.exists(path)
        has_answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if has_answered.wait(_TOLD_S):
        return True
    logger.warning("%s has not answered yet; waiting up to %g s", store, _FIRST_ANSWER_S)
    return has_answered.wait(_FIRST_ANSWER_S - _TOLD_S)


def copy_of(address: str, most: int | None = None) -> io.BufferedReader | None:
    """Return a copy of a store's file, open for reading; None above `most` bytes.

    Raises OSError.
    """
    try:
        system, path = locate(address)
    except (MachineError, UsageError) as error:
        raise UnusableAddress(error) from error
    with as_os_errors(address):
        facts = system.info(path)
        if facts.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "the address is a folder", address)
        if most is not None and (facts.get("size") or 0) > most:
            return None
        # A file's content under a tag never changes, so a copy kept under that tag is valid.
        tag = facts.get("ETag") or facts.get("etag") or facts.get("md5Hash")
        store = _copies[0] if tag and _copies else None
        key = hashlib.sha256(f"{address}\n{tag}\n{facts.get('size')}".encode()).hexdigest()
        data = store.read(_SOURCE_FILES, key) if store else None
        if data is None:
            data = bytes(system.cat_file(path))
            if store:
                store.write(_SOURCE_FILES, key, data)
    # Readers get an ordinary file, with a descriptor and a length.
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(data)
        copy.flush()
        return open(copy.name, "rb")


def create_file(system: Any, path: str, data: bytes) -> None:
    """Create a file in a store, whole or not at all.

    Raises FileExistsError if it exists, NotImplementedError if the store or its library cannot
    create a file under that condition, and OSError.
    """
    for pause_s in (*_CONFLICT_PAUSES_S, None):
        try:
            system.pipe_file(path, data, mode="create")
            return
        except TypeError as error:
            raise NotImplementedError(
                f"{type(system).__name__} has no conditional writes"
            ) from error
        except OSError as error:
            # Stores agree on the status only: s3fs takes an answer for FileExistsError by an
            # element that AWS sends, but SeaweedFS and MinIO do not.
            status = _http_status(error)
            if status == _EXISTS:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
            if status == _UNKNOWN:
                raise NotImplementedError(str(error)) from error
            # Two requests conflict; the other may be this process's own, sent again.
            if pause_s is None or status != _CONFLICT:
                raise
            time.sleep(pause_s)


def _http_status(error: OSError) -> int:
    """Return the status of the answer that botocore raised as the cause; 0 without one."""
    response = getattr(error.__cause__, "response", None)
    facts = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(facts.get("HTTPStatusCode", 0))


@contextlib.contextmanager
def as_os_errors(address: str) -> Iterator[None]:
    """Raise the errors of a store's library as OSError with an errno of the disk.

    Also for a store that does not answer its first question in time.
    """
    try:
        scheme = scheme_of(address)
        if scheme in (*_S3, *_PACKAGES) and not _answers(f"{scheme}://{urlsplit(address).netloc}"):
            raise OSError(errno.EIO, f"the store did not answer within {_FIRST_ANSWER_S} s")
        yield
    except tuple(_NUMBERS) as error:
        if error.errno is not None:
            raise
        number = _NUMBERS[type(error)]
        raise OSError(number, os.strerror(number), address) from error
    except Exception as error:
        # NOTE: botocore's errors are not OSErrors, nor are those of some other libraries.
        is_ours = type(error).__module__.partition(".")[0] in ("hyimg_cli", "builtins")
        if is_ours and not isinstance(error, OSError):
            raise
        number = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if type(error).__name__ == "NoCredentialsError":
            words = (
                "credentials are not set: run aws configure, or set AWS_PROFILE, or "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        raise OSError(number, " ".join(words.split()), address) from error
