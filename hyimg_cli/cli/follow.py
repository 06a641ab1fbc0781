"""`hyimg generate --follow`: take lines from standard input, or files of a folder, as they come."""

import glob
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import typer

from hyimg_cli.addresses import scheme_of, shown_place
from hyimg_cli.cli import inputs
from hyimg_cli.cli import options as o
from hyimg_cli.cli.progress import Report, stoppable
from hyimg_cli.cli.render import Style
from hyimg_cli.cli.request import request_for
from hyimg_cli.engine.follow import Arrivals, FollowedRuns
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.manifest import Manifest, manifest_of
from hyimg_cli.manifest.sources import is_pattern, is_picture_name
from hyimg_cli.pipelines.failures import exit_code
from hyimg_cli.settings.config import Setting

# Seconds between two looks; a file is taken if it did not change between them.
_POLL_S = 1.0
_MOST_READ = 1 << 20
# Faults of inputs that are still empty.
_EMPTY = ("manifest.no-pictures", "manifest.empty")
Files = frozenset[tuple[str, int, int]]


def show_followed(ctx: typer.Context, style: Style, *, again: str, retry: str) -> int:
    """Run the jobs of a command line as they come, and return the exit code."""
    given: Mapping[str, Any] = ctx.params
    settings = o.settings_of(given)
    # A faulty line among many that come does not end the run.
    settings["skip_invalid"] = Setting("skip_invalid", True, "flag")
    _refuse(given, settings)

    report = Report(style, "", again, retry)

    def request(manifest: Manifest) -> RunRequest:
        made = request_for(given, settings, manifest)
        report.place = shown_place(made.config.output.folder)
        return made

    def found() -> RunRequest:
        # Each look would tell again which files are skipped.
        quietly = {**given, "quiet": True}
        return request(inputs.manifest_of(quietly, ctx.obj or (), settings))

    names: list[str] = given["inputs"]
    arrivals: Arrivals = FollowedLines(request)
    if names != ["-"]:
        arrivals = FollowedFiles(names, found, is_recursive=bool(given["recursive"]))
    flow = FollowedRuns(arrivals, report.show, limit=settings["time_limit"].value)
    with stoppable(flow.request_stop):
        counts = flow.run()
    return exit_code(counts.failed, counts.invalid, counts.gated)


def _refuse(given: Mapping[str, Any], settings: Mapping[str, Setting]) -> None:
    """Raise UsageError for what needs to know all jobs from the start."""
    why = ""
    if not given["inputs"]:
        why = "name a folder, files, a manifest or - for standard input"
    elif settings["score"].value or settings["draft_steps"].value:
        why = "candidates are chosen when all of them are drawn"
    elif given["shard"]:
        why = "which part a job is in depends on all jobs"
    elif not given["resume"]:
        why = "finished jobs are skipped from one look to the next: remove --no-resume"
    elif any(scheme_of(name) for name in given["inputs"]):
        why = "only files on this machine are followed"
    if why:
        raise UsageError(f"--follow cannot be used here: {why}", code="usage.follow")


class FollowedLines:
    """Lines of JSON that come on standard input; a line counts when its end has come."""

    def __init__(self, request: Callable[[Manifest], RunRequest]) -> None:
        self._request, self._data, self._taken = request, b"", 0
        self.is_over = False

    def take(self) -> RunRequest | None:
        """Return a run of all lines so far, if more have come."""
        self._read()
        end = len(self._data) if self.is_over else self._data.rfind(b"\n") + 1
        if not self._data[self._taken : end].strip():
            return None
        self._taken = end
        return self._request(manifest_of(self._data[:end], "stdin"))

    def _read(self) -> None:
        """Read what has come, or wait for it for a moment."""
        if self.is_over or sys.stdin is None:
            self.is_over = True
            return
        try:
            stream = sys.stdin.fileno()
        except (OSError, ValueError):  # text in memory
            self._data, self.is_over = sys.stdin.read().encode(), True
            return
        wait_s = _POLL_S
        while select.select([stream], [], [], wait_s)[0] and not self.is_over:
            found = os.read(stream, _MOST_READ)
            self._data, self.is_over, wait_s = self._data + found, not found, 0.0


class FollowedFiles:
    """A folder that fills, patterns, or a manifest that grows."""

    is_over = False

    def __init__(
        self, names: list[str], request: Callable[[], RunRequest], *, is_recursive: bool
    ) -> None:
        self._names, self._request, self._is_recursive = names, request, is_recursive
        self._taken: Files | None = None
        self._seen = frozenset(self._files())

    def take(self) -> RunRequest | None:
        """Return a run of all files, if some have come or changed, and rest since the last look."""
        if self._taken is not None:
            time.sleep(_POLL_S)
        before, self._seen = self._seen, frozenset(self._files())
        if self._seen == self._taken or self._seen != before:
            return None
        self._taken = self._seen
        try:
            return self._request()
        except UsageError as error:
            if not {one.code for one in getattr(error, "faults", (error,))} <= {*_EMPTY}:
                raise
            return None

    def _files(self) -> Iterator[tuple[str, int, int]]:
        for name in self._names:
            for path in glob.glob(name, recursive=True) if is_pattern(name) else [name]:
                yield from self._in_folder(path) if os.path.isdir(path) else self._facts(path)

    def _in_folder(self, folder: str) -> Iterator[tuple[str, int, int]]:
        for place, folders, files in os.walk(folder):
            if not self._is_recursive:
                folders.clear()
            for name in filter(is_picture_name, files):
                yield from self._facts(os.path.join(place, name))

    def _facts(self, path: str) -> Iterator[tuple[str, int, int]]:
        with suppress(OSError):  # it was removed, or is not there yet
            found = os.stat(path)
            yield path, found.st_size, found.st_mtime_ns
