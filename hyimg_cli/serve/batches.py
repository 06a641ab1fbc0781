"""Batches that outlive the server: each is a manifest, and a run of it in a thread.

    STATE/batches/<id>/batch.json           the request, its owner, the status and its times
    input.jsonl, manifest.jsonl, sources/   the requests of the batch (`intake`)
    run/                                    an ordinary run folder, which
                                            `hyimg generate manifest.jsonl -o run` continues

A batch is on the disk before its id is returned. After a kill, the next start resumes batches in
the order in which they were created; everything that is not in batch.json is in the run's journal.
"""

import json
import logging
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from hyimg_cli.engine.run import ManifestEvent, ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.files import remove, replace_file, replacing
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.serve.errors import Refused, bad_request, internal, server_full
from hyimg_cli.serve.intake import INPUT, link, write_manifest
from hyimg_cli.serve.metrics import Metrics
from hyimg_cli.serve.records import BatchRecord, due_at, entries, read_record
from hyimg_cli.serve.results import KINDS, MANIFEST, RUN, BatchResults
from hyimg_cli.serve.uploads import Expiry
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import JobEnded, Remark

if TYPE_CHECKING:
    from hyimg_cli.engine.service import Service

logger = logging.getLogger(__name__)
RECORD = "batch.json"
_RECORD_BYTES = 100_000_000
# The maximum number of batches that have not ended; clients must wait if it is reached.
_MOST_UNENDED, _WAIT_S = 1_000, 60
_ENDED = ("failed", "completed", "expired", "cancelled")
# Fields of batch.json that the API does not show.
_HIDDEN = ("owner", "came", "asked", "base_url", "keep_s")
# Fields that the API shows of every batch, whether they are set or not.
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_UNSET = dict.fromkeys([f"{name}_at" for name in _TIMES], None)
_UNSET |= dict.fromkeys(("errors", "output_file_id", "error_file_id"), None)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
# Seconds before a retry of a run that the machine ended, for example because of a full disk.
_AGAIN_S = 30.0
_LOOK_S, _SWEEP_S = 0.5, 60.0


def _seconds_of(window: str) -> int:
    """Return the seconds of a time such as 24h. Raises ValueError."""
    number, unit = window[:-1], window[-1:]
    if number.isascii() and number.isdigit() and len(number) < 9 and unit in _UNITS:
        seconds = int(number) * _UNITS[unit]
        if 0 < seconds <= _LONGEST_S:
            return seconds
    raise ValueError("expected a time such as 24h, 30d at most")


_Name = Annotated[str, StringConstraints(max_length=64)]
_Text = Annotated[str, StringConstraints(max_length=512)]
_Window = Annotated[str, AfterValidator(lambda window: _seconds_of(window) and window)]


