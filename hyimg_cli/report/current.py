"""Whether a finished run's page would be written as it is: what it was made from, in a digest.

    report/state    the digest of all of this after the last page was written:
                    journals, jobs, picks, scores and settings    by content
                    folders of pictures and of thumbnails         by the time of their last change
                    the page's own files                          by size and time

A run that finds nothing to do has compared each output with its digest, so pictures are not read.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hyimg_cli import __version__
from hyimg_cli.files import bytes_of, refuse_links, replace_file
from hyimg_cli.journal.journal import PAGE
from hyimg_cli.journal.picks import DRAFTS
from hyimg_cli.report.page import TEMPLATES
from hyimg_cli.report.picks import is_of_drafts
from hyimg_cli.spec import digest

_STATE = "report/state"
_RECORDS = (".json", ".jsonl")
_LENGTH = 64


def is_current(folder: Path) -> bool:
    """Return True if the page's state is the kept one; False if either cannot be read."""
    try:
        return bytes_of(folder / _STATE, _LENGTH).decode("latin-1") == _state(folder)
    except OSError:
        return False


def keep_state(folder: Path) -> None:
    """Keep the state of a page that was just written; without it, the next page is written."""
    with suppress(OSError):
        refuse_links((folder / _STATE).parent, folder)
        replace_file(folder / _STATE, _state(folder).encode(), is_lasting=False)


def _state(folder: Path) -> str:
    return digest.of_bytes("\n".join(_facts(folder)).encode("utf-8", "surrogateescape"))


def _facts(folder: Path) -> Iterator[str]:
    yield __version__
    yield from (_content(path) for path in sorted(TEMPLATES.iterdir()) if path.is_file())
    # A page tells about the run of its drafts too, and the page of drafts about the run.
    for place in (folder, folder.parent if is_of_drafts(folder) else folder / DRAFTS):
        yield f"{place.name} {(place / PAGE).is_file()}"
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted(place.iterdir()):
                if path.suffix in _RECORDS and path.is_file():
                    yield _content(path)
    for name in (PAGE, "report"):
        for path in sorted([folder / name, *(folder / name).glob("*.js")]):
            if path.is_file():
                found = path.stat()
                yield f"{path.name} {found.st_size} {found.st_mtime_ns}"
    for at, folders, _ in os.walk(folder):
        folders.sort()
        if at not in (str(folder), str(folder / "report")):
            yield f"{os.path.relpath(at, folder)} {os.stat(at).st_mtime_ns}"


def _content(path: Path) -> str:
    return f"{path.name} {digest.of_file(path)}"
