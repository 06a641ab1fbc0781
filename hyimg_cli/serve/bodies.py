"""Request bodies, counted as they stream: a JSON object, or a form with files."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from operator import itemgetter
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from hyimg_cli.files import json_of, refuse_constant
from hyimg_cli.serve.errors import Refused, bad_request, server_full, too_large, too_slow
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.settings.values import shown

JSON_BYTES = 50_000_000
# Seconds that a body may pause, and for its first part; bytes per second that it needs after that.
BODY_S, _SLOWEST = 30.0, 2_000
# Limits for all bodies that are being received: JSON is held in memory, forms on disk.
JSON_BYTES_AT_ONCE, FORM_BYTES_AT_ONCE = 200_000_000, 2_000_000_000
# Each value in a JSON text takes many times its bytes in memory.
_MOST_VALUES = 1_000_000
# Limits of a form: its text fields, their bytes together, and the bytes of its headers.
_MOST_FIELDS, _FIELD_BYTES, _HEAD_BYTES = 64, 1_000_000, 100_000
# Fields of pictures, which may be repeated.
_PICTURES = ("image", "images", "mask")
_IN_FORM = re.compile(r"([^\[\]]+)(?:\[([^\[\]]*)\])?")


def json_object(data: bytes | bytearray, what: str = "the body", code: str = "") -> dict[str, Any]:
    """Return the object in a JSON text. Raises Refused, with `code` if one is given."""
    try:
        if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        value = json_of(data, parse_constant=refuse_constant)
    except ValueError as error:
        why, hint = f": {error}" if data.strip() else "", "send a JSON object"
        raise bad_request(
            "", f"{what} is not JSON{why}", code or "request.bad-json", hint
        ) from None
    if not isinstance(value, dict):
        raise bad_request("", f"{what} is not a JSON object", code or "request.not-an-object")
    return value


class Bodies:
    """Reads request bodies within limits; stores the files of forms as uploads."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._now = {"JSON": 0, "form": 0}

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Read the JSON object of a request; it counts as in memory until the block ends.

        Raises Refused.
        """
        async with self._stream(request, "JSON", JSON_BYTES, JSON_BYTES_AT_ONCE) as stream:
            data = bytearray()
            async for piece in stream:
                data += piece
            value = await run_in_threadpool(json_object, data)
            data.clear()
            yield value

    async def form(self, request: Request, most_files: int) -> dict[str, Any]:
        """Return a form's fields as `_fields_of` reads them. Raises Refused."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise bad_request("", "the body is not multipart/form-data", "request.not-a-form")
        most = most_files * self._uploads.most_bytes + _FIELD_BYTES + _HEAD_BYTES
        async with self._stream(request, "form", most, FORM_BYTES_AT_ONCE) as stream:
            limits = {"max_files": most_files, "max_fields": _MOST_FIELDS}
            parser = _FormParser(request.headers, stream, max_part_size=_FIELD_BYTES, **limits)
            try:
                form = await parser.parse()
            except MultiPartException as error:
                raise _refusal_of(error, parser) from None
            try:
                if not parser.is_whole:
                    raise bad_request("", "the form ends too early", "request.bad-form")
                return await run_in_threadpool(self._fields_of, parser.items)
            finally:
                await form.close()

    @asynccontextmanager
    async def _stream(
        self, request: Request, kind: str, most: int, at_once: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Yield a body's pieces, which count towards the limit of its kind until the block ends."""
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            what = f"the {kind} is compressed ({encoding[:40]})"
            raise Refused(415, what, code="request.bad", hint="send it without Content-Encoding")
        nbytes, began = 0, time.monotonic()

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal nbytes
            pieces = request.stream()
            while True:
                left_s = began + BODY_S + nbytes / _SLOWEST - time.monotonic()
                try:
                    piece = await asyncio.wait_for(anext(pieces), min(BODY_S, left_s))
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise too_slow("the body", BODY_S) from None
                nbytes += len(piece)
                self._now[kind] += len(piece)
                if nbytes > most:
                    raise too_large(f"the {kind}", most)
                if self._now[kind] > at_once:
                    raise server_full("the server is receiving too many bytes at once", 5)
                yield piece

        try:
            async with aclosing(counted()) as pieces:
                yield pieces
        finally:
            self._now[kind] -= nbytes

    def _fields_of(self, parts: Sequence[tuple[str, str | UploadFile]]) -> dict[str, Any]:
        """Return a form's parts as the fields of a JSON body; a file becomes an upload.

        `metadata[a]` becomes an object. `image[]`, `image[0]` and pictures of the same name become
        a list: those with numbers in their order, others as they came.
        """
        body: dict[str, Any] = {}
        lists: dict[str, list[tuple[int, Any]]] = {}
        for name, part in parts:
            written = _IN_FORM.fullmatch(name)
            if written is None:
                raise bad_request(name, f"{shown(name)} is not a field", "request.bad-form")
            field, key = written.groups()
            value: Any = part
            if isinstance(part, UploadFile):
                if not part.filename and not part.size:  # what a browser sends for no file
                    continue
                value = self._uploads.keep(part.file, part.filename or "")
            elif field in _PICTURES and not part:
                continue
            elif field in _PICTURES and "\0" in part:
                hint = 'name the file in its Content-Disposition: filename="a.png"'
                raise bad_request(
                    name, f"{name} is a file without a name", "request.bad-form", hint
                )
            if key == "" or (field in _PICTURES and (not key or key.isdecimal())):
                lists.setdefault(field, []).append((int(key or 0), value))
                continue
            place = body.setdefault(field, {}) if key else body
            if not isinstance(place, dict) or (key or field) in place:
                raise bad_request(name, f"{name} is given twice", "manifest.duplicate-field")
            place[key or field] = value
        for field, items in lists.items():
            if field in body:
                raise bad_request(field, f"{field} is given twice", "manifest.duplicate-field")
            body[field] = [value for _, value in sorted(items, key=itemgetter(0))]
        return body


class _FormParser(MultiPartParser):
    """Starlette's parser, with a limit for all text fields together and a check of the end."""

    is_whole = False

    def on_part_end(self) -> None:
        super().on_part_end()
        if sum(len(value) for _, value in self.items if isinstance(value, str)) > _FIELD_BYTES:
            raise MultiPartException("Part exceeded maximum size")

    def on_end(self) -> None:
        self.is_whole = True


def _refusal_of(error: MultiPartException, parser: MultiPartParser) -> Refused:
    """Return the refusal for a form's fault, which starlette describes only in words."""
    if error.message.startswith("Too many"):
        last = parser.items[-1][0] if parser.items else ""
        return Refused(413, error.message, param=last, code="request.too-many-parts")
    if error.message.startswith("Part exceeded"):
        return too_large("the text of the form", _FIELD_BYTES)
    return bad_request("", f"the form is damaged: {error.message}", "request.bad-form")
