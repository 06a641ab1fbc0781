"""A manifest as a whole: its lines, its ids, all of its faults at once.

`line.py` reads a line. A line with a fault is not in `Manifest.lines`; its faults are in
`Manifest.faults`, each with its place ("jobs.jsonl:17: seed") and what to do.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

from hyimg_cli.addresses import address_of
from hyimg_cli.errors import HyimgError
from hyimg_cli.files import MANIFEST_BYTES, SETTINGS_BYTES, bounded, bytes_of
from hyimg_cli.manifest.ids import IdClaims, child_ids
from hyimg_cli.manifest.json_faults import NO_LIST, ends_early
from hyimg_cli.manifest.line import Line, ManifestLine, fault
from hyimg_cli.manifest.table import DELIMITERS, read_table
from hyimg_cli.mistyped import nearest_path
from hyimg_cli.remote import UnusableAddress
from hyimg_cli.spec import digest
from hyimg_cli.spec.gc_paused import gc_paused

_STEM_LENGTH = 100
BOM = b"\xef\xbb\xbf"
# This many lines in a row that are not JSON objects mean a file of another kind.
_MOST_UNREAD = 1000
# Files of other kinds that are given as a manifest, by their first bytes: their kind, and a hint.
_OTHER_FILES = {
    b"PK\3\4": ("a spreadsheet or a zip", 'save a spreadsheet as "CSV UTF-8"; unpack a zip'),
    b"\xd0\xcf\x11\xe0": ("a spreadsheet", 'save it as "CSV UTF-8"'),
    b"PAR1": (
        "a Parquet file",
        'convert it to CSV: python -c "import pandas; '
        "pandas.read_parquet('{0}').to_csv('{1}.csv', index=False)\"",
    ),
    b"\x1f\x8b": ("a gzip file", "decompress it: gunzip -k {0}"),
}
# The same by their suffixes, unless they begin as JSON does.
_OTHER_TEXTS = {
    **dict.fromkeys((".yaml", ".yml"), "a YAML file"),
    ".toml": "a TOML file",
    ".xml": "an XML file",
    ".py": "a Python program",
    **dict.fromkeys((".htm", ".html"), "a web page"),
}
_HINT = "give a .jsonl, .csv, .tsv or .txt file, or - for standard input"


@dataclass(frozen=True)
class Manifest:
    """A manifest as read.

    `title` is the file's name in messages; `name` is the same name, made valid for ids and folders.
    `bad_ids` maps each faulty line's number to the id under which it can be recorded.
    """

    name: str
    folder: Path
    digest: str
    lines: tuple[ManifestLine, ...]
    faults: tuple[HyimgError, ...]
    title: str = ""
    bad_ids: Mapping[int, str] = field(default_factory=dict)


def read_manifest(
    path: Path | Literal["-"], stdin: TextIO | None = None, *, is_growing: bool = False
) -> Manifest:
    """Read the lines and faults of a manifest file, or of `-` (JSONL).

    JSONL; `.csv` or `.tsv` with one job per row; `.txt` with one prompt per line. `is_growing`:
    without a last line whose end is not written yet. Raises UsageError only if the file cannot be
    read; its contents never raise.
    """
    where = Path("stdin" if path == "-" else path)
    hint = _HINT
    try:
        if path == "-":
            data = _bytes_of(stdin or sys.stdin)
        else:
            data = bytes_of(where, MANIFEST_BYTES, or_stream=True)
            data = data[: data.rfind(b"\n") + 1] if is_growing else data
    except (FileNotFoundError, NotADirectoryError):
        slug, what, hint = "missing", "manifest not found", nearest_path(str(path)) or _HINT
        if where.is_symlink():
            what = "the link's target does not exist"
    except IsADirectoryError:
        slug, what = "is-a-folder", "this is a folder, not a manifest"
    except UnusableAddress as error:
        raise error.fault from None
    except (OSError, ValueError) as error:
        slug, hint = "unreadable", "" if address_of(where) else _HINT
        what = f"the manifest cannot be read: {getattr(error, 'strerror', None) or error}"
    else:
        suffix = where.suffix.lower()
        start = next((start for start in _OTHER_FILES if data.startswith(start)), None)
        kind = _OTHER_TEXTS.get(suffix, "")
        if path == "-" or (start is None and (not kind or b"{" in data.lstrip()[:4])):
            return manifest_of(data, where.name, _id_stem(where.stem), where.parent, suffix)
        if start is not None:
            kind, hint = _OTHER_FILES[start]
        slug, what = "other-file", f"this is {kind}, not a manifest"
        hint = hint.format(where, str(where).removesuffix(where.suffix))
    raise fault(slug, what, where, hint)


@gc_paused()
def manifest_of(
    data: bytes, title: str, name: str = "", folder: Path = Path(), suffix: str = ""
) -> Manifest:
    """Read a manifest from bytes: JSONL, unless `suffix` says otherwise.

    Messages call it `title`; its paths are relative to `folder`.
    """
    name = name or _id_stem(title)
    reading = _Reading(title, name, suffix)
    reading.read(data.removeprefix(BOM))
    lines, faults = tuple(reading.lines), tuple(reading.faults)
    return Manifest(name, folder, digest.of_bytes(data), lines, faults, title, reading.bad_ids)


def text_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers; only a line feed ends a line.

    Files that were joined may have a byte order mark at the start of any line.
    """
    for number, raw in enumerate(BytesIO(data), 1):
        if line := raw.strip().removeprefix(BOM).strip():
            yield number, line


