"""A run's folder in an object store.

    results/00000000.jsonl      parts of the journal, numbered without a gap; each is created only
                                if no object has its name
    results/00000999.all.jsonl  each job's last line in the parts up to this one, so fewer are read
    outputs/…  run.json  manifest.resolved.jsonl       as in a folder; each is uploaded whole
    lease.json                  the run that writes; renewed while it does
    results-2-of-8/…  lease-2-of-8.json             the same for one shard
    pieces/0007/…  pieces/0007.json                 the same for one piece, while several work

The numbered parts are the lock. A run creates the next one; a run that finds its next number taken
has been replaced, and stops. No clock is needed. The lease only serves to refuse a run before a
model is loaded. Pictures are written to a local folder and uploaded before their result line.
"""

import atexit
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from hyimg_cli.addresses import address_of
from hyimg_cli.errors import HyimgError, MachineError, OutputFolderError, StorageError, UsageError
from hyimg_cli.files import json_of, opened, replace_file
from hyimg_cli.journal.disk import disk_errors, in_use, is_process, taken_over
from hyimg_cli.journal.journal import (
    OUTPUTS,
    PIECES,
    PLAN,
    RESOLVED,
    RESULTS,
    RunFolder,
    files_of_result,
    json_line,
)
from hyimg_cli.journal.journal_file import outcomes_in
from hyimg_cli.remote import as_os_errors, create_file, locate
from hyimg_cli.spec import digest

PARTS = "results"
# Seconds between renewals of a lease, and seconds without renewal after which it has expired.
RENEWED_S, STALE_S = 10.0, 30.0
# Seconds to wait at the end for a renewal in progress; a lease left behind expires by then.
_PARTING_S = STALE_S
# Number of single parts after which they are joined into one.
_JOINED_AFTER = 256
_AT_ONCE = 16
_JOURNAL = re.compile(rf"{PARTS}(-[0-9]+-of-[0-9]+)?")
_LEASE = re.compile(r"lease(-[0-9]+-of-[0-9]+)?\.json")
_PIECES = re.compile(rf"{PIECES}(-[0-9]+-of-[0-9]+)?")
_PIECE = re.compile(r"[0-9]{4,}")
_PIECE_LEASE = re.compile(r"[0-9]{4,}\.json")
_PART = re.compile(r"([0-9]{8})(\.all)?\.jsonl")


class PartJournal:
    """A journal of numbered parts. `append` returns once the lines are in the store."""

    def __init__(self, store: Any, place: Path, run: str, parts: str = PARTS) -> None:
        """Start after the last part; `place` is the folder that `store` is.

        Raises OSError, or MachineError if two writers can create the same object in this store.
        """
        self._store, self._place, self._parts, self._run = store, place, parts, run
        joined, single = _list_parts(store, parts)
        self._next = [joined, *single][-1] + 1
        first, self._begins_at = self._name(), self._next + 1
        try:
            self.append([])
            create_file(store, first, self._signed([]))  # the second time must fail
        except FileExistsError:
            return
        except NotImplementedError:
            pass
        raise MachineError(
            "this store allows two writers to create the same object, so a run there would "
            "not be safe",
            where=place / parts,
            hint="use a store with conditional writes (S3, GCS, SeaweedFS, MinIO from 2024 on), "
            "or a folder",
            code="machine.store",
        )

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines in one part.

        Raises StorageError if another run has taken over, OutputFolderError if this run had added
        nothing by then.
        """
        part = self._signed(lines)
        try:
            create_file(self._store, self._name(), part)
        except FileExistsError:
            # The answer to this run's own request may have been lost, and the request sent again.
            if self._store.cat_file(self._name()) != part:
                is_late = self._next <= self._begins_at
                raise (in_use if is_late else taken_over)(self._place) from None
        self._next += 1

    def _name(self) -> str:
        return f"{self._parts}/{self._next:08}.jsonl"

    def _signed(self, lines: Iterable[bytes]) -> bytes:
        """Return a part: the run's id, then `lines`. No two runs write the same bytes."""
        return json.dumps({"run": self._run}).encode() + b"\n" + b"".join(lines)


def _list_parts(store: Any, parts: str) -> tuple[int, list[int]]:
    """Return the number of the last joined part and, in order, of the single parts after it.

    The first is -1 if no parts were joined.
    """
    found = _list_names(store, parts, _PART)
    joined = max((int(match[1]) for match in found if match[2]), default=-1)
    return joined, [n for match in found if not match[2] and (n := int(match[1])) > joined]


