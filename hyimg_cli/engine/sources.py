"""Check source pictures before a model is loaded: which are unreadable, and in which jobs."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hyimg_cli.addresses import address_of
from hyimg_cli.cache.disk import CHECKED_SOURCES, DiskStore
from hyimg_cli.errors import HyimgError, SourceImageError, UsageError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.media.carried import depth_fault, region_of
from hyimg_cli.media.images import probe_image
from hyimg_cli.media.source_files import address_fault
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import ImageJob, Job, Size
from hyimg_cli.spec.options import KeepOutside
from hyimg_cli.spec.units import counted

# Maximum number of sources that are named.
MOST_NAMED = 10
# Number of images decoded at a time; one may take 400 MB.
_AT_ONCE = 4
_TOLD_AFTER_S = 2.0
_MISSING, _FOLDER = "source.missing", "source.is-a-folder"
# Increase it if a file that was found intact might be refused now.
_CHECK_FORMAT = 2


@dataclass(frozen=True)
class SourcesSeen:
    """The source pictures of some jobs by path: their sizes, or why they cannot be read.

    `unfit`: by custom_id, why a job cannot keep its source outside an edit.
    """

    sizes: Mapping[str, Size]
    errors: Mapping[str, SourceImageError]
    unfit: Mapping[str, SourceImageError] = field(default_factory=dict)

    def errors_of(self, job: Job) -> Iterator[SourceImageError]:
        """Yield the reasons why a job cannot be tried; nothing if it can."""
        yield from (self.errors[path] for path in job.images if path in self.errors)
        if job.custom_id in self.unfit:
            yield self.unfit[job.custom_id]

    def error_of(self, job: Job) -> SourceImageError | None:
        """Return the first reason why a job cannot be tried, or None."""
        return next(self.errors_of(job), None)

    def sentences(self) -> Iterator[str]:
        """Yield sentences that count the missing, unreadable and unfit sources."""
        missing = sum(error.code == _MISSING for error in self.errors.values())
        for count, what in ((missing, "missing"), (len(self.errors) - missing, "unreadable")):
            if count:
                of = counted(len(self.sizes) + len(self.errors), "source")
                yield f"{count} of {of} {'is' if count == 1 else 'are'} {what}"
        if self.unfit:
            yield f"{counted(len(self.unfit), 'job')} cannot keep the source outside the edit"

    def named(self) -> Iterator[str]:
        """Yield the sentences, then the first sources and jobs that they are about."""
        yield from self.sentences()
        # For missing sources, the sentence gives the reason.
        names = [
            f"  {error.where}" + ("" if error.code == _MISSING else f": {error.what}")
            for error in self.errors.values()
        ]
        names += [f"  {error.where}: {error.what}" for error in self.unfit.values()]
        yield from names[:MOST_NAMED]
        if (rest := len(names) - MOST_NAMED) > 0:
            yield f"  and {rest} more; hyimg check --json names every one"


def turned_sizes(found: SourcesSeen, jobs: Sequence[Job]) -> Iterator[str]:
    """Yield a sentence if edits seem to give their size as HEIGHTxWIDTH by mistake."""
    turned = []
    for job in jobs:
        if not isinstance(job, ImageJob) or not job.images or job.images[0] not in found.sizes:
            continue
        asked, source = job.size, found.sizes[job.images[0]]
        if not asked.is_auto and not asked.is_ratio and asked.height != asked.width:
            ratio, other = source.width / source.height, asked.height / asked.width
            if (ratio > 1) == (other > 1) and abs(math.log(ratio / other)) < 0.05:
                turned.append((job, source))
    if turned:
        (job, source), more = turned[0], len(turned) - 1
        yield (
            f"{job.source_line}{f' and {more} more' if more else ''}: size is WIDTHxHEIGHT, "
            f"but {job.size} is the shape of the source ({source}) with height first, as in "
            "the official script"
        )


def probe_sources(
    jobs: Sequence[Job],
    config: CacheConfig | None = None,
    *,
    fetches: bool = False,
    tell: Callable[[str], object] = str,
) -> SourcesSeen:
    """Decode the jobs' source pictures; a file found intact is not read again until it changes.

    Pictures in a store are checked only if `fetches`; otherwise only their addresses, and their
    jobs find any other fault later.
    """
    # Results of the run itself are read once they are drawn.
    named = dict.fromkeys(path for job in jobs for path in job.files)
    paths = [path for path in named if fetches or not address_of(path)]
    known = _WholePictures(config or CacheConfig())
    others = (path for path in named if address_of(path) and not fetches)
    errors = {path: error for path in others if (error := address_fault(path))}
    # Taken before any file is read.
    marks = {path: _marks(path) for path in paths}
    sizes = {path: size for path in paths if (size := known.size_of(path, marks[path]))}
    left, began, is_told = [path for path in paths if path not in sizes], time.monotonic(), False
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        probes = [(path, pool.submit(probe_image, Path(path))) for path in left]
        for path, probe in probes:
            try:
                sizes[path], _ = probe.result()
                known.add(path, marks[path], sizes[path])
            except SourceImageError as error:
                errors[path] = error
            if not is_told and time.monotonic() - began > _TOLD_AFTER_S:
                is_told = True
                tell(f"reading {counted(len(left), 'source')}, once each until they change")
    finally:
        pool.shutdown(cancel_futures=True)
        known.keep()
    return SourcesSeen(sizes, errors, dict(_unfit(jobs, sizes)))


class _WholePictures:
    """Pictures of this machine that were decoded without a fault.

    Each folder has an entry in the disk cache. It holds by file name the marks of the file at that
    time, and its size in pixels.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._store = DiskStore(config.folder, config.budget_bytes)
        self._read, self._changed = cache(self._entry), set[str]()

    def size_of(self, path: str, marks: Sequence[int]) -> Size | None:
        """Return the size of a picture whose file has not changed; None for others."""
        folder, name = os.path.split(path)
        known = self._read(folder).get(name, [])
        return Size(*known[4:]) if marks and known[:4] == marks else None

    def add(self, path: str, marks: Sequence[int], size: Size) -> None:
        folder, name = os.path.split(path)
        if marks:
            self._read(folder)[name] = [*marks, size.height, size.width]
            self._changed.add(folder)

    def keep(self) -> None:
        for folder in self._changed:
            data = json.dumps(self._read(folder)).encode()
            self._store.write(CHECKED_SOURCES, _key(folder), data)

    def _entry(self, folder: str) -> dict[str, list[int]]:
        data = self._store.read(CHECKED_SOURCES, _key(folder))
        return json.loads(data) if data else {}