def failed_lines(manifest: Manifest, faults: Iterable[HyimgError]) -> dict[str, list[HyimgError]]:
    """Return the faulty lines' ids with their faults; faults of the whole file are left out.

    Includes faults found while the lines were resolved.
    """
    ids = {line.where: str(line.fields["custom_id"]) for line in manifest.lines}
    by_id: dict[str, list[HyimgError]] = {}
    for one in faults:
        place = one.where  # which may go on with a field
        while place and place not in ids:
            place = place.rpartition(": ")[0]
        # One line of a matrix can be wrong alone; if the matrix line itself is wrong, none runs.
        name = ids.get(place) or manifest.bad_ids.get(line_number(manifest, one))
        if name is not None:
            by_id.setdefault(name, []).append(one)
    return by_id


def in_line_order(manifest: Manifest, faults: Iterable[HyimgError]) -> list[HyimgError]:
    """Return the faults in file order, faults of the whole file first."""
    return sorted(faults, key=lambda one: line_number(manifest, one))


def line_number(manifest: Manifest, one: HyimgError) -> int:
    """Return the line that a fault is in, from 1; 0 for one of the whole file."""
    match = re.match(re.escape(manifest.title) + r":([0-9]+)(?:[: ]|$)", one.where)
    return int(match[1]) if match else 0


