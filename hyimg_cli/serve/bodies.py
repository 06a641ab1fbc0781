"""Bodies of requests, counted while they stream: a JSON object, or a form with files."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from hyimg_cli.files import json_of, refuse_constant
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.serve.errors import Refused, bad_request, server_full, too_large
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.settings.values import BadValue, shown

JSON_BYTES = 50_000_000
# Of all bodies of a kind that are being read: JSON is in memory, forms are on the disk.
JSON_BYTES_AT_ONCE, FORM_BYTES_AT_ONCE = 200_000_000, 2_000_000_000
# Each value of a JSON text takes many times its bytes.
_MOST_VALUES = 1_000_000
# Of a form: fields that are not files, the bytes of them all, and what headers may add.
_MOST_FIELDS, _FIELD_BYTES, _HEAD_BYTES = 64, 1_000_000, 100_000
_IN_FORM = re.compile(r"([^\[\]]+)(?:\[([^\[\]]*)\])?")


def json_object(data: bytes | bytearray) -> dict[str, Any]:
    """The object that a JSON text holds. Raises ValueError, and TypeError for another value."""
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    value = json_of(data, parse_constant=refuse_constant)
    if not isinstance(value, dict):
        raise TypeError("it is not an object")
    return value


class Bodies:
    """Reads bodies within bounds; forms store their files among the uploads."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._now = {"JSON": 0, "form": 0}

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON object that a request brings; it counts as in memory until the block ends.

        Raises Refused.
        """
        async with self._stream(request, "JSON", JSON_BYTES, JSON_BYTES_AT_ONCE) as stream:
            data = bytearray()
            async for piece in stream:
                data += piece
            try:
                value = await run_in_threadpool(json_object, data)
            except TypeError:
                what, code = "the body is not a JSON object", "request.not-an-object"
                raise Refused(400, what, code=code) from None
            except ValueError as error:
                what = f"the body is not JSON: {error}"
                raise Refused(400, what, code="request.bad-json") from None
            data.clear()
            yield value

    async def form(self, request: Request, most_files: int) -> dict[str, Any]:
        """The fields of a form as `_fields_of` reads them. Raises Refused."""
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            what = "the body is not multipart/form-data with a boundary"
            raise Refused(400, what, code="request.not-a-form")
        most = most_files * self._uploads.most_bytes + _FIELD_BYTES + _HEAD_BYTES
        async with self._stream(request, "form", most, FORM_BYTES_AT_ONCE) as stream:
            parser = _FormParser(
                *(request.headers, stream),
                max_files=most_files,
                max_fields=_MOST_FIELDS,
                max_part_size=_FIELD_BYTES,
            )
            try:
                form = await parser.parse()
            except MultiPartException as error:
                raise _refusal_of(error, parser) from None
            try:
                if not parser.is_whole:
                    raise Refused(400, "the form breaks off", code="request.bad-form")
                return await run_in_threadpool(self._fields_of, parser.items)
            finally:
                await form.close()

    @asynccontextmanager
    async def _stream(
        self, request: Request, kind: str, most: int, at_once: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The pieces of a body, which count among those of its kind until the block ends."""
        nbytes = 0

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal nbytes
            async for piece in request.stream():
                nbytes += len(piece)
                self._now[kind] += len(piece)
                if nbytes > most:
                    raise too_large(f"the {kind}", most)
                if self._now[kind] > at_once:
                    raise server_full("too many bytes are being sent at once", 5)
                yield piece

        try:
            async with aclosing(counted()) as pieces:
                yield pieces
        finally:
            self._now[kind] -= nbytes

    def _fields_of(self, parts: Sequence[tuple[str, str | UploadFile]]) -> dict[str, Any]:
        """A form's parts as the fields of a JSON body: `metadata[a]` as an object, `image[]` as a
        list, text as the number, truth or list that its field reads, files as uploads.
        """
        body: dict[str, Any] = {}
        for name, part in parts:
            written = _IN_FORM.fullmatch(name)
            if written is None:
                raise bad_request(name, f"{shown(name)} is not a field", "request.bad-form")
            field, key = written.groups()
            if isinstance(part, UploadFile):
                value: Any = self._uploads.keep(part.file, part.filename or "")
            else:
                value = part if key else _typed(field, part)
            if key == "" and isinstance(body.setdefault(field, []), list):
                body[field].append(value)
            elif key and isinstance(body.setdefault(field, {}), dict) and key not in body[field]:
                body[field][key] = value
            elif key is None and field not in body:
                body[field] = value
            else:
                raise bad_request(name, f"{name} is there twice", "manifest.duplicate-field")
        return body


class _FormParser(MultiPartParser):
    """Starlette's parser, which also bounds all fields together and knows a form that broke off."""

    is_whole = False

    def on_part_end(self) -> None:
        super().on_part_end()
        if sum(len(value) for _, value in self.items if isinstance(value, str)) > _FIELD_BYTES:
            raise MultiPartException("Part exceeded maximum size")

    def on_end(self) -> None:
        self.is_whole = True


def _refusal_of(error: MultiPartException, parser: MultiPartParser) -> Refused:
    """A fault of a form, which starlette tells in words alone."""
    if error.message.startswith("Too many"):
        last = parser.items[-1][0] if parser.items else ""
        return Refused(413, error.message, param=last, code="request.too-many-parts")
    if error.message.startswith("Part exceeded"):
        return too_large("the text of the form", _FIELD_BYTES)
    return bad_request("", f"the form is damaged: {error.message}", "request.bad-form")


def _typed(name: str, text: str) -> Any:
    """A form's text as its field reads it in JSON; as it is where nothing else fits."""
    known = BY_NAME.get(name)
    if known is not None:
        with suppress(BadValue):
            known.kind.read(text)
            return text
    elif name not in ("stream", "partial_images"):
        return text
    with suppress(ValueError):
        return json_of(text)
    return text
