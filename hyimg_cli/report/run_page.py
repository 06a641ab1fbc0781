"""The page of a run: `report.html` in its folder, and its data next to it.

    OUT/report.html   report/index.js   report/picks.js   report/data-0001.js …   report/thumbs/

Data files are scripts, because a page opened from a disk cannot fetch. Each data file has
consecutive lines of results.jsonl in their order; a job's last line counts. So a folder's page is
the same no matter how often, or by which process, it was updated.
"""

import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.addresses import address_of
from hyimg_cli.errors import UsageError
from hyimg_cli.files import (
    JOURNAL_BYTES,
    bytes_of,
    json_of,
    opened,
    refuse_links,
    replace_file,
    storage_error,
)
from hyimg_cli.journal.edit_counts import EditCounts
from hyimg_cli.journal.journal import (
    PAGE,
    RESOLVED,
    RESULTS,
    RUN,
    RunFolder,
    attempt_of,
    json_line,
)
from hyimg_cli.journal.journal_file import outcomes_in, whole_lines
from hyimg_cli.journal.past_run import object_in, read_run_info, resolved_jobs
from hyimg_cli.models.registry import TOYS
from hyimg_cli.report.current import is_current, keep_state
from hyimg_cli.report.page import render
from hyimg_cli.report.picks import awaits_picks, other_run, shown_picks
from hyimg_cli.report.records import Entry, Pictures, Record, record
from hyimg_cli.report.thumbnails import LinkedPictures
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Event, JobEnded

DATA = "report"
# The run of a server's batch is in the batch's folder.
_BATCH_RUN = re.compile(r"(batch_[0-9a-f]{24})/run")
_PER_FILE = 200
# After a refresh, the page of a run waits for so many times as long as that took.
PAUSE = 100
# Processor seconds: for a refresh, and so at most every 20 s; and for the last one.
_THUMBNAILS_S, _LAST_THUMBNAILS_S = 0.2, 3.0
# The facts of a result's edit that the top of the page counts.
_COUNTED = ("kind", "gates")
logger = logging.getLogger(__name__)


