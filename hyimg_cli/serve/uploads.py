"""Files of callers: streamed to the disk within bounds, stored by content once, each caller's own.

    STATE/files/<id>   the record of a file: owner, name, purpose, sha256
    STATE/uploads/<sha256>   its content, which several files may have, and pictures of requests

A file that a batch made has a record and no content here: it is made as it is read.
"""

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hyimg_cli.errors import SourceImageError
from hyimg_cli.files import SETTINGS_BYTES, bytes_of, json_of, remove, replace_file, sync, write_all
from hyimg_cli.journal.disk import disk_errors, make_folders, take_lock
from hyimg_cli.journal.journal import LOCK
from hyimg_cli.media.images import probe_image
from hyimg_cli.serve.bodies import read_form, too_large
from hyimg_cli.serve.errors import Refused, bad_value

FILE_BYTES = 200_000_000
TOTAL_BYTES = 100_000_000_000
_PICTURE_PIXELS = 25_000_000
_PURPOSES = ("batch", "vision")
_SHOWN = ("id", "bytes", "created_at", "filename", "purpose", "expires_at")
# Content that no file and no batch names is kept so long, for requests that wait.
_UNNAMED_S = 3600.0
# A file that is kept for a time: an hour to 30 days, as the API has it.
_EXPIRY_S = range(3600, 2_592_001)

Made = Callable[[Mapping[str, Any]], Iterator[bytes]]


@dataclass(frozen=True)
class Upload:
    """Content that is on the disk, and the name that its sender gave it."""

    sha256: str
    nbytes: int
    filename: str
    path: Path


