"""Callers' files: content is stored once, each caller sees only its own files.

    STATE/files/<id>         the record of a file: owner, name, purpose, sha256
    STATE/uploads/<sha256>   the content of one or more files, or a picture of a request

The output files of batches have a record but no content here: they are made as they are read.
"""

import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, Field, InstanceOf, WithJsonSchema

from hyimg_cli.errors import HyimgError, SourceImageError
from hyimg_cli.files import SETTINGS_BYTES, remove, replace_file, replacing
from hyimg_cli.journal.disk import disk_errors, make_folders, take_lock
from hyimg_cli.journal.journal import LOCK
from hyimg_cli.media.images import probe_image
from hyimg_cli.serve.errors import Refused, bad_request, too_large
from hyimg_cli.serve.records import FileRecord, due_at, entries, read_record

logger = logging.getLogger(__name__)
MOST_FILES = 100_000
_PICTURE_PIXELS = 25_000_000
_MOST_CHECKED = 10_000
_SHOWN = ("id", "bytes", "created_at", "filename", "purpose", "expires_at")
# Content without a record is kept for this long: waiting requests may need it.
_UNNAMED_S = 3600.0
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Upload:
    """Content on the disk, and the name that its sender gave it."""

    sha256: str
    nbytes: int
    filename: str
    path: Path

    def __str__(self) -> str:  # in messages
        return f"the file {self.filename}"


class Expiry(BaseModel, extra="forbid"):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86_400)]


class FileForm(BaseModel):
    """The fields of an upload."""

    purpose: Literal["batch", "vision", "user_data", "assistants"]
    expires_after: Expiry | None = None
    file: Annotated[InstanceOf[Upload], WithJsonSchema({"type": "string", "format": "binary"})]


class Page(BaseModel):
    """The part of a list to return."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str = ""

    def of(self, every: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the page of a list that is in order of creation. Raises Refused."""
        items = list(every) if self.order == "asc" else list(every)[::-1]
        if self.after:
            names = [one["id"] for one in items]
            if self.after not in names:
                raise bad_request("after", f"the list does not contain {self.after[:80]}")
            items = items[names.index(self.after) + 1 :]
        data = items[: self.limit]
        found = {"object": "list", "data": data, "has_more": len(items) > len(data)}
        ends = [one["id"] for one in (*data[:1], *data[-1:])] or [None]
        return found | {"first_id": ends[0], "last_id": ends[-1]}