class BucketFolder(RunFolder):
    """The folder of a run at an address; its files are first written to the local `folder`."""

    def __init__(
        self,
        place: Path,
        shard: tuple[int, int] | None = None,
        piece: int | None = None,
        local: Path | None = None,
    ) -> None:
        """`local`: the local folder of the process that ends later than this one."""
        self._address = address_of(place)
        name = f"hyimg-{digest.of_bytes(self._address.encode())[:16]}-{os.getpid()}"
        super().__init__(local or Path(tempfile.gettempdir()) / name, shard, piece)
        self._is_local_own, self._has_pieces = local is None, False
        self._parts, self._lease = f"{PARTS}{self.shard}", f"lease{self.shard}.json"
        if piece is not None:
            self._parts = f"{self.pieces}/{piece:04}"
            self._lease = f"{self._parts}.json"
        if self._is_local_own:
            atexit.register(shutil.rmtree, self.folder, ignore_errors=True)  # readers fetch, too
        self.place = place
        self._run = secrets.token_hex(8)
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew_always, daemon=True)

    def __enter__(self) -> Self:
        with self._open_store() as store:
            if self.piece is not None:
                if self._leases_in_the_way(store):
                    raise in_use(self.place)
            else:
                self._refuse_held(store)
                self._clear()
            (self.folder / OUTPUTS).mkdir(parents=True, exist_ok=True)
            self._journal_parts = PartJournal(store, self.place, self._run, self._parts)
            if self.piece is None:
                self.gather()
                self._join_parts(store)
            self._count_attempts()
            self._renew(store)
        self._renewing.start()
        return self

    def refuse_unusable(self) -> None:
        """Raise nothing: that the store can be read shows when its results are."""

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._has_pieces:
            with suppress(OSError, HyimgError):
                self.gather()  # what cannot be gathered now can be read, and the next run does it
        # A renewal in progress would write the lease again after it is removed.
        self._renewing.join(_PARTING_S)
        if self._is_local_own:
            shutil.rmtree(self.folder, ignore_errors=True)
        if not self._renewing.is_alive():  # otherwise the store does not answer
            with suppress(OSError, StorageError), self._open_store() as store:
                if self._is_own(store):
                    store.rm_file(self._lease)

    @property
    def is_run(self) -> bool:
        with self._open_store() as store:
            return bool(_list_journals(store)) or bool(store.exists(RESOLVED))

    @property
    def is_locked(self) -> bool:
        with self._open_store() as store:
            return bool(_live_leases(store, _list_leases(store)))

    def _clear(self) -> None:
        """Remove local files that killed runs at this address left behind."""
        name = self.folder.name.rpartition("-")[0]
        for left in self.folder.parent.glob(f"{name}-[0-9]*"):
            process = int(left.name.rpartition("-")[2])
            if not is_process(process):
                shutil.rmtree(left, ignore_errors=True)

    def outcomes(self) -> Iterator[Iterator[dict[str, Any]]]:
        with self._open_store() as store:
            found = _list_journals(store)
            journals = {name: _read_parts(store, self.place, name) for name in found}
        for name, data in journals.items():
            yield outcomes_in(data, self.place / name)

    def own_outcomes(self) -> Iterator[dict[str, Any]]:
        with self._open_store() as store:
            data = _read_parts(store, self.place, self._parts)
        yield from outcomes_in(data, self.place / self._parts)

    def gather(self) -> None:
        with self._open_store() as store:
            if _live_leases(store, _list_names_in(store, self.pieces, _PIECE_LEASE)):
                return
            known = {digest.of_bytes(line) for line in _lines_of(store, self.place, self._parts)}
            fresh = list[bytes]()
            for piece in _list_names_in(store, self.pieces, _PIECE):
                lines = _lines_of(store, self.place, piece)
                fresh += [line for line in lines if digest.of_bytes(line) not in known]
            if fresh:
                self._journal_parts.append(fresh)
            with suppress(FileNotFoundError):
                store.rm(self.pieces, recursive=True)

    def write_note(self, name: str, data: bytes) -> None:
        with self._open_store() as store:
            store.pipe_file(f"{self.pieces}/{name}", data)

    def read_note(self, name: str) -> bytes:
        with self._open_store() as store, suppress(FileNotFoundError):
            return bytes(store.cat_file(f"{self.pieces}/{name}"))
        return b""

    def begin_pieces(self, data: bytes) -> None:
        self._has_pieces = True
        self.write_note(PLAN, data)

    def new_lines(self, read: dict[str, int]) -> Iterator[bytes]:
        with self._open_store() as store:
            for piece in _list_names_in(store, self.pieces, _PIECE):
                _, single = _list_parts(store, piece)
                for number in (one for one in single if one > read.get(piece, -1)):
                    part = store.cat_file(f"{piece}/{number:08}.jsonl")
                    read[piece] = number
                    yield from part.splitlines()[1:]

    def write_results(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add outcomes to the journal in one part; the last outcome of a job counts."""
        self._append(list(map(json_line, entries)))

    def confirm(self) -> None:
        """Do nothing: the next part cannot be added if another run has taken over."""

    def _append(self, lines: Sequence[bytes]) -> None:
        with self._open_store():
            self._journal_parts.append(lines)

    def bring(self, name: str, source: Path) -> None:
        with self._open_store() as store, opened(source) as file:
            store.pipe_file(name, file.read())

    def fetch(self, name: str) -> Path:
        local = self.folder / name
        if not local.exists():
            local.parent.mkdir(parents=True, exist_ok=True)
            with as_os_errors(self._address):
                _locate_folder(self._address).get_file(name, str(local))
        return local

    def _is_as_written(self, name: str, sha256: str) -> bool:
        """Return True if the file exists; it was uploaded whole, so it is not read."""
        return name in self._files

    def _count_files(self, folder: str) -> int:
        return sum(name.startswith(f"{folder}/") for name in self._files)

    @cached_property
    def _files(self) -> frozenset[str]:
        """Names of the files below `outputs`; listed once."""
        with self._open_store() as store:
            return frozenset(store.find(OUTPUTS, refresh=True))

    def _publish(self, entry: Mapping[str, Any]) -> None:
        """Upload the files of a result, then remove the local ones."""
        files: dict[Path, str] = {}
        for name in files_of_result(entry):
            local = self.folder / name
            for file in filter(Path.is_file, (local, *local.glob("*"))):
                files[file] = file.relative_to(self.folder).as_posix()
            if not local.exists() and name in self.former.get(entry["custom_id"], ()):
                self._remove(name)  # a new video without metadata has no sidecar
        with self._open_store() as store, ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(store.put_file, map(str, files), files.values()))
        for file in files:
            file.unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        with self._open_store() as store, suppress(FileNotFoundError):
            store.rm(name, recursive=True)

    def _replace(self, name: str, data: Iterable[bytes]) -> None:
        # Upload from a file, so a manifest of a million lines is not in memory twice.
        replace_file(self.folder / name, data, is_lasting=False)
        with self._open_store() as store:
            store.put_file(str(self.folder / name), name)

    @contextmanager
    def _open_store(self) -> Iterator[Any]:
        """Yield the folder in its store; errors of the store are raised as errors of the folder."""
        with disk_errors(self.place), as_os_errors(self._address):
            yield _locate_folder(self._address)

    def _join_parts(self, store: Any) -> None:
        """Write each job's last line to one object, if many parts were added since the last one."""
        joined, single = _list_parts(store, self._parts)
        if single[-1] - joined < _JOINED_AFTER:
            return
        lines = _read_parts(store, self.place, self._parts)
        outcomes = outcomes_in(lines, self.place / self._parts)
        latest = {entry["custom_id"]: json_line(entry) for entry in outcomes}
        with suppress(FileExistsError):
            name = f"{self._parts}/{single[-1]:08}.all.jsonl"
            create_file(store, name, b"".join(latest.values()))

    def _refuse_held(self, store: Any) -> None:
        """Raise OutputFolderError if a lease that excludes this run is renewed while we watch.

        Such a lease has this run's name, or is of a run that is not a shard of the same count.
        """
        leases, until = self._leases_in_the_way(store), time.monotonic() + STALE_S
        while leases and time.monotonic() < until:
            time.sleep(min(1.0, RENEWED_S / 2))
            former, leases = leases, self._leases_in_the_way(store)
            for name, lease in leases.items():
                if lease != former.get(name, lease):
                    holder = f"process {lease.get('process')} on {lease.get('host')}"
                    raise in_use(self.place, holder)

    def _leases_in_the_way(self, store: Any) -> dict[str, dict[str, Any]]:
        """Return leases that exclude this run, by name.

        Leases that are not live are left out. A piece is excluded only by its own lease.
        """
        if self.piece is not None:
            return _live_leases(store, [self._lease])
        others = (
            name
            for name in _list_leases(store)
            if not self.writes_beside(name.partition("/")[0].removesuffix(".json"))
        )
        return _live_leases(store, others)

    def _is_own(self, store: Any) -> bool:
        """Return True if the lease is still this run's."""
        return bool(_read_lease(store, self._lease).get("run") == self._run)

    def _renew(self, store: Any) -> None:
        who = {"run": self._run, "host": socket.gethostname(), "process": os.getpid()}
        store.pipe_file(self._lease, json.dumps(who | {"time": time.time()}).encode())

    def _renew_always(self) -> None:
        while not self._ended.wait(RENEWED_S):
            # If a renewal fails, other runs are not refused before they load a model; this run
            # goes on.
            with suppress(OSError, StorageError), self._open_store() as store:
                if self._is_own(store):
                    self._renew(store)


def _locate_folder(address: str) -> Any:
    """Return a folder in its store, as a separate file system."""
    system, root = locate(address)
    from fsspec.implementations.dirfs import DirFileSystem

    return DirFileSystem(root.rstrip("/"), system, skip_instance_cache=True)


def _list_names(store: Any, folder: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Return matches of `pattern` among the names in a folder, in order, a whole run's first."""
    try:
        paths = store.ls(folder, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    names = sorted({path.rstrip("/").rpartition("/")[2] for path in paths})
    return list(filter(None, map(pattern.fullmatch, names)))


def _list_journals(store: Any) -> list[str]:
    """Return the journals of the folder, a whole run's first, those of pieces last."""
    found = [one[0] for one in _list_names(store, "", _JOURNAL)]
    for place in _list_names(store, "", _PIECES):
        found += _list_names_in(store, place[0], _PIECE)
    return found


def _list_leases(store: Any) -> list[str]:
    """Return the leases of the folder: of a whole run, of shards, then of pieces."""
    found = [one[0] for one in _list_names(store, "", _LEASE)]
    for place in _list_names(store, "", _PIECES):
        found += _list_names_in(store, place[0], _PIECE_LEASE)
    return found


def _list_names_in(store: Any, folder: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the names in a folder that match, in order, with the folder's own."""
    return [f"{folder}/{one[0]}" for one in _list_names(store, folder, pattern)]


def _lines_of(store: Any, place: Path, parts: str) -> list[bytes]:
    return _read_parts(store, place, parts).splitlines(keepends=True)


def _live_leases(store: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the leases of these names that are live."""
    leases = {name: _read_lease(store, name) for name in names}
    return {name: lease for name, lease in leases.items() if _is_live(lease)}


def _is_live(lease: Mapping[str, Any]) -> bool:
    """True unless a lease is old, or its process on this machine has ended."""
    is_recent = time.time() - lease.get("time", 0) <= 4 * STALE_S
    is_here = lease.get("host") == socket.gethostname()
    return is_recent and (not is_here or is_process(lease.get("process", 0)))


def _read_lease(store: Any, name: str) -> dict[str, Any]:
    """Return a lease; empty if it does not exist or cannot be read."""
    with suppress(FileNotFoundError, ValueError, TypeError):
        return dict(json_of(store.cat_file(name)))
    return {}


def _read_parts(store: Any, place: Path, parts: str) -> bytes:
    """Return the lines of all parts. Raises OutputFolderError if a part between is missing."""
    joined, single = _list_parts(store, parts)
    gap = next((n for n, number in enumerate(single, joined + 1) if n != number), None)
    if gap is not None:
        raise OutputFolderError(
            f"part {gap:08}.jsonl of the journal is missing",
            where=place / parts,
            hint="restore it; without it hyimg cannot tell which jobs are done",
            code="output.damaged-journal",
        )
    before = store.cat_file(f"{parts}/{joined:08}.all.jsonl") if joined >= 0 else b""
    names = [f"{parts}/{number:08}.jsonl" for number in single]
    found = store.cat(names) if names else {}
    return b"".join([before, *(found[name].partition(b"\n")[2] for name in names)])


def run_folder(
    place: Path,
    shard: tuple[int, int] | None = None,
    piece: int | None = None,
    local: Path | None = None,
) -> RunFolder:
    """Return the folder of a run, a shard or a piece of it, on this machine or at an address."""
    if address_of(place):
        return BucketFolder(place, shard, piece, local)
    return RunFolder(place, shard, piece)


def existing_run(place: Path) -> RunFolder:
    """Return the output folder of a run that has begun. Raises UsageError for any other folder."""
    if not (found := run_folder(place)).is_run:
        hint = f"name the -o of hyimg generate, which has {RESULTS} and {RESOLVED}"
        what = "this is not the output folder of a run"
        raise UsageError(what, where=place, hint=hint, code="usage.no-run")
    return found