class _Reading:
    """One pass over a manifest: collects lines, faults and the ids already claimed."""

    def __init__(self, title: str, name: str, suffix: str) -> None:
        self.title, self.name, self.suffix = title, name, suffix
        self.lines: list[ManifestLine] = []
        self.faults: list[HyimgError] = []
        self.bad_ids: dict[int, str] = {}
        self._claims = IdClaims()

    def read(self, data: bytes) -> None:
        (_, first), (_, second) = (*islice(text_lines(data), 2), (0, b""), (0, b""))[:2]
        if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:2]:
            what, hint = "the file is UTF-16 or similar, not UTF-8", "save it as UTF-8"
            self._refuse_file("not-utf8", what, hint)
        elif not first:
            self._refuse_file("empty", "the file has no jobs", "write one job per line")
        elif self.suffix not in (".txt", *DELIMITERS) and _is_one_value(first, second):
            is_list = first.startswith(b"[")
            what = "the file is a JSON list" if is_list else "a JSON object spans several lines"
            hint = f"{NO_LIST}: jq -c {'.[]' if is_list else '.'} {self.title} > lines.jsonl"
            self._refuse_file("not-json-lines", what, hint)
        else:
            lines = self._text_lines(data)
            if self.suffix in DELIMITERS:
                lines = read_table(data, self.title, DELIMITERS[self.suffix], self.faults)
            for number, line in lines:
                self._take(line, number)
            # Faulty lines without an id of their own get an unused one.
            for number, name in self.bad_ids.items():
                if not name:
                    free = f"{self.name}-line-{number}"
                    while free in self._claims:
                        free += "-again"
                    self._claims.claim([free], number, "")
                    self.bad_ids[number] = free

    def _refuse_file(self, slug: str, what: str, hint: str) -> None:
        self.faults.append(fault(slug, what, self.title, hint))

    def _text_lines(self, data: bytes) -> Iterator[tuple[int, Line]]:
        """Yield the non-empty lines of JSON or of prompts, with their numbers."""
        unread = 0
        for number, raw in text_lines(data):
            line = Line(f"{self.title}:{number}")
            if len(raw) > SETTINGS_BYTES:
                what = f"the line has {len(raw):,} bytes; the limit is {SETTINGS_BYTES:,}"
                line.add("too-long", what, hint=NO_LIST)
            else:
                line.read(raw, is_prompt=self.suffix == ".txt")
            yield number, line
            unread = 0 if line.given or line.extra or line.unknown else unread + 1
            if unread == _MOST_UNREAD:
                what = f"{unread:,} lines in a row are not JSON objects; the rest was not read"
                self._refuse_file("not-json-lines", what, NO_LIST)
                return

    def _take(self, line: Line, number: int) -> None:
        """Keep a line, or the lines of its matrix; keep only the id of a faulty one.

        A line whose ids are taken must not be recorded under them, because they belong to another
        line. The name of a line with a matrix is not a job's, so another line may have it.
        """
        is_named = "custom_id" not in line.refused
        if is_named:
            line.fields.setdefault("custom_id", f"{self.name}-{number:04d}")
        children = line.children()
        for child in children:
            line.faults += [] if line.faults else self._claim_ids(child, number)
        if line.axes:
            is_named = False
        elif is_named and (taken := self._claim_ids(line, number)):
            is_named, line.faults = False, line.faults + taken
        if not line.faults:
            self.lines += [one.done(number) for one in children or [line]]
            return
        self.faults += line.faults
        self.bad_ids[number] = str(line.fields["custom_id"]) if is_named else ""

    def _claim_ids(self, line: Line, number: int) -> list[HyimgError]:
        """Claim a line's id and its results' ids; return a fault if one is invalid or taken."""
        asked = line.fields["custom_id"]
        if not line.is_request:
            names = [asked, *child_ids(line.fields)]
            return self._claims.claim(names, number, line.where)
        found = self._claims.claim_request(line.fields, number, line.where)
        if line.fields["custom_id"] != asked:  # the answer must have the request's own
            line.extra = {"x_custom_id": asked} | line.extra
        return found


def _is_one_value(first: bytes, second: bytes) -> bool:
    """Return True if the file is a list, or its first line begins an object that goes on below."""
    if first[:1] == b"[" and first[-1:] == b"]" and not second:
        return True
    is_open = len(first) <= SETTINGS_BYTES and ends_early(first.decode("utf-8", "replace"))
    return is_open and (first[:1] == b"[" or second[:1] not in (b"", b"{"))


def _id_stem(stem: str) -> str:
    """Return `stem` with invalid characters replaced by dashes, cut to leave room for a number."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")
    return clean[:_STEM_LENGTH] or "manifest"


def _bytes_of(stream: TextIO | None) -> bytes:
    if stream is None:  # the process was started without stdin
        hint = "pipe the lines in, or name a file"
        raise fault("missing", "standard input is closed", "stdin", hint)
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        return stream.read().encode("utf-8", "surrogatepass")
    return bounded(buffer, MANIFEST_BYTES, "stdin")