class Uploads:
    """The files of all callers. Holds the lock of the state folder.

    `made` returns the content of a batch's output file, `forget` removes it; `Batches` sets both,
    and then sweeps.
    """

    # Limits of one file, and of all.
    most_bytes, total_bytes = 200_000_000, 100_000_000_000
    made: Callable[[Mapping[str, Any]], Iterator[bytes]]
    forget: Callable[[Mapping[str, Any]], object]

    def __init__(self, state: Path) -> None:
        """Raises StorageError, and OutputFolderError if another server uses the folder."""
        self._files, self.folder = state / "files", state / "uploads"
        self._lock = threading.RLock()
        # Pictures are decoded one at a time: each may take 100 MB.
        self.decoding = threading.RLock()
        self.checked = lru_cache(_MOST_CHECKED)(self._checked)
        self._used, self._held = 0, ExitStack()
        with disk_errors(state):
            make_folders(state)
            take_lock(state / LOCK, self._held)
            for folder in (self._files, self.folder):
                make_folders(folder)
            read = (
                read_record(path, path.name, FileRecord, SETTINGS_BYTES)
                for path in entries(self._files)
            )
            found = [record for record in read if record]
            list(entries(self.folder))
        found.sort(key=lambda one: (one["came"], one["id"]))  # `created_at` is whole seconds
        self._records: dict[str, dict[str, Any]] = {one["id"]: one for one in found}
        # On the clock that cannot be set: when files expire, and when content was last used.
        self._due = {one["id"]: due_at(one["expires_at"]) for one in found if "expires_at" in one}
        self._used_at = dict[str, float]()

    def close(self) -> None:
        """Release the lock of the state folder."""
        self._held.close()

    def keep(self, file: BinaryIO, filename: str = "") -> Upload:
        """Write content to the disk and return it. Raises Refused, StorageError."""
        nbytes = file.seek(0, os.SEEK_END)
        if nbytes > self.most_bytes:
            raise too_large("the file", self.most_bytes)
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        upload = Upload(sha256, nbytes, filename[:255], self.folder / sha256)
        with disk_errors(self.folder):
            with self._lock:
                self._used_at[sha256] = time.monotonic()
                if _has_bytes(upload.path, nbytes):
                    os.utime(upload.path)
                    return upload
                if self._used + nbytes > self.total_bytes:
                    what = f"the stored files have reached the limit of {self.total_bytes:,} bytes"
                    raise Refused(413, what, hint="delete files or wait", code="uploads.full")
                self._used += nbytes  # the next sweep counts again
            file.seek(0)
            with replacing(upload.path) as temporary, open(temporary, "xb") as own:
                shutil.copyfileobj(file, own)
        return upload

    def add(self, owner: str, purpose: str, upload: Upload, keep_s: int | None) -> dict[str, Any]:
        """Write and return the record of a caller's upload. Raises Refused, StorageError."""
        if len(self._records) >= MOST_FILES:
            what = f"the server has reached its limit of {MOST_FILES:,} files"
            raise Refused(413, what, hint="delete files or wait", code="uploads.full")
        facts = {"sha256": upload.sha256, "bytes": upload.nbytes, "filename": upload.filename}
        return self.record(f"file-{secrets.token_hex(12)}", owner, purpose, facts, keep_s)

    def record(
        self, name: str, owner: str, purpose: str, facts: dict[str, Any], keep_s: int | None
    ) -> dict[str, Any]:
        """Write and return the record of a file; replaces one of the same id."""
        came = time.time()
        entry = {"id": name, "owner": owner, "purpose": purpose, "came": came} | facts
        entry["created_at"] = int(came)
        if keep_s is not None:
            entry["expires_at"] = int(came) + keep_s
        with self._lock, disk_errors(self._files):
            replace_file(self._files / name, json.dumps(entry).encode())
            self._records[name] = entry
            if keep_s is not None:
                self._due[name] = time.monotonic() + keep_s
        return entry

    def find(self, name: str, owner: str, param: str = "file_id") -> dict[str, Any]:
        """Return the record of a caller's file. Raises Refused: 404."""
        entry = self._records.get(name)
        if entry is None or entry["owner"] != owner or self._is_over(entry):
            raise Refused(404, f"file not found: {name[:80]}", param=param, code="file.not-found")
        return entry

    def every(self, owner: str) -> list[dict[str, Any]]:
        """Return the records of a caller's files, oldest first."""
        with self._lock:
            records = list(self._records.values())
        return [one for one in records if one["owner"] == owner and not self._is_over(one)]

    def outputs(self) -> list[dict[str, Any]]:
        """Return the records of all batches' output and error files."""
        return [one for one in list(self._records.values()) if "sha256" not in one]

    def path_of(self, record: Mapping[str, Any]) -> Path:
        """Return the path of an upload's content. Raises Refused if it was removed or cut."""
        path: Path = self.folder / record["sha256"]
        if not _has_bytes(path, record["bytes"]):
            what = f"the content of {record['id']} was removed from the server's disk"
            raise Refused(410, what, hint="upload the file again", code="file.gone")
        return path

    def delete(self, record: Mapping[str, Any]) -> None:
        """Delete a file.

        A later sweep removes its content, which waiting requests and other callers' files may still
        need.
        """
        with self._lock, disk_errors(self._files):
            remove(self._files / record["id"])
            self._records.pop(record["id"], None)
            self._due.pop(record["id"], None)
            if "sha256" not in record:
                self.forget(record)
            else:
                self._used_at[record["sha256"]] = time.monotonic()
                with suppress(FileNotFoundError):
                    os.utime(self.folder / record["sha256"])

    def sweep(self) -> None:
        """Remove expired files, and content that has no record any more. Raises StorageError."""
        for record in [one for one in list(self._records.values()) if self._is_over(one)]:
            try:
                self.delete(record)
            except HyimgError as error:
                logger.warning("cannot remove the expired %s: %s", record["id"], error)
        named = {one.get("sha256") for one in list(self._records.values())}
        with self._lock, disk_errors(self.folder):
            self._used = 0
            for path in self.folder.iterdir():
                with suppress(FileNotFoundError):  # a temporary name
                    found = path.stat()
                    is_ours = stat.S_ISREG(found.st_mode) and _SHA256.fullmatch(path.name)
                    if is_ours and path.name not in named and self._is_unused(path.name, found):
                        path.unlink()
                        self._used_at.pop(path.name)
                    else:
                        self._used += found.st_size

    def _is_unused(self, name: str, found: os.stat_result) -> bool:
        """Return True if content was not used for an hour, counting from its file's time."""
        age_s = max(0.0, time.time() - found.st_mtime)
        used_at = self._used_at.setdefault(name, time.monotonic() - age_s)
        return time.monotonic() > used_at + _UNNAMED_S

    def _is_over(self, record: Mapping[str, Any]) -> bool:
        return time.monotonic() >= self._due.get(record["id"], math.inf)

    def _checked(self, path: Path) -> Path:
        """Return an upload that is a readable picture of at most 25 megapixels. Raises Refused."""
        with self.decoding:
            try:
                size, _ = probe_image(path, decode=False)
                if size.height * size.width > _PICTURE_PIXELS:
                    what = f"the picture is {size}; the limit is {_PICTURE_PIXELS:,} pixels"
                    raise bad_request("", what, "source.too-large")
                probe_image(path)
            except SourceImageError as error:
                if error.code == "source.too-large":  # the server's limit is lower
                    what = f"the picture has more than {_PICTURE_PIXELS:,} pixels"
                    raise bad_request("", what, error.code) from None
                raise bad_request("", error.what, error.code, error.hint) from None
        return path


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as the API shows it."""
    known = {name: record[name] for name in _SHOWN if name in record}
    return known | {"object": "file", "status": "processed"}


def _has_bytes(path: Path, nbytes: int) -> bool:
    """Return True if a path is a file of so many bytes."""
    with suppress(OSError):
        found = path.stat()
        return stat.S_ISREG(found.st_mode) and found.st_size == nbytes
    return False