class Uploads:
    """Every caller's files; for one caller, another's are not there.

    Holds the state's lock: OutputFolderError where another server does.

    `made` gives the content of files that batches made, `forget` lets it go: batches set both.
    """

    made: Made
    forget: Callable[[Mapping[str, Any]], object]

    def __init__(
        self, state: Path, most_bytes: int = FILE_BYTES, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self.most_bytes, self._total_bytes = most_bytes, total_bytes
        self._files, self.folder = state / "files", state / "uploads"
        self._lock, self._decoding = threading.RLock(), threading.Lock()
        self._pictures = set[str]()
        self._held = ExitStack()
        with disk_errors(state):
            make_folders(state)
            take_lock(state / LOCK, self._held)
            for folder in (self._files, self.folder):
                make_folders(folder)
                for left in folder.glob(".*"):
                    remove(left)
            found = [json_of(bytes_of(one, SETTINGS_BYTES)) for one in self._files.iterdir()]
            self._used = sum(one.stat().st_size for one in self.folder.iterdir())
        # NOTE: a second may have many.
        found.sort(key=lambda one: (one["came"], one["id"]))
        self._records: dict[str, dict[str, Any]] = {one["id"]: one for one in found}
        self.sweep()

    def close(self) -> None:
        """Let another server have the state."""
        self._held.close()

    def receive(self, filename: str) -> "Receiving":
        """A file that is about to come. Raises StorageError."""
        return Receiving(self, filename)

    def admit(self, nbytes: int) -> None:
        """Pass where so many bytes more may be kept. Raises Refused."""
        if self._used + nbytes > self._total_bytes:
            what = f"the server keeps {self._total_bytes:,} bytes of files at most"
            raise Refused(413, what, hint="delete files, or wait", code="uploads.full")

    def settle(self, temporary: Path, sha256: str) -> Path:
        """Give content its name, under which it lasts."""
        path = self.folder / sha256
        with self._lock, disk_errors(self.folder):
            if path.exists():
                os.utime(path)
                remove(temporary)
            else:
                sync(temporary)
                os.replace(temporary, path)
                sync(self.folder)
                self._used += path.stat().st_size
        return path

    def add(self, owner: str, purpose: str, upload: Upload, keep_s: int | None) -> dict[str, Any]:
        """Record an upload as a caller's file: it lasts when this returns."""
        facts = {"sha256": upload.sha256, "bytes": upload.nbytes, "filename": upload.filename}
        return self.record(f"file-{secrets.token_hex(12)}", owner, purpose, facts, keep_s)

    def record(
        self, name: str, owner: str, purpose: str, facts: dict[str, Any], keep_s: int | None
    ) -> dict[str, Any]:
        """Write the record of a file, instead of an earlier one of this id."""
        came = time.time()
        times = {"came": came, "created_at": int(came)}
        expiry = {} if keep_s is None else {"expires_at": int(came) + keep_s}
        entry = {"id": name, "owner": owner, "purpose": purpose} | facts | times | expiry
        with self._lock, disk_errors(self._files):
            replace_file(self._files / name, json.dumps(entry).encode())
            self._records[name] = entry
        return entry

    def find(self, name: str, owner: str, param: str = "file_id") -> dict[str, Any]:
        """The record of a caller's file. Raises Refused, 404."""
        entry = self._records.get(name)
        if entry is None or entry["owner"] != owner or _is_over(entry):
            raise Refused(404, f"No such file: {name[:80]}", param=param, code="file.not-found")
        return entry

    def every(self, owner: str) -> list[dict[str, Any]]:
        """The records of a caller's files, the oldest first."""
        with self._lock:
            records = list(self._records.values())
        return [one for one in records if one["owner"] == owner and not _is_over(one)]

    def path_of(self, record: Mapping[str, Any]) -> Path:
        """Where the content of an upload is. Raises Refused where somebody removed it."""
        path: Path = self.folder / record["sha256"]
        if not path.is_file():
            what = f"the content of {record['id']} is gone from the server's disk"
            raise Refused(410, what, hint="upload the file again", code="file.gone")
        return path

    def delete(self, record: Mapping[str, Any]) -> None:
        """Remove a file. Its content goes with the next sweep, for requests that wait may need it,
        another caller's too.
        """
        with self._lock, disk_errors(self._files):
            remove(self._files / record["id"])
            self._records.pop(record["id"], None)
            if "sha256" not in record:
                self.forget(record)
            else:
                with suppress(FileNotFoundError):
                    os.utime(self.folder / record["sha256"])

    def sweep(self) -> None:
        """Remove files whose time is over, and content that nothing names any more."""
        for record in [one for one in self._records.values() if _is_over(one)]:
            self.delete(record)
        named = {one.get("sha256") for one in list(self._records.values())}
        with self._lock, disk_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name.startswith(".") or path.name in named:
                    continue
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if found.st_mtime < time.time() - _UNNAMED_S:
                        path.unlink()
                        self._used -= found.st_size

    def picture(self, name: str, owner: str) -> Path:
        """A caller's file as a picture to read. Raises Refused for what is none."""
        return self.checked(self.path_of(self.find(name, owner)))

    def keep_picture(self, data: bytes) -> Path:
        """A picture that a request brought. Raises Refused for what is none."""
        file = self.receive("")
        with closing(file):
            file.write(data)
            return self.checked(file.keep().path)

    def checked(self, path: Path) -> Path:
        """An upload, looked at once: a picture of 25 megapixels at most that can be decoded."""
        if path.name in self._pictures:
            return path
        with self._decoding:  # one at a time: it may take 100 MB
            try:
                size, _ = probe_image(path, decode=False)
                if size.height * size.width > _PICTURE_PIXELS:
                    what = f"the picture is {size}; up to {_PICTURE_PIXELS:,} pixels are read"
                    raise Refused(400, what, code="source.too-large")
                probe_image(path)
            except SourceImageError as error:
                raise Refused(400, error.what, hint=error.hint, code=error.code) from None
        self._pictures.add(path.name)
        return path


class Receiving:
    """A file while it comes: counted, digested and written piece by piece."""

    def __init__(self, uploads: Uploads, filename: str) -> None:
        self._uploads, self._filename = uploads, filename[:255]
        self._path = uploads.folder / f".{secrets.token_hex(12)}"
        self._digest, self._nbytes = hashlib.sha256(), 0
        with disk_errors(uploads.folder):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)

    def write(self, data: bytes) -> None:
        """Take a piece. Raises Refused where the file is too large, StorageError."""
        self._nbytes += len(data)
        if self._nbytes > self._uploads.most_bytes:
            raise too_large("the file", self._uploads.most_bytes)
        self._uploads.admit(self._nbytes)
        self._digest.update(data)
        with disk_errors(self._uploads.folder):
            write_all(self._file, data)

    def keep(self) -> Upload:
        """Put it in its place: it is on the disk when this returns."""
        sha256 = self._digest.hexdigest()
        with closing(self):
            path = self._uploads.settle(self._path, sha256)
        return Upload(sha256, self._nbytes, self._filename, path)

    def close(self) -> None:
        """Remove what was not kept."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._path.unlink(missing_ok=True)


def _is_over(record: Mapping[str, Any]) -> bool:
    return "expires_at" in record and record["expires_at"] <= time.time()


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """A file as the API shows it."""
    known = {name: record[name] for name in _SHOWN if name in record}
    return known | {"object": "file", "status": "processed"}


def seconds_kept(policy: Any, param: str) -> int | None:
    """How long a file is to be kept; None for ever. Raises Refused."""
    if not policy:
        return None
    with suppress(KeyError, ValueError, TypeError):
        if policy["anchor"] == "created_at" and int(policy["seconds"]) in _EXPIRY_S:
            return int(policy["seconds"])
    what = f"{param} is an anchor, created_at, and {_EXPIRY_S[0]} to {_EXPIRY_S[-1]} seconds"
    raise bad_value(param, what)


def page_of(
    every: Iterable[Mapping[str, Any]], query: Mapping[str, str], most: int, usual: int
) -> dict[str, Any]:
    """The page of a list, oldest first, that a query asks for: `after`, `limit` and `order`."""
    order, limit = query.get("order", "desc"), query.get("limit", str(usual))
    if order not in ("asc", "desc"):
        raise bad_value("order", "order is asc or desc")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise bad_value("limit", f"limit is a number from 1 to {most:,}")
    items = list(every) if order == "asc" else list(every)[::-1]
    if after := query.get("after"):
        places = [place for place, one in enumerate(items) if one["id"] == after]
        if not places:
            raise bad_value("after", f"after is none of this list: {after[:80]}")
        items = items[places[0] + 1 :]
    data = items[: int(limit)]
    first, last = (data[place]["id"] if data else None for place in (0, -1))
    found = {"object": "list", "data": data, "has_more": len(items) > len(data)}
    return found | {"first_id": first, "last_id": last}


def routes(uploads: Uploads) -> list[Route]:
    """The routes of files. `request.state.caller` is the name of the key that asks."""

    async def create(request: Request) -> Response:
        form = await read_form(request, uploads, most_files=1)
        fields = dict(form.fields)
        purpose = fields.get("purpose", "")
        if purpose not in _PURPOSES:
            raise bad_value("purpose", f"purpose is one of {', '.join(_PURPOSES)}")
        if [name for name, _ in form.files] != ["file"]:
            raise Refused(400, "the form has no file", param="file", code="request.missing-field")
        start = "expires_after["
        kept = {name[len(start) : -1]: text for name, text in form.fields if name.startswith(start)}
        keep_s, (_, upload) = seconds_kept(kept, "expires_after"), form.files[0]
        caller = request.state.caller
        record = await run_in_threadpool(uploads.add, caller, purpose, upload, keep_s)
        return JSONResponse(shown(record))

    def listing(request: Request) -> Response:
        query, every = request.query_params, map(shown, uploads.every(request.state.caller))
        wanted = (one for one in every if query.get("purpose") in (None, one["purpose"]))
        return JSONResponse(page_of(wanted, query, 10_000, 10_000))

    def found(request: Request) -> dict[str, Any]:
        return uploads.find(request.path_params["file_id"], request.state.caller)

    def retrieve(request: Request) -> Response:
        return JSONResponse(shown(found(request)))

    def content(request: Request) -> Response:
        record = found(request)
        kind, head = "application/octet-stream", {"x-content-type-options": "nosniff"}
        if "sha256" in record:
            return FileResponse(uploads.path_of(record), media_type=kind, headers=head)
        return StreamingResponse(uploads.made(record), media_type=kind, headers=head)

    def delete(request: Request) -> Response:
        record = found(request)
        uploads.delete(record)
        return JSONResponse({"id": record["id"], "object": "file", "deleted": True})

    one = "/v1/files/{file_id}"
    return [
        Route("/v1/files", create, methods=["POST"]),
        Route("/v1/files", listing, methods=["GET"]),
        Route(f"{one}/content", content, methods=["GET"]),
        Route(one, retrieve, methods=["GET"]),
        Route(one, delete, methods=["DELETE"]),
    ]
