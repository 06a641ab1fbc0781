"""The output folder of one run at a time: a line per outcome, and the files of its jobs.

    OUT/  .lock   run.json   manifest.resolved.jsonl   results.jsonl   outputs/NAME.png, .jpg, .mp4
          outputs/NAME.frames/0000.png   latents/<custom_id>.safetensors (unfinished videos)
          .lock-2-of-8   results-2-of-8.jsonl (of one shard; shards of one count share the folder)
          pieces/  0007.lock   0007.jsonl   while several processes work (`journal/pieces.py`)

NAME is the custom_id, or the result of the job's template; a job's line has the path of its file.
A line is appended only after its file is in place, and is on disk when `append` returns. So a kill
can leave a picture without a line, or half a line at the end, but never a line without its file.
Each append checks that the lock and the journal are still those of this run.
"""

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

from hyimg_cli.errors import HyimgError, JobError, OutputFolderError, StorageError
from hyimg_cli.files import (
    JOURNAL_BYTES,
    bytes_of,
    opened,
    refuse_links,
    remove,
    replace_file,
    replacing,
)
from hyimg_cli.journal.disk import (
    disk_errors,
    find_holder,
    in_use,
    make_folders,
    refuse_place,
    take_lock,
    taken_over,
)
from hyimg_cli.journal.journal_file import JournalFile, outcomes_in, whole_lines
from hyimg_cli.manifest.output_names import name_of, path_of
from hyimg_cli.manifest.resolved import lines_beside
from hyimg_cli.settings.kinds import is_custom_id
from hyimg_cli.settings.name_template import fault_of
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import EDIT_SUFFIXES, LINEAGE, MOST_CROPS, Job

