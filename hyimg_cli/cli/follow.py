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
from hyimg_cli.cli.one_file import OneFile
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
# Seconds in which nothing was written to a manifest, after which its last line needs no end.
_REST_S = 10.0
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

    def found(*, is_growing: bool = False) -> Manifest:
        # Each look would tell again which files are skipped.
        quietly = {**given, "quiet": True}
        return inputs.manifest_of(quietly, ctx.obj or (), settings, is_growing=is_growing)

    names: list[str] = given["inputs"]
    arrivals: Arrivals
    if names == ["-"]:
        arrivals = FollowedLines(request)
    elif given["prompt"] or not os.path.isfile(names[0]):
        is_recursive = bool(given["recursive"])
        arrivals = FollowedFiles(names, lambda: request(found()), is_recursive=is_recursive)
    else:
        arrivals = FollowedManifest(
            names[0], lambda is_growing: request(found(is_growing=is_growing))
        )
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
    elif given["prompt"] and given["inputs"] == ["-"]:
        why = "lines of standard input have their own prompts: remove --prompt"
    elif OneFile.named(given) is not None:
        why = "several results may come, and -o names one file: name a folder"
    elif any(scheme_of(name) for name in given["inputs"]):
        why = "only files on this machine are followed"
    if why:
        why, _, hint = why.partition(": ")
        what = f"--follow cannot be used here: {why}"
        raise UsageError(what, hint=hint, code="usage.follow")


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


class FollowedManifest:
    """A manifest that grows: a line counts when its end is written.

    If nothing is written for ten seconds, the last line counts without it.
    """

    is_over = False

    def __init__(self, path: str, request: Callable[[bool], RunRequest]) -> None:
        """`request` takes whether the last line may be half written."""
        self._path, self._request = path, request
        self._seen: tuple[object, ...] | None = None
        self._taken = ""

    def take(self) -> RunRequest | None:
        """Return a run of all whole lines, if some have come since the last look."""
        if self._seen is not None:
            time.sleep(_POLL_S)
        before, self._seen = self._seen, self._look()
        if self._seen == before:
            return None
        is_growing = bool(self._seen and self._seen[-1])
        request = _unless_empty(lambda: self._request(is_growing))
        if request is None or request.manifest.digest == self._taken:
            return None
        self._taken = request.manifest.digest
        return request

    def _look(self) -> tuple[object, ...]:
        """Return what differs if the file was written to, and last whether it may go on now."""
        with suppress(OSError):  # it is replaced at this moment
            found = os.stat(self._path)
            is_growing = time.time() - found.st_mtime < _REST_S
            return found.st_size, found.st_mtime_ns, is_growing
        return ()


class FollowedFiles:
    """A folder that fills, or patterns."""

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
        return _unless_empty(self._request)

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


def _unless_empty(request: Callable[[], RunRequest]) -> RunRequest | None:
    """Return the request; None if its inputs are still empty."""
    try:
        found = request()
    except UsageError as error:
        if not {one.code for one in getattr(error, "faults", (error,))} <= {*_EMPTY}:
            raise
        return None
    faults = {one.code for one in found.manifest.faults}
    return None if faults and faults <= {*_EMPTY} else found