def _marks(path: str) -> list[int]:
    """Return file marks that change with the file; empty for a missing file or one in a store."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _key(folder: str) -> str:
    return digest.of_bytes(os.fsencode(f"{_CHECK_FORMAT} {os.path.abspath(folder)}"))


def _unfit(
    jobs: Sequence[Job], sizes: Mapping[str, Size]
) -> Iterator[tuple[str, SourceImageError]]:
    """Yield the jobs that cannot keep their source.

    Either no 8-bit picture could equal the source, or their region is not a valid region of it.
    """
    depth, region = cache(depth_fault), cache(_region_fault)
    by_id = {job.custom_id: job for job in jobs} if any(job.links for job in jobs) else {}
    for job in jobs:
        if not isinstance(job, ImageJob) or job.outside is None:
            continue
        size = _kept_size(job, sizes, by_id)
        if size is None:
            continue
        error = depth(Path(job.kept_image)) or region(job.outside, size)
        if error is not None:
            yield job.custom_id, error


def _kept_size(job: ImageJob, sizes: Mapping[str, Size], by_id: Mapping[str, Job]) -> Size | None:
    """Return the size of the source that a job keeps, or of the first source of a chain."""
    while job.kept_image not in sizes:
        maker = by_id.get(job.kept_link.custom_id) if job.kept_link else None
        if not isinstance(maker, ImageJob) or maker.outside is None:
            return None
        job = maker
    return sizes[job.kept_image]


def _region_fault(outside: KeepOutside, size: Size) -> SourceImageError | None:
    try:
        region_of(outside, size)
    except SourceImageError as error:
        if error.code == _FOLDER and address_of(outside.mask):
            what = "a folder of masks must be on this machine"
            hint = "copy it here, or write a manifest that names each picture's mask"
            return SourceImageError(what, where=outside.mask, hint=hint, code=_FOLDER)
        if error.code != _MISSING:
            return error
        hint = "give the path of a mask (relative to the manifest), or LEFT,TOP,RIGHT,BOTTOM"
        what = "the region's mask is not found"
        return SourceImageError(what, where=outside.mask, hint=hint, code=_MISSING)
    return None


def refuse_hopeless(found: SourcesSeen, jobs: Sequence[Job], run: RunFolder) -> None:
    """Raise UsageError if no job can be tried and the run's folder has no result."""
    if not jobs or not all(found.error_of(job) for job in jobs):
        return
    results = run.results()
    if not any(job.custom_id in results for job in jobs):
        hints = (error.hint for job in jobs for error in found.errors_of(job) if error.hint)
        none = "no job has all its source images" if found.errors else "no job can run"
        what = f"{none}: {', '.join(found.sentences())}"
        raise UsageError(what, hint=next(hints, ""), code="source.none")


def faults(found: SourcesSeen, jobs: Sequence[Job]) -> list[HyimgError]:
    """Return the faults of the source pictures, each with the line that names it."""
    return [
        SourceImageError(
            error.what, where=f"{job.source_line}: {error.where}", hint=error.hint, code=error.code
        )
        for job in jobs
        for error in found.errors_of(job)
    ]