class BatchRequest(BaseModel, extra="forbid", strict=True):
    """The body of a request that creates a batch."""

    input_file_id: str
    endpoint: Literal["/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"]
    completion_window: _Window
    metadata: Annotated[dict[_Name, _Text], Field(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


class Batch:
    """One batch: its record, as on the disk, and the state of its run."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.id: str = record["id"]
        self.folder, self.record, self.lock = folder, record, threading.RLock()
        # When its completion window ends, on the clock that cannot be set.
        self._due = due_at(record["expires_at"])
        # The error that interrupted its run, and when to try again.
        self.trouble: HyimgError | None = None
        self.again_at = 0.0
        # True once the faults of its input are known.
        self.is_read = False
        # While it runs: its thread, its run, and the results of its requests.
        self.thread: threading.Thread | None = None
        self.run: ManifestRun | None = None
        self.results: BatchResults | None = None

    @property
    def is_late(self) -> bool:
        """True once its completion window is over."""
        return time.monotonic() >= self._due

    @property
    def is_closing(self) -> bool:
        """True if no more of its jobs may start."""
        return self.record["status"] in ("cancelling", "finalizing", *_ENDED) or self.is_late

    def save(self, status: str = "", **changes: Any) -> None:
        """Change the record; a `status` also sets its time.

        Raises StorageError and changes nothing if the record cannot be written.
        """
        if status:
            changes |= {"status": status, f"{status}_at": int(time.time())}
        with self.lock, disk_errors(self.folder):
            record = self.record | changes
            replace_file(self.folder / RECORD, json.dumps(record).encode())
            self.record = record

    def shown(self) -> dict[str, Any]:
        """Return the batch as the API shows it."""
        record, results, trouble = self.record, self.results, self.trouble
        found = _UNSET | {name: value for name, value in record.items() if name not in _HIDDEN}
        if results is not None:
            found["request_counts"] = results.counts()
        if trouble is not None:
            what = f"the run was interrupted and will be tried again: {trouble.what}"
            error = {"line": None, "param": None, "code": trouble.code, "message": what}
            found["errors"] = {"object": "list", "data": [error]}
        return found

    def stop(self) -> None:
        """Stop its run after the current step."""
        with self.lock:
            if self.run is not None:
                self.run.request_stop(signal.SIGTERM)


class Batches:
    """All batches of a server: waiting, running (`at_once` of them) and ended.

    One thread reads their inputs, starts their runs in order, and watches the time.
    """

    at_once = 4

    def __init__(
        self, state: Path, service: "Service", wire: Wire, metrics: Metrics, config: RunConfig
    ) -> None:
        """Raises StorageError."""
        self._folder, self._service, self._wire = state / "batches", service, wire
        self._uploads, self._metrics = wire.uploads, metrics
        self._config = config
        self._lock, self._wake, self._is_over = threading.Lock(), threading.Event(), False
        self._scheduler = threading.Thread(target=self._schedule, name="batches", daemon=True)
        self._uploads.made, self._uploads.forget = self._made, self._forget
        with disk_errors(state):
            make_folders(self._folder)
            read = {
                folder: read_record(folder / RECORD, folder.name, BatchRecord, _RECORD_BYTES)
                for folder in entries(self._folder)
            }
        found = [Batch(folder, record) for folder, record in read.items() if record]
        found.sort(key=lambda one: (one.record["came"], one.id))
        self._batches = {one.id: one for one in found}
        for file in self._uploads.outputs():
            if not (self._folder / file["batch"]).exists():
                logger.info("forgot %s: the folder of its batch was removed", file["id"])
                self._uploads.delete(file)
        self._uploads.sweep()

    def start(self) -> None:
        """Resume all batches that have not ended, in the order in which they were created."""
        self._scheduler.start()

    def stop(self) -> None:
        """End in order: runs stop after the current step, and the next start resumes them."""
        self._is_over = True
        self._wake.set()
        if self._scheduler.is_alive():
            self._scheduler.join()
        for batch in self._unended():
            batch.stop()
        for thread in filter(None, [one.thread for one in list(self._batches.values())]):
            thread.join()

    def counts(self) -> Counter[str]:
        """Count the batches of each status."""
        return Counter(one.record["status"] for one in list(self._batches.values()))

    def create(self, owner: str, asked: BatchRequest, key: str, base_url: str) -> dict[str, Any]:
        """Write a new batch to the disk, or return the one that this `key` created before.

        Raises Refused.
        """
        name = "batch_" + (digest.of_json([owner, key])[:24] if key else secrets.token_hex(12))
        facts = asked.model_dump(exclude_unset=True)
        came, body = time.time(), digest.of_json(facts)
        with self._lock:
            if (batch := self._batches.get(name)) is not None:
                if batch.record["asked"] != body:
                    what = "the Idempotency-Key was used with another body"
                    raise Refused(422, what, code="batch.other-body")
                return batch.shown()
            file = self._uploads.find(asked.input_file_id, owner, "input_file_id")
            if file["purpose"] != "batch":
                what = f"the purpose of {file['id']} is {file['purpose']}; expected batch"
                raise bad_request("input_file_id", what, "batch.bad-input")
            if len(self._unended()) >= _MOST_UNENDED:
                raise server_full(f"{_MOST_UNENDED:,} batches are unfinished, the maximum", _WAIT_S)
            expiry = facts.pop("output_expires_after", None)
            record: dict[str, Any] = {"id": name, "object": "batch", "status": "validating"}
            record |= {"metadata": None} | facts | {"created_at": int(came)}
            record["expires_at"] = int(came) + _seconds_of(asked.completion_window)
            record["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
            record |= {"owner": owner, "came": came, "asked": body, "base_url": base_url}
            record["keep_s"] = expiry["seconds"] if expiry else None
            folder = self._folder / name
            with disk_errors(self._folder), replacing(folder) as temporary:
                temporary.mkdir()
                link(self._uploads.path_of(file), temporary / INPUT)
                (temporary / RECORD).write_text(json.dumps(record))
            batch = self._batches[name] = Batch(folder, record)
            self._wake.set()
        return batch.shown()

    def find(self, name: str, owner: str) -> Batch:
        """Return a caller's batch. Raises Refused: 404."""
        batch = self._batches.get(name)
        if batch is None or batch.record["owner"] != owner:
            what = f"batch not found: {name[:80]}"
            raise Refused(404, what, param="batch_id", code="batch.not-found")
        return batch

    def every(self, owner: str) -> list[Batch]:
        """Return a caller's batches, oldest first."""
        return [one for one in list(self._batches.values()) if one.record["owner"] == owner]

    def cancel(self, batch: Batch) -> dict[str, Any]:
        """Stop a batch and keep its results. Raises Refused if it has ended."""
        with batch.lock:
            status = batch.record["status"]
            if status in ("validating", "in_progress"):
                batch.save("cancelling")
                batch.again_at = 0.0
                batch.stop()
                self._wake.set()
            elif status not in ("cancelling", "cancelled"):
                raise bad_request("", f"the batch is already {status}", "batch.is-over")
        return batch.shown()

    def _unended(self) -> list[Batch]:
        return [one for one in list(self._batches.values()) if one.record["status"] not in _ENDED]

    def _schedule(self) -> None:
        """Advance every batch by one step whenever something may have changed."""
        swept = time.monotonic()
        while not self._is_over:
            unended = self._unended()
            running = sum(one.thread is not None for one in unended)
            for batch in unended:
                if batch.is_late and batch.thread is not None:
                    batch.stop()
                if batch.thread is not None or time.monotonic() < batch.again_at:
                    continue
                if not batch.is_read:
                    self._guarded(batch, self._read)
                if batch.is_read and (running < self.at_once or batch.is_closing):
                    about = batch, self._run
                    batch.thread = threading.Thread(target=self._guarded, args=about, name=batch.id)
                    batch.thread.start()
                    running += 1
            if time.monotonic() > swept + _SWEEP_S:
                swept = time.monotonic()
                try:
                    self._uploads.sweep()
                except HyimgError as error:
                    logger.warning("cannot remove expired uploads: %s", error)
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _guarded(self, batch: Batch, step: Callable[[Batch], object]) -> None:
        """Take a step of a batch; if an error interrupts it, show the error and try again later."""
        batch.trouble, batch.again_at = None, 0.0
        try:
            step(batch)
        except Exception as error:
            if not self._is_over:
                logger.error("%s was interrupted", batch.id, exc_info=error)
                # The text of another error may contain a path of the server.
                shown = error if isinstance(error, HyimgError) else internal(code="internal")
                batch.trouble = shown
                batch.again_at = time.monotonic() + _AGAIN_S
        batch.thread = None
        self._wake.set()

    def _read(self, batch: Batch) -> None:
        """Write a batch's manifest, unless that is done, or end the batch with its faults."""
        record, faults, counts = batch.record, [], {}
        has_manifest = (batch.folder / MANIFEST).is_file()
        is_whole = has_manifest or (batch.folder / INPUT).is_file()
        if is_whole and not has_manifest:
            endpoint, owner = record["endpoint"], record["owner"]
            faults = write_manifest(batch.folder, endpoint, owner, self._wire)
        try:
            counts = BatchResults(batch.folder).counts()
        except ValueError:
            is_whole = False
        if not is_whole:
            gone = _gone("the input of the batch", "send it again")
            faults = [{"line": None, "param": None, "code": gone.code, "message": gone.message}]
        with batch.lock:
            if faults and (batch.record["status"] == "validating" or not is_whole):
                batch.save("failed", errors={"object": "list", "data": faults})
            else:
                batch.save(request_counts=counts)
                batch.is_read = True

    def _run(self, batch: Batch) -> None:
        """Run a batch's remaining jobs, and finish the batch if all have ended."""
        try:
            if not batch.is_closing:
                self._work(batch)
        except Interrupted:
            if not batch.is_closing:
                raise
        if not self._is_over:
            self._finish(batch)

    def _work(self, batch: Batch) -> None:
        """Run a batch's jobs. Raises Interrupted, and errors that end a run."""
        results, owner = BatchResults(batch.folder), batch.record["owner"]

        def hear(event: ManifestEvent) -> None:
            if isinstance(event, JobEnded):
                self._metrics.ended("batch", event.outcome)
                results.is_done[event.outcome.custom_id] = event.is_done
            elif isinstance(event, Remark):
                logger.info("%s: %s", batch.id, event.text)

        # The run's page shows this title.
        manifest = replace(read_manifest(batch.folder / MANIFEST), title=batch.id)
        output = replace(self._config.output, folder=batch.folder / RUN)
        request = RunRequest(manifest, replace(self._config, output=output), self._wire.settings)
        run = ManifestRun(request, lambda _: self._service.session(batch.id, owner))
        with batch.lock:
            if self._is_over or batch.is_closing:
                raise Interrupted(signal.SIGTERM)
            if batch.record["status"] == "validating":
                batch.save("in_progress")
            batch.run, batch.results = run, results
        try:
            run.run(hear)
        finally:
            with batch.lock:
                batch.record = batch.record | {"request_counts": results.counts()}
                batch.run = batch.results = None

    def _finish(self, batch: Batch) -> None:
        """Record a batch's output files, then its end."""
        with batch.lock:
            is_cancelled = batch.record["status"] == "cancelling"
            if not is_cancelled:
                batch.save("finalizing")
        results, record = BatchResults(batch.folder), batch.record
        counts, files = results.counts(), dict[str, str]()
        is_whole = counts["total"] == counts["completed"] + counts["failed"]
        status = "completed" if is_whole or not batch.is_late else "expired"
        status = "cancelled" if is_cancelled else status
        for kind in KINDS:
            if nbytes := sum(map(len, results.lines(kind, record, status))):
                files[f"{kind}_file_id"] = name = f"file-{batch.id.partition('_')[2]}-{kind}"
                facts = {"batch": batch.id, "kind": kind, "bytes": nbytes}
                facts["filename"] = f"{batch.id}_{kind}.jsonl"
                owner, keep_s = record["owner"], record["keep_s"]
                self._uploads.record(name, owner, "batch_output", facts, keep_s)
        batch.save(status, request_counts=counts, **files)

    def _made(self, file: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the content of a batch's output or error file. Raises Refused if it is gone."""
        batch = self._batches.get(file["batch"])
        with suppress(OSError, ValueError):
            if batch is not None:
                results, record = BatchResults(batch.folder), batch.record
                if results.counts() == record["request_counts"]:
                    return results.lines(file["kind"], record, record["status"])
        raise _gone(f"the batch of {file['id']}", "send the batch again")

    def _forget(self, file: Mapping[str, Any]) -> None:
        """Remove the pictures of a batch whose output file was deleted."""
        if file["kind"] == "output":
            remove(self._folder / file["batch"] / RUN / "outputs")


def _gone(what: str, hint: str) -> Refused:
    """Return the refusal of what somebody removed from the state folder, or damaged there: 410."""
    what = f"{what} was removed or damaged on the server's disk"
    return Refused(410, what, hint=hint, code="file.gone")
