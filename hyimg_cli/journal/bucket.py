"""A run's folder in an object store.

    results/00000000.jsonl      parts of the journal, numbered without a gap; each is created, and
                                only if there is none of its name
    results/00000999.all.jsonl  the last lines of all parts up to this one, so that few are read
    outputs/…  run.json  manifest.resolved.jsonl       as in a folder; each is uploaded whole
    lease.json                  who writes, renewed while it does
    results-2-of-8/…  lease-2-of-8.json             a shard's own

The numbered parts are the lock. A run creates the next one; a run that finds its next number taken
has been replaced, and stops. No clock is needed. The lease only serves to refuse a run before a
model is loaded. Pictures are made in a folder of this machine and uploaded before their line.
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
from hyimg_cli.errors import MachineError, OutputFolderError, StorageError
from hyimg_cli.files import json_of, opened, replace_file
from hyimg_cli.journal.disk import disk_errors, in_use, is_process, taken_over
from hyimg_cli.journal.journal import OUTPUTS, RESOLVED, RunFolder, files_of_result, json_line
from hyimg_cli.journal.journal_file import outcomes_in
from hyimg_cli.remote import as_os_errors, locate
from hyimg_cli.spec import digest

PARTS = "results"
# Seconds after which a lease is renewed, and after which one that nobody renewed is nobody's.
RENEWED_S, STALE_S = 10.0, 30.0
# The end waits so long for a renewal on its way: a lease that is left holds nobody up for longer.
_PARTING_S = STALE_S
# Parts that are read one by one before they are joined in one.
_JOINED_AFTER = 256
_AT_ONCE = 16
# S3's answer to a request that met another one for the same name; it may be sent again.
_CONFLICT, _CONFLICT_PAUSES_S = "ConditionalRequestConflict", (0.1, 1.0, 5.0)
_JOURNAL = re.compile(rf"{PARTS}(-[0-9]+-of-[0-9]+)?")
_LEASE = re.compile(r"lease(-[0-9]+-of-[0-9]+)?\.json")
_PART = re.compile(r"([0-9]{8})(\.all)?\.jsonl")


class PartJournal:
    """A journal of numbered parts. `append` returns once the lines are in the store."""

    def __init__(self, store: Any, run: str, parts: str = PARTS) -> None:
        """Goes behind the last part. Raises OSError, and MachineError for a store in which two may
        create one name.
        """
        self._store, self._parts, self._run = store, parts, run
        self._where = Path(store.path, parts)
        joined, single = _list_parts(store, parts)
        self._next = [joined, *single][-1] + 1
        first = self._name()
        try:
            self.append([])
            store.pipe_file(first, self._signed([]), mode="create")  # once more, which must fail
        except FileExistsError:
            return
        except (TypeError, NotImplementedError):
            pass  # it knows no such thing
        raise MachineError(
            "this store allows two writers to create the same object, so a run there would "
            "not be safe",
            where=self._where,
            hint="use a store with conditional writes (S3, GCS, MinIO from 2024 on), or a folder",
            code="machine.store",
        )

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines in one part. Raises StorageError if another run has taken over."""
        part = self._signed(lines)
        try:
            for pause_s in (*_CONFLICT_PAUSES_S, None):
                try:
                    self._store.pipe_file(self._name(), part, mode="create")
                    break
                except OSError as error:
                    # Two requests met, one of which may be our own, sent again.
                    if pause_s is None or _CONFLICT not in str(error.__cause__):
                        raise
                    time.sleep(pause_s)
        except FileExistsError:
            # The answer to our own request may have been lost, and the request sent again.
            if self._store.cat_file(self._name()) != part:
                raise taken_over(self._where) from None
        self._next += 1

    def _name(self) -> str:
        return f"{self._parts}/{self._next:08}.jsonl"

    def _signed(self, lines: Iterable[bytes]) -> bytes:
        """A part: whose it is, then its lines. No two runs write the same bytes."""
        return json.dumps({"run": self._run}).encode() + b"\n" + b"".join(lines)