Kept = TypeVar("Kept")
OUTPUTS = "outputs"
RESULTS = "results.jsonl"
RESOLVED = "manifest.resolved.jsonl"
MISSING = "missing.jsonl"
RUN = "run.json"
PAGE = "report.html"
LATENTS = "latents"
LOCK = ".lock"
PIECES = "pieces"
PLAN = "plan.json"
# The plan while the command that will cut it prepares its run.
PREPARING = b"{}"
# Seconds that a shard waits for another one to enter the folder, and that a run waits for the
# processes of another one to end.
_DOOR_S = 60.0
_PARTING_S = 5.0
_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class JobFolder(ABC):
    """The folder where a session writes its jobs' files and records their outcomes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # How often each job was tried so far, by custom_id.
        self.attempts = Counter[str]()
        # Completes an outcome before its line is written.
        self.sign: Callable[[Outcome], Outcome] = lambda outcome: outcome

    def path_for(self, name: str, suffix: str = ".png") -> Path:
        """Return the path for a file of this name: a picture, or a video with its side files."""
        assert not fault_of(name), f"{name!r} never passed the manifest's check"
        return self.folder / OUTPUTS / f"{name}{suffix}"

    def place_for(self, job: Job, suffix: str) -> Path:
        """Return the path for a job's file and make its folder.

        Raises as `make_places` does, and JobError if a folder already has the name of the file
        or of a video's sidecar.
        """
        path = self.path_for(name_of(job), suffix)
        self._make_place(path.parent)
        for name in files_of({"path": path.relative_to(self.folder).as_posix()}):
            if self.is_folder(name):
                raise JobError(
                    "a folder has the name of the output file",
                    where=name,
                    hint="remove it, then run the job again with --retry-failed",
                    code="job.folder-in-the-way",
                )
        return path

    def save(self, job: Job, suffix: str, data: bytes) -> tuple[str, str]:
        """Write a file of a job, whole or not at all; return its name in the folder and its sha256.

        Raises as `place_for` does, and StorageError.
        """
        path = self.place_for(job, suffix)
        with disk_errors(path.parent):
            replace_file(path, data)
        return path.relative_to(self.folder).as_posix(), digest.of_bytes(data)

    def is_folder(self, name: str) -> bool:
        """Return True if a folder of the run has the name of a file."""
        place = self.folder / name
        return place.is_dir() and not place.is_symlink()

    def latents_for(self, custom_id: str, part: int = 0) -> Path:
        """Return the path of an unfinished job's latents; the writer makes their folder.

        `part`: of the drawing of a part of it, see `ImageJob.parts`.
        """
        assert is_custom_id(custom_id), f"{custom_id!r} never passed the manifest's check"
        name = custom_id.replace("/", "~") + (f"+{part}" if part else "")
        return self.inside(f"{LATENTS}/{name}.safetensors")

    def inside(self, name: str) -> Path:
        """Return a path in the run's folder that may be written or removed.

        Raises OutputFolderError if a link on the way leads out of the folder.
        """
        path = self.folder / name
        with disk_errors(self.folder):
            refuse_links(path.parent, self.folder)
        return path

    def make_places(self, jobs: Iterable[Job]) -> None:
        """Make the folders below `outputs` that the jobs' names need.

        Raises OutputFolderError if a file is in the way, or a link leads elsewhere.
        """
        for place in sorted({os.path.dirname(path_of(job)) for job in jobs}):
            self._make_place(self.folder / OUTPUTS / place)

    def _make_place(self, place: Path) -> None:
        with disk_errors(self.folder):
            refuse_links(place, self.folder)
            if place != self.folder / OUTPUTS:
                make_folders(place)

    @abstractmethod
    def append(self, outcome: Outcome) -> Outcome:
        """Add the line of an outcome whose files are here; return the outcome as it was recorded.

        The line is on disk when this returns. Raises JournalError if another process removed or
        changed the journal; it is then left unchanged. After any other StorageError, nothing of the
        line remains.
        """


class RunFolder(JobFolder):
    """An output folder. Reading needs no lock; writing needs `with`, which takes it.

    `shard`: number and count of the shard that writes; every shard reads all results. `piece`: the
    number of a piece of the run or shard, which one of several processes writes.
    """

    def __init__(
        self, folder: Path, shard: tuple[int, int] | None = None, piece: int | None = None
    ) -> None:
        super().__init__(folder)
        # The suffix in the names of a shard's own files; empty for a whole run.
        self.place, self.shard = folder, f"-{shard[0]}-of-{shard[1]}" if shard else ""
        self.part = shard
        self.pieces, self.piece = f"{PIECES}{self.shard}", piece
        own = f"{self.pieces}/{piece or 0:04}"
        self.lock_name = f"{LOCK}{self.shard}" if piece is None else f"{own}.lock"
        self._journal_name = f"results{self.shard}.jsonl" if piece is None else f"{own}.jsonl"
        # Files of earlier results, by job, that are removed once the job's new line is on disk.
        self.former: dict[str, list[str]] = {}
        # While the folder is written: what to release at the end, the lock and the journal.
        self._held: ExitStack | None = None
        self._lock: int
        self._journal: JournalFile

    def __enter__(self) -> Self:
        """Make the folder, take its lock, and repair the traces of a kill.

        Raises OutputFolderError if another run holds the lock, StorageError if it is read-only.
        """
        with disk_errors(self.folder), ExitStack() as held:
            self._refuse_links()
            make_folders(self.folder / OUTPUTS)
            if self.piece is None:
                self._take_lock(held)
            else:
                self._lock = take_lock(self.folder / self.lock_name, held)
            self._journal = JournalFile(self.folder / self._journal_name)
            held.callback(self._journal.close)
            self._held = held
            if self.piece is None:
                self.gather()
            self._count_attempts()
            self._held = held.pop_all()
        return self

    def refuse_unusable(self) -> None:
        """Raise what entering the folder would raise, except for another run's lock.

        Writes nothing.
        """
        with disk_errors(self.folder):
            self._refuse_links()
            refuse_place(self.folder / OUTPUTS)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, HyimgError):
            if self.piece is None:
                self.gather()  # what cannot be gathered now can be read, and the next run does it
            if not self.shard and self.piece is None:  # another may be about to write latents
                (self.folder / LATENTS).rmdir()  # fails if latents are left for the next run
        held, self._held = self._held, None
        assert held is not None, "the folder was entered"
        held.close()

    def _refuse_links(self) -> None:
        for name in (LATENTS, OUTPUTS, self.pieces):
            refuse_links(self.folder / name, self.folder)

    def _take_lock(self, held: ExitStack) -> None:
        """Take the lock; if no other shard is in the folder, remove leftovers of killed runs.

        A whole run keeps `.lock`. A shard holds it only while it enters, then its own lock.
        """
        with ExitStack() as entering:
            if self.shard:
                take_lock(self.folder / LOCK, entering, _DOOR_S)
            own = self.folder / self.lock_name
            self._lock = take_lock(own, held)
            others = [path for path in self.folder.glob(f"{LOCK}-*-of-*") if path != own]
            for path in others:
                if (holder := find_holder(path)) and not self.writes_beside(path.name):
                    raise in_use(self.folder, holder)
            pieces = [*self.folder.glob(f"{PIECES}*/*.lock")]
            until = time.monotonic() + _PARTING_S
            for path in pieces:
                if self.writes_beside(path.parent.name):
                    continue
                while holder := find_holder(path):  # processes of a killed run end in a moment
                    if time.monotonic() > until:
                        raise in_use(self.folder, holder)
                    time.sleep(0.02)
            if not any(map(find_holder, (*others, *pieces))):
                self._clear()

    def writes_beside(self, other: str) -> bool:
        """Return True if this shard and the one whose name `other` ends in are of one count."""
        count = self.shard.rpartition("-")[2]
        return bool(count) and other.endswith(f"-of-{count}") and not other.endswith(self.shard)

    def _count_attempts(self) -> None:
        """Count from all results; of a piece, from its own."""
        own = ((entry, entry) for entry in self.own_outcomes())
        found = self.results() if self.piece is None else find_last([own])
        self.attempts = Counter({job: one.get("attempt", 0) for job, one in found.items()})

    def _clear(self) -> None:
        places = [self.folder, self.folder / LATENTS]
        for place, below, _ in os.walk(self.folder / OUTPUTS):
            below[:] = [name for name in below if not name.endswith(".frames")]
            places.append(Path(place))
        for temporary in [one for place in places for one in place.glob(".*.[0-9]*.tmp")]:
            remove(temporary)

    @property
    def is_locked(self) -> bool:
        """Return True while a run, or a part of one, writes here."""
        locks = (*self.folder.glob(f"{LOCK}*"), *self.folder.glob(f"{PIECES}*/*.lock"))
        return any(map(find_holder, locks))

    def gather(self) -> None:
        """Move the lines of all pieces into this journal, unless a process still writes one.

        Then nothing else remains of the pieces. A kill in between leaves lines in both places; they
        are not added again.
        """
        self._refuse_links()
        place = self.folder / self.pieces
        if not place.is_dir() or any(map(find_holder, place.glob("*.lock"))):
            return
        known = {digest.of_bytes(line) for line in self._journal.lines()}
        for path in sorted(place.glob("[0-9]*.jsonl")):
            lines = whole_lines(bytes_if_any(path)).splitlines(keepends=True)
            if fresh := [line for line in lines if digest.of_bytes(line) not in known]:
                self._append(fresh)
        remove(place)
        others = self.folder.glob(f"{LOCK}-*-of-*")
        if not any(find_holder(path) for path in others if path.name != self.lock_name):
            self._clear()

    @property
    def is_run(self) -> bool:
        """Return True if a run was started in this folder."""
        return bool(self.journals()) or (self.folder / RESOLVED).is_file()

    def write_run(self, info: Mapping[str, Any]) -> None:
        """Replace run.json."""
        text = json.dumps(info, indent=2, ensure_ascii=False, default=str) + "\n"
        self._replace(RUN, [text.encode("utf-8", "backslashreplace")])

    def write_resolved(self, jobs: Iterable[Job]) -> None:
        """Replace manifest.resolved.jsonl with one line per job, all values filled in.

        Its paths are relative to the folder: read there as a manifest, it gives the same jobs.
        """
        self.write_lines(RESOLVED, lines_beside(jobs, self.place))

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace a file of JSON lines in the folder."""
        self._replace(name, map(json_line, lines))

    def write_results(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace all journals with these outcomes."""
        self.write_lines(RESULTS, entries)
        for path in self.journals():
            if path.name != RESULTS:
                remove(path)

    def bring(self, name: str, source: Path) -> None:
        """Link a file from elsewhere into the folder under a name, or copy it if that fails."""
        path = self.inside(name)
        with disk_errors(self.folder), opened(source) as file, replacing(path) as temporary:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.name, temporary)
            except OSError:
                with open(temporary, "xb") as copy:
                    shutil.copyfileobj(file, copy)

    def fetch(self, name: str) -> Path:
        """Return the local path of a file in the folder, fetched if needed. Raises OSError."""
        return self.folder / name

    def holds(self, outputs: Iterable[Mapping[str, Any]], *, with_frames: bool = False) -> bool:
        """Return True if the files of outputs exist as they were written.

        A video's frames are counted, not read again.
        """
        with suppress(OSError, KeyError):
            for output in outputs:
                if not self._is_as_written(output["path"], output["sha256"]):
                    return False
                if with_frames and "num_frames" in output:
                    frames = output["frames_path"]
                    if frames is None or self._count_files(frames) != output["num_frames"]:
                        return False
            return True
        return False

    def _is_as_written(self, name: str, sha256: str) -> bool:
        return digest.of_file(self.folder / name) == sha256

    def _count_files(self, folder: str) -> int:
        return len(os.listdir(self.folder / folder))

    def _replace(self, name: str, data: Iterable[bytes]) -> None:
        assert self._held is not None, "the folder is written without its lock"
        with disk_errors(self.folder):
            # Shards on several machines may have equal process numbers, so equal temporary names.
            written = self.folder / (f".{name}{self.shard}" if self.shard else name)
            replace_file(written, data)
            if self.shard:
                os.replace(written, self.folder / name)

    def write_note(self, name: str, data: bytes) -> None:
        """Replace a small file for other processes of this run; it need not outlive a power cut."""
        with disk_errors(self.folder):
            replace_file(self.folder / self.pieces / name, data, is_lasting=False)

    def read_note(self, name: str) -> bytes:
        """Return the bytes of such a file; empty if it does not exist."""
        with disk_errors(self.folder):
            return bytes_if_any(self.folder / self.pieces / name)

    def begin_pieces(self, data: bytes) -> None:
        """Let pieces be written; `data`: what other processes must know about them."""
        with disk_errors(self.folder):
            make_folders(self.folder / self.pieces)
        self.write_note(PLAN, data)

    def new_lines(self, read: dict[str, int]) -> Iterator[bytes]:
        """Yield the lines that were added to pieces; `read`: how much of each was read before."""
        with disk_errors(self.folder):
            for path in sorted((self.folder / self.pieces).glob("[0-9]*.jsonl")):
                before = read.get(path.name, 0)
                with suppress(FileNotFoundError):
                    if path.stat().st_size > before:
                        with opened(path, JOURNAL_BYTES) as file:
                            file.seek(before)
                            whole = whole_lines(file.read())
                        read[path.name] = before + len(whole)
                        yield from whole.splitlines()

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the last outcome of each job by custom_id, in the order of first appearance.

        A last line that a kill cut off is skipped. Raises OutputFolderError for any other line that
        is not an outcome.
        """
        return find_last(((entry, entry) for entry in outcomes) for outcomes in self.outcomes())

    def journals(self) -> list[Path]:
        """Return the journals of the folder, a whole run's first."""
        shards = sorted(self.folder.glob("results-*-of-*.jsonl"))
        pieces = sorted(self.folder.glob(f"{PIECES}*/[0-9]*.jsonl"))
        return [path for path in (self.folder / RESULTS, *shards, *pieces) if os.path.lexists(path)]

    def outcomes(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the outcomes in each journal."""
        for path in self.journals():
            with disk_errors(self.folder):
                data = bytes_if_any(path)
            yield outcomes_in(data, path)

    def own_outcomes(self) -> Iterator[dict[str, Any]]:
        """Yield the outcomes in the journal that this run, shard or piece writes."""
        path = self.folder / self._journal_name
        with disk_errors(self.folder):
            data = bytes_if_any(path)
        yield from outcomes_in(data, path)

    def append(self, outcome: Outcome) -> Outcome:
        outcome = self.sign(outcome)
        entry = outcome_to_json(outcome)
        with disk_errors(self.folder):
            self._publish(entry)
            self._append([json_line(entry)])
            if outcome.status == "done":
                files = files_of_result(entry)
                for path in self.former.pop(outcome.custom_id, ()):
                    if path not in files:
                        self._remove(path)
        self.attempts[outcome.custom_id] = outcome.attempt
        if outcome.status == "done":
            with suppress(StorageError, OutputFolderError):  # leftovers only take up disk space
                self.drop_latents([outcome.custom_id])
        return outcome

    def _publish(self, entry: Mapping[str, Any]) -> None:
        """Do nothing: the files of a result are in place."""

    def drop_latents(self, jobs: Iterable[str]) -> None:
        """Remove the latents of jobs that are done or that start from the beginning."""
        with disk_errors(self.folder):
            place = self.folder / LATENTS
            there = {*os.listdir(place)} if place.is_dir() else set[str]()
            for custom_id in jobs if there else ():
                for part in range(MOST_CROPS + 1):
                    if (path := self.latents_for(custom_id, part)).name in there:
                        path.unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        remove(self.inside(name))

    def supersede(self, former: Mapping[str, list[str]]) -> None:
        """Mark files of earlier results, by job, for removal once the job's new line is on disk."""
        self.former = dict(former)

    def confirm(self) -> None:
        """Raise as `append` does if the journal has changed since this run last wrote it."""
        with disk_errors(self.folder):
            self._refuse_taken_lock()
            self._journal.confirm()

    def _append(self, lines: Sequence[bytes]) -> None:
        self._refuse_taken_lock()
        self._journal.append(lines)

    def _refuse_taken_lock(self) -> None:
        """Raise StorageError if the lock was removed and another run has taken over."""
        assert self._held is not None, "the journal is written without the folder's lock"
        holder = bytes_if_any(self.folder / self.lock_name)
        if holder and holder != os.pread(self._lock, 200, 0):
            raise taken_over(self.folder, holder.decode(errors="replace"))


def find_last(
    journals: Iterable[Iterable[tuple[Mapping[str, Any], Kept]]],
) -> dict[str, Kept]:
    """Return the values paired with the jobs' last outcomes, by custom_id.

    They are in order of first appearance. The last line of a journal counts; among several
    journals, the latest attempt counts.
    """
    found: dict[str, tuple[tuple[int, bool], Kept]] = {}
    for outcomes in journals:
        last = {entry["custom_id"]: (attempt_of(entry), kept) for entry, kept in outcomes}
        for name, (attempt, kept) in last.items():
            if name not in found or attempt >= found[name][0]:
                found[name] = attempt, kept
    return {name: kept for name, (_, kept) in found.items()}


def attempt_of(entry: Mapping[str, Any]) -> tuple[int, bool]:
    """Return a number that is greater for later outcomes among several journals."""
    return entry.get("attempt") or 0, entry.get("status") == "done"


# Fields that only some jobs have: a line without a value has no such field.
_LEFT_OUT = ("written", "confidence", "sigmas", *LINEAGE, "source_sha256", "model_sha256")
_LEFT_OUT += ("answer", "answer_token_ids", "finish", "choices", "mass", "thought", "record")


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as a result line, with the user's `x_` keys."""
    entry = asdict(outcome)
    extra: dict[str, Any] = entry.pop("extra")
    for name in _LEFT_OUT:
        if entry[name] is None:
            del entry[name]
    if not outcome.finishing_key:
        del entry["edit"], entry["finishing_key"]
    return entry | extra


def files_of(output: Mapping[str, Any]) -> list[str]:
    """Return every file of an output, including a video's sidecar and frames."""
    path = str(output["path"])
    sidecar = [path.removesuffix(".mp4") + ".json"] if path.endswith(".mp4") else []
    frames = output.get("frames_path")
    return [path, *sidecar, *([str(frames)] if _is_below(frames) else [])]


def files_of_edit(entry: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the side files of an edit that keeps its source, by kind.

    Each has a `path` and a `sha256`, which is empty if the line has none.
    """
    edit = entry.get("edit") or {}
    digests = edit.get("sha256")
    digests = digests if isinstance(digests, dict) else {}
    kinds = [kind for kind in EDIT_SUFFIXES if _is_below(edit.get(kind))]
    return {kind: {"path": edit[kind], "sha256": digests.get(kind, "")} for kind in kinds}


def files_of_result(entry: Mapping[str, Any]) -> list[str]:
    """Return every file of a job by its line; for a failed one, the kept redraw."""
    beside = [file["path"] for file in files_of_edit(entry).values()]
    return [*(file for one in outputs_of(entry) for file in files_of(one)), *beside]


def outputs_of(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the outputs of a result that name a file below `outputs`."""
    return [one for one in entry.get("outputs") or () if _is_below(one.get("path"))]


def _is_below(path: Any) -> bool:
    parts = PurePosixPath(path).parts if isinstance(path, str) else ()
    return parts[:1] == (OUTPUTS,) and ".." not in parts and len(parts) > 1


def json_line(entry: Mapping[str, Any]) -> bytes:
    """Return a line of a file of JSON lines."""
    # Half a surrogate pair (a file name that is not UTF-8) becomes a JSON escape, and so survives.
    return (_encoded(entry) + "\n").encode("utf-8", "backslashreplace")


def bytes_if_any(path: Path) -> bytes:
    """Return the bytes of a file of the folder; empty if it does not exist."""
    try:
        return bytes_of(path, JOURNAL_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return b""