class RunPage:
    """Updates the page of a folder; each update reads only the new lines of the journals."""

    def __init__(self, folder: Path) -> None:
        """Raise UsageError for a folder without a run, OutputFolderError for a damaged one."""
        self._folder = folder
        self._jobs = ResolvedJobs(folder)
        self._pictures = LinkedPictures(folder, self._jobs.shared)
        # Bytes and lines read so far from each journal.
        self._read: dict[Path, tuple[int, int]] = {}
        self._ended: dict[str, Ending] = {}
        self._records: list[str] = []
        # Results whose thumbnails were postponed, by their place among the records.
        self._waiting: dict[int, Entry] = {}

    @property
    def is_waiting(self) -> bool:
        """True if thumbnails were postponed."""
        return bool(self._waiting)

    def refresh(self, *, is_running: bool = False, thumbnails_s: float = math.inf) -> bool:
        """Write new results to the page; return True if a file changed.

        Makes thumbnails for at most `thumbnails_s` seconds. Raises OutputFolderError for a damaged
        journal, StorageError if a file cannot be written.
        """
        try:
            refuse_links(self._folder / DATA, self._folder)
            # Without its parents, so a run's folder that was moved away is not created again.
            (self._folder / DATA).mkdir(exist_ok=True)
            # Outcomes that were added since the last update.
            results: list[dict[str, Any]] = []
            for path in RunFolder(self._folder).journals():
                size, lines = self._read.get(path, (0, 0))
                with opened(path, JOURNAL_BYTES) as file:
                    file.seek(size)
                    fresh = whole_lines(file.read())
                results += outcomes_in(fresh, path, lines + 1)
                self._read[path] = size + len(fresh), lines + fresh.count(b"\n")
            if len(self._read) > 1:  # among journals, the latest attempt at a job counts
                results.sort(key=attempt_of)
            # Make records of these, and again of results whose thumbnails were postponed.
            self._pictures.limit(thumbnails_s)
            self._ended |= endings_of(results)
            work = [*enumerate(results, len(self._records)), *self._waiting.items()]
            self._records += [""] * len(results)
            for number, result in work:
                before = self._pictures.waiting
                self._records[number] = as_json(self._jobs.record_of(result, self._pictures))
                self._waiting.pop(number, None)
                if self._pictures.waiting > before:
                    self._waiting[number] = result
            # Write the data files with these records, then the index and the page.
            files, starts = {}, range(0, len(self._records), _PER_FILE)
            for number in sorted({number // _PER_FILE for number, _ in work}):
                some = self._records[starts[number] : starts[number] + _PER_FILE]
                data = f"hyimgReport.data({number}, [\n" + ",\n".join(some) + "\n]);\n"
                files[f"{DATA}/data-{number + 1:04}.js"] = data
            waiting = Counter(number // _PER_FILE for number in self._waiting)
            facts = self._jobs.index(self._ended) | {
                # The time of this update, because a killed run cannot report that it ended.
                "running": is_running and int(time.time()),
                # For each data file, its number of records, and how many of them will still change.
                "files": [
                    [min(_PER_FILE, len(self._records) - start), waiting[start // _PER_FILE]]
                    for start in starts
                ],
            }
            facts["picks"] = ""
            if shown := shown_picks(self._folder):
                files[f"{DATA}/picks.js"] = picks = call("picks", shown)
                # The page loads the file again if this has changed.
                facts["picks"] = digest.of_bytes(picks.encode("utf-8", "backslashreplace"))[:16]
            files[f"{DATA}/index.js"] = call("index", facts)
            about = {name: facts[name] for name in ("command", "title")}
            files[PAGE] = render("report.html", inline="", **about)
            return bool([name for name, text in files.items() if self._put(name, text)])
        except OSError as error:
            raise storage_error(error, self._folder) from error

    def _put(self, name: str, text: str) -> bool:
        """Replace a file unless it already has this content; return True if it was replaced."""
        path, data = self._folder / name, text.encode("utf-8", "backslashreplace")
        with suppress(OSError):  # missing, longer, or not a file: replace it
            if bytes_of(path, len(data)) == data:
                return False
        refuse_links(path.parent, self._folder)
        replace_file(path, data, is_lasting=False)
        return True


class LivePage:
    """Updates a run's page during the run, in a separate thread, with pauses.

    With few cores, its time slows the run itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.perf_counter()
        self._spent_s = self._next_s = 0.0
        self._has_news = self._has_shown_any = False
        self._page: RunPage | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._at_work: Future[bool] | None = None

    def look(self, event: Event) -> None:
        """Start a refresh if there are new results and enough time; never blocks."""
        is_news = isinstance(event, JobEnded)
        self._has_news |= is_news
        # Refresh at once for the folder as the run finds it, then for the first picture.
        if self._at_work is not None and (self._has_shown_any or not is_news):
            # After a failed refresh, none is made until the end.
            if not self._at_work.done() or self._at_work.exception() is not None:
                return
            assert self._page is not None, "it was made by the first refresh"
            is_early = time.perf_counter() < self._next_s
            if is_early or not (self._has_news or self._page.is_waiting):
                return
        self._has_news = False
        self._has_shown_any |= is_news
        self._at_work = self._thread.submit(self._refresh)

    def close(self) -> bool:
        """Write the final page; return True if it changed. Raises as `RunPage` does.

        If the run had nothing to do, and nothing has changed since the last page, it is not made
        again.
        """
        self._thread.shutdown()
        if self._at_work is None and is_current(self._folder):
            return False
        # Start again from an empty state, to notice changes in the pictures.
        self._page = None
        changed = self._refresh(is_running=False)
        if self._page is not None and not self._page.is_waiting:
            keep_state(self._folder)
        took_s = time.perf_counter() - self._began
        logger.info("the page took %.2f s of the run's %.1f s", self._spent_s, took_s)
        return changed

    def _refresh(self, *, is_running: bool = True) -> bool:
        began = time.thread_time()
        try:
            self._page = self._page or RunPage(self._folder)
            most_s = _THUMBNAILS_S if is_running else _LAST_THUMBNAILS_S
            return self._page.refresh(is_running=is_running, thumbnails_s=most_s)
        finally:
            last_s = time.thread_time() - began
            self._spent_s += last_s
            self._next_s = time.perf_counter() + PAUSE * last_s


class ResolvedJobs:
    """A run's resolved jobs: the place and the line of each, by custom_id.

    `only`: the jobs to show, if not all. `shared`: the folder that all source images share, written
    as in their paths.
    """

    def __init__(self, folder: Path, only: Collection[str] | None = None) -> None:
        """Raise UsageError for a folder without a run, OutputFolderError for a damaged one."""
        if not any(os.path.exists(folder / name) for name in (RESULTS, RESOLVED, RUN)):
            hint = f"give a folder with {RESULTS}: the -o of hyimg generate"
            if address := address_of(folder):
                hint = f"copy the run to this machine: hyimg merge {address} -o FOLDER"
            what = "this is not the output folder of a run on this machine"
            raise UsageError(what, where=folder, hint=hint, code="report.no-run")
        self._folder = folder
        self.lines: dict[str, tuple[int, bytes]] = {}
        # Of a batch of a server: its name, and the jobs of each request.
        self._requests: dict[str, list[str]] = {}
        is_batch = _BATCH_RUN.fullmatch("/".join(folder.resolve().parts[-2:]))
        self._batch = is_batch[1] if is_batch else ""
        self._other = other_run(folder)
        self.shared: Path | None = None
        folders = set[str]()
        for place, (name, entry) in enumerate(resolved_jobs(folder)):
            if only is not None and name not in only:
                continue
            self.lines[name] = place, json_line(entry)
            if self._batch:
                self._requests.setdefault(str(entry.get("candidate_of") or name), []).append(name)
            folders.update(map(os.path.dirname, entry.get("images", ())))
        with suppress(ValueError):  # no sources, or both absolute and relative paths
            self.shared = Path(os.path.commonpath(folders))

    def place_of(self, result: Entry) -> int:
        """Return a result's place; a job that left the manifest comes after all others."""
        return self.lines.get(result["custom_id"], (len(self.lines), b""))[0]

    def record_of(self, result: Entry, pictures: Pictures) -> Record:
        """Return a result with its job."""
        _, line = self.lines.get(result["custom_id"], (0, b"{}"))
        return record(self.place_of(result), json_of(line), result, pictures)

    def index(self, ended: Mapping[str, "Ending"]) -> Record:
        """Return the run's summary for the top of the page; `ended`: by job, from `endings_of`."""
        done, edits, info = 0, EditCounts(), read_run_info(self._folder)
        for one in ended.values():
            if one.is_done:
                done += 1
                edits.count_edit(one.edit)
        flags, models = object_in(info, "flags"), object_in(info, "models")
        name = str(object_in(info, "manifest").get("name") or self._folder.resolve().name)
        answered = sum(all(job in ended for job in jobs) for jobs in self._requests.values())
        return {
            "format": 1,
            "command": "hyimg serve" if self._batch else "hyimg generate",
            "title": self._batch or name,
            "requests": [answered, len(self._requests)] if self._batch else None,
            "other": self._other,
            "awaits_picks": awaits_picks(self._folder),
            "done": done,
            "failed": len(ended) - done,
            "gated": edits.gated,
            "unkept": edits.whole,
            "warned": sum(one.is_done and one.is_warned for one in ended.values()),
            "edits": edits.remarks,
            "left": len(self.lines.keys() - ended.keys()),
            # Notes that readers need if a model was used by default.
            "toys": [
                said
                for name, said in TOYS.items()
                if (flag := object_in(flags, name)).get("origin") == "default"
                and str(flag.get("value")) in models
            ],
            "environment": list(_environment(info)),
        }


class Ending(NamedTuple):
    """How a job ended, as far as the top of the page counts it. `edit`: its kind and gates."""

    is_done: bool
    is_warned: bool
    edit: Mapping[str, Any]


def endings_of(results: Iterable[Entry]) -> dict[str, Ending]:
    """Return how each job ended, by custom_id; a job's last result counts."""
    return {
        str(one["custom_id"]): Ending(
            one.get("status") == "done",
            bool(one.get("warnings")),
            {name: value for name, value in (one.get("edit") or {}).items() if name in _COUNTED},
        )
        for one in results
    }


def _environment(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the run's environment, and flags with their origin."""
    manifest, hardware = object_in(info, "manifest"), object_in(info, "hardware")
    if manifest:
        yield "manifest", f"{manifest.get('name')}, sha256 {str(manifest.get('digest'))[:16]}…"
    for name, fingerprint in object_in(info, "models").items():
        yield "model", f"{name.rpartition('/')[2]}, fingerprint {str(fingerprint)[:16]}…"
    flags = object_in(info, "flags")
    for name in flags:
        flag = object_in(flags, name)
        if flag.get("origin") not in ("default", "model"):
            yield f"{name} ({flag.get('origin')})", str(flag.get("value"))
    if hardware:
        found = hardware.get("gpus")
        gpus = ", ".join(map(str, found if isinstance(found, list) else ())) or "no GPU"
        yield "machine", f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {gpus}"
        yield "system", str(hardware.get("system"))
    versions = object_in(info, "versions")
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or "?"


def call(name: str, value: Any) -> str:
    """Return a script that passes a value to the page."""
    return f"hyimgReport.{name}({as_json(value)});\n"


def as_json(value: Any) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
