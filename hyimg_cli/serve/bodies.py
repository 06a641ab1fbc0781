"""Bodies of requests, counted while they stream: a JSON object, or a form with files."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from hyimg_cli.files import json_of, refuse_constant
from hyimg_cli.serve.errors import Refused

if TYPE_CHECKING:
    from hyimg_cli.serve.uploads import Receiving, Upload, Uploads

JSON_BYTES = 50_000_000
# Of a form: fields that are no files, the bytes of all of them, and what its headers may add.
_MOST_FIELDS = 64
_FIELD_BYTES = 1_000_000
_HEAD_BYTES = 100_000


@dataclass
class Form:
    """A multipart body: its fields and its files, each with the name of its part, in order."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[str, "Upload"]] = field(default_factory=list)


def too_large(what: str, most: int) -> Refused:
    """The refusal of a body, or of a part of one, that has more than `most` bytes."""
    return Refused(413, f"{what} has more than {most:,} bytes", code="request.too-large")


async def read_json(request: Request, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object that a request brings. Raises Refused."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most:
            raise too_large("the body", most)
    try:
        value = json_of(bytes(data), parse_constant=refuse_constant)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}", code="request.bad-json") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body is not a JSON object", code="request.not-an-object")
    return value


async def read_form(request: Request, uploads: "Uploads", *, most_files: int) -> Form:
    """A multipart body, its files stored among the uploads as they come. Raises Refused."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        what = "the body is not multipart/form-data with a boundary"
        raise Refused(400, what, code="request.not-a-form")
    reading = _Reading(uploads, most_files)
    try:
        callbacks: Any = {name: getattr(reading, name) for name in _CALLBACKS}
        parser = MultipartParser(options[b"boundary"], callbacks)
        async for piece in request.stream():
            parser.write(piece)
            reading.count(len(piece))
            await reading.keep_whole()
        parser.finalize()
        if not reading.is_over:
            raise Refused(400, "the form breaks off", code="request.bad-form")
        return reading.form
    except FormParserError as error:
        raise Refused(400, f"the form is damaged: {error}", code="request.bad-form") from None
    finally:
        reading.drop()


_CALLBACKS = (
    *("on_part_begin", "on_header_field", "on_header_value", "on_header_end"),
    *("on_headers_finished", "on_part_data", "on_part_end", "on_end"),
)


class _Reading:
    """One form while it streams. A file goes to the disk piece by piece; fields stay in memory."""

    def __init__(self, uploads: "Uploads", most_files: int) -> None:
        self.form, self.is_over = Form(), False
        self._uploads, self._most_files = uploads, most_files
        self._left = most_files * uploads.most_bytes + _FIELD_BYTES + _HEAD_BYTES
        self._whole: list[tuple[str, Receiving]] = []
        self._file: Receiving | None = None
        self._files = self._field_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._head, self._value, self._data = b"", b"", bytearray()
        self._name = ""

    def count(self, nbytes: int) -> None:
        """Count what came. Raises Refused where all of it is more than its parts may have."""
        self._left -= nbytes
        if self._left < 0:
            raise Refused(413, "the form is too large", code="request.too-large")

    async def keep_whole(self) -> None:
        """Put the files that are there in full in their place, which waits for the disk."""
        while self._whole:
            name, file = self._whole.pop(0)
            self.form.files.append((name, await run_in_threadpool(file.keep)))

    def drop(self) -> None:
        """Remove what was not kept."""
        for file in filter(None, (self._file, *(file for _, file in self._whole))):
            file.close()

    def on_part_begin(self) -> None:
        self._headers, self._data = {}, bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._head += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._head.lower()] = self._value
        self._head = self._value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise Refused(400, "a part of the form has no name", code="request.bad-form")
        self._name = options[b"name"].decode(errors="replace")
        is_file = b"filename" in options
        self._files += is_file
        if self._files > self._most_files or len(self.form.fields) >= _MOST_FIELDS:
            what = f"the form has more than {self._most_files} files or {_MOST_FIELDS} fields"
            raise Refused(413, what, param=self._name, code="request.too-many-parts")
        if is_file:
            name = options[b"filename"].decode(errors="replace")
            self._file = self._uploads.receive(name)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(data[start:end])
            return
        self._field_bytes += end - start
        if self._field_bytes > _FIELD_BYTES:
            raise too_large("what is no file of the form", _FIELD_BYTES)
        self._data += data[start:end]

    def on_part_end(self) -> None:
        if self._file is not None:
            self._whole.append((self._name, self._file))
            self._file = None
        else:
            try:
                self.form.fields.append((self._name, self._data.decode()))
            except UnicodeDecodeError:
                what = "the field is not UTF-8"
                raise Refused(400, what, param=self._name, code="request.not-utf8") from None

    def on_end(self) -> None:
        self.is_over = True