def _list_parts(store: Any, parts: str) -> tuple[int, list[int]]:
    """The last number that parts were joined up to, or -1, and the numbers of the single parts
    behind it, in order.
    """
    found = _list_names(store, parts, _PART)
    joined = max((int(match[1]) for match in found if match[2]), default=-1)
    return joined, [n for match in found if not match[2] and (n := int(match[1])) > joined]


class BucketFolder(RunFolder):
    """The folder of a run at an address; its files are made in `folder`, on this machine."""

    def __init__(self, place: Path, shard: tuple[int, int] | None = None) -> None:
        self._address = address_of(place)
        name = f"hyimg-{digest.of_bytes(self._address.encode())[:16]}-{os.getpid()}"
        super().__init__(Path(tempfile.gettempdir()) / name, shard)
        self._parts, self._lease = f"{PARTS}{self.shard}", f"lease{self.shard}.json"
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)  # who reads fetches, too
        self.place = place
        self._run = secrets.token_hex(8)
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew_always, daemon=True)

    def __enter__(self) -> Self:
        with self._open_store() as store:
            self._refuse_held(store)
            self._clear()
            (self.folder / OUTPUTS).mkdir(parents=True, exist_ok=True)
            self._journal_parts = PartJournal(store, self._run, self._parts)
            self._join_parts(store)
            self._count_attempts()
            self._renew(store)
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # On its way it would put the lease back behind us.
        self._renewing.join(_PARTING_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self._renewing.is_alive():  # else the store does not answer
            with suppress(OSError, StorageError), self._open_store() as store:
                if self._is_own(store):
                    store.rm_file(self._lease)

    @property
    def is_run(self) -> bool:
        with self._open_store() as store:
            return bool(_list_names(store, "", _JOURNAL)) or bool(store.exists(RESOLVED))

    def _clear(self) -> None:
        """Remove what killed runs at this address left on this machine."""
        name = self.folder.name.rpartition("-")[0]
        for left in self.folder.parent.glob(f"{name}-[0-9]*"):
            process = int(left.name.rpartition("-")[2])
            if not is_process(process):
                shutil.rmtree(left, ignore_errors=True)

    def outcomes(self) -> Iterator[Iterator[dict[str, Any]]]:
        with self._open_store() as store:
            found = _list_names(store, "", _JOURNAL)
            journals = {name[0]: _read_parts(store, name[0]) for name in found}
        for name, data in journals.items():
            yield outcomes_in(data, self.place / name)

    def write_results(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add outcomes to the journal in one part; the last outcome of a job counts."""
        self._append(list(map(json_line, entries)))

    def confirm(self) -> None:
        """Do nothing: only the next run can write after the last part."""

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
        """True if the file is there: it was put whole, and nothing of it is read."""
        return name in self._files

    def _count_files(self, folder: str) -> int:
        return sum(name.startswith(f"{folder}/") for name in self._files)

    @cached_property
    def _files(self) -> frozenset[str]:
        """Names of the files below `outputs`, listed once."""
        with self._open_store() as store:
            return frozenset(store.find(OUTPUTS, refresh=True))

    def _publish(self, made: Iterable[tuple[Path, Mapping[str, Any]]]) -> None:
        """Puts the files of results, then takes them from this machine."""
        files: dict[Path, str] = {}
        for folder, entry in made:
            for name in files_of_result(entry):
                local = folder / name
                for file in filter(Path.is_file, (local, *local.glob("*"))):
                    files[file] = file.relative_to(folder).as_posix()
                if not local.exists() and name in self._former.get(entry["custom_id"], ()):
                    self._remove(name)  # a film that says nothing: it has no sidecar any more
        with self._open_store() as store, ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(store.put_file, map(str, files), files.values()))
        for file in files:
            file.unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        with self._open_store() as store, suppress(FileNotFoundError):
            store.rm(name, recursive=True)

    def _replace(self, name: str, data: Iterable[bytes]) -> None:
        # Through a file: a manifest of a million lines is not held twice.
        replace_file(self.folder / name, data, is_lasting=False)
        with self._open_store() as store:
            store.put_file(str(self.folder / name), name)

    @contextmanager
    def _open_store(self) -> Iterator[Any]:
        """The folder in its store; what the store raises is an error of the folder's."""
        with disk_errors(self.place), as_os_errors(self._address):
            yield _locate_folder(self._address)

    def _join_parts(self, store: Any) -> None:
        """Writes the last line of every job in one piece, where many parts came since the last."""
        joined, single = _list_parts(store, self._parts)
        if single[-1] - joined < _JOINED_AFTER:
            return
        outcomes = outcomes_in(_read_parts(store, self._parts), self.place / self._parts)
        latest = {entry["custom_id"]: json_line(entry) for entry in outcomes}
        with suppress(FileExistsError):
            name = f"{self._parts}/{single[-1]:08}.all.jsonl"
            store.pipe_file(name, b"".join(latest.values()), mode="create")

    def _refuse_held(self, store: Any) -> None:
        """Raises OutputFolderError where a lease that keeps this run out is renewed while we look:
        its own, or one of a run that is not a shard of the same count.
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
        """Such leases by name, but those of a process that ended here, or that are long past."""
        leases = {one[0]: _read_lease(store, one[0]) for one in _list_names(store, "", _LEASE)}
        return {
            name: lease
            for name, lease in leases.items()
            if not self.writes_beside(name.removesuffix(".json"))
            and time.time() - lease.get("time", 0) <= 4 * STALE_S
            and (lease.get("host") != socket.gethostname() or is_process(lease.get("process", 0)))
        }

    def _is_own(self, store: Any) -> bool:
        """True if the lease is still that of this run."""
        return bool(_read_lease(store, self._lease).get("run") == self._run)

    def _renew(self, store: Any) -> None:
        who = {"run": self._run, "host": socket.gethostname(), "process": os.getpid()}
        store.pipe_file(self._lease, json.dumps(who | {"time": time.time()}).encode())

    def _renew_always(self) -> None:
        while not self._ended.wait(RENEWED_S):
            # A lease that cannot be renewed costs others a refusal, and this run nothing.
            with suppress(OSError, StorageError), self._open_store() as store:
                if self._is_own(store):
                    self._renew(store)


def _locate_folder(address: str) -> Any:
    """A folder in its store, as a file system of its own."""
    system, root = locate(address)
    from fsspec.implementations.dirfs import DirFileSystem

    return DirFileSystem(root.rstrip("/"), system, skip_instance_cache=True)


def _list_names(store: Any, folder: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The names of this kind in a folder of the store, in order; a whole run's first."""
    try:
        paths = store.ls(folder, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    names = sorted({path.rstrip("/").rpartition("/")[2] for path in paths})
    return list(filter(None, map(pattern.fullmatch, names)))


def _read_lease(store: Any, name: str) -> dict[str, Any]:
    """A lease; empty where there is none, or none that is readable."""
    with suppress(FileNotFoundError, ValueError, TypeError):
        return dict(json_of(store.cat_file(name)))
    return {}


def _read_parts(store: Any, parts: str) -> bytes:
    """The lines of all parts. Raises OutputFolderError where one between others is missing."""
    joined, single = _list_parts(store, parts)
    gap = next((n for n, number in enumerate(single, joined + 1) if n != number), None)
    if gap is not None:
        raise OutputFolderError(
            f"part {gap:08}.jsonl of the journal is missing",
            where=f"{store.path}/{parts}",
            hint="restore it; without it hyimg cannot tell which jobs are done",
            code="output.damaged-journal",
        )
    before = store.cat_file(f"{parts}/{joined:08}.all.jsonl") if joined >= 0 else b""
    names = [f"{parts}/{number:08}.jsonl" for number in single]
    found = store.cat(names) if names else {}
    return b"".join([before, *(found[name].partition(b"\n")[2] for name in names)])


def run_folder(place: Path, shard: tuple[int, int] | None = None) -> RunFolder:
    """Return the folder of a run, or of a shard, on this machine or at an address."""
    return BucketFolder(place, shard) if address_of(place) else RunFolder(place, shard)
