"""Batches that outlive the server: each one a manifest, and a run of it in a thread.

    STATE/batches/<id>/batch.json   what was asked, by whom, what became of it and when
    input.jsonl, manifest.jsonl, sources/   the requests (`intake`)
    run/   an ordinary run folder: `hyimg generate manifest.jsonl -o run` goes on with it

A batch is on the disk before its id is told. What a killed server leaves is taken up at the next
start, in the order in which it came: everything but batch.json's words is in the run's journal.
"""

import json
import logging
import re
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from hyimg_cli.engine.run import ManifestEvent, ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.files import bytes_of, json_of, remove, replace_file, replacing
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.serve.errors import Refused, bad_request, internal, server_full
from hyimg_cli.serve.intake import INPUT, link, write_manifest
from hyimg_cli.serve.metrics import Metrics
from hyimg_cli.serve.results import KINDS, MANIFEST, RUN, BatchResults
from hyimg_cli.serve.uploads import Expiry, Uploads
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import JobEnded, Remark

logger = logging.getLogger(__name__)
RECORD = "batch.json"
_RECORD_BYTES = 100_000_000
# Batches that have not ended; more are refused for a while.
_MOST_UNENDED, _WAIT_S = 1_000, 60
_ENDED = ("failed", "completed", "expired", "cancelled")
# Of batch.json, what the API does not show.
_HIDDEN = ("owner", "came", "asked", "base_url", "keep_s")
# What the API shows of every batch, whatever became of it.
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_UNSET = dict.fromkeys([f"{name}_at" for name in _TIMES], None)
_UNSET |= dict.fromkeys(("errors", "output_file_id", "error_file_id"), None)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
# A run that the machine ended, a full disk say, is tried again so much later.
_AGAIN_S = 30.0
_LOOK_S, _SWEEP_S = 0.5, 60.0

# Makes the run of a batch, of its request, its id and its owner.
RunOf = Callable[[RunRequest, str, str], ManifestRun]


def _seconds_of(window: str) -> int:
    """The seconds of a time such as 24h. Raises ValueError."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError("expected a time such as 24h, 30d at most")
    return seconds


def _check_window(window: str) -> str:
    _seconds_of(window)
    return window


_Name = Annotated[str, StringConstraints(max_length=64)]
_Text = Annotated[str, StringConstraints(max_length=512)]


class BatchRequest(BaseModel, extra="forbid", strict=True):
    """The body that begins a batch."""

    input_file_id: str
    endpoint: Literal["/v1/images/generations", "/v1/images/edits"]
    completion_window: Annotated[str, AfterValidator(_check_window)]
    metadata: Annotated[dict[_Name, _Text], Field(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


class Batch:
    """One batch: its record as it is on the disk, and what is known of it while it runs."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder, self.record, self.lock = folder, record, threading.RLock()
        # Why its run ended before its time, and when it is tried again.
        self.trouble: HyimgError | None = None
        self.again_at = 0.0
        self.is_stopped = False
        # Its turn to run, while it waits for that; and its run, with what became of its requests.
        self.turn: Future[None] | None = None
        self.run: ManifestRun | None = None
        self.results: BatchResults | None = None

    @property
    def id(self) -> str:
        name: str = self.record["id"]
        return name

    @property
    def has_ended(self) -> bool:
        return self.record["status"] in _ENDED

    @property
    def is_late(self) -> bool:
        """True once its completion window is over."""
        return bool(time.time() >= self.record["expires_at"])

    @property
    def is_closing(self) -> bool:
        """True if no more of its jobs are to begin."""
        return self.record["status"] in ("cancelling", "finalizing", *_ENDED) or self.is_late

    def save(self, status: str = "", **changes: Any) -> None:
        """Change its record, and with a status the time of that. Raises StorageError: then nothing
        is changed.
        """
        if status:
            changes |= {"status": status, f"{status}_at": int(time.time())}
        with self.lock, disk_errors(self.folder):
            record = self.record | changes
            replace_file(self.folder / RECORD, json.dumps(record).encode())
            self.record = record

    def shown(self) -> dict[str, Any]:
        """The batch as the API shows it."""
        record, results, trouble = self.record, self.results, self.trouble
        found = _UNSET | {name: value for name, value in record.items() if name not in _HIDDEN}
        if results is not None:
            found["request_counts"] = results.counts()
        if trouble is not None:
            what = f"the run was interrupted and is tried again: {trouble.what}"
            error = {"line": None, "param": None, "code": trouble.code, "message": what}
            found["errors"] = {"object": "list", "data": [error]}
        return found

    def stop(self) -> None:
        """Stop it after the step at work, or before it begins."""
        with self.lock:
            self.is_stopped = True
            if self.run is not None:
                self.run.request_stop(signal.SIGTERM)


class Batches:
    """All batches of a server: those that wait, `at_once` that run, and those that have ended.

    One thread reads inputs, so that each learns of its faults however many run.
    """

    def __init__(
        self,
        state: Path,
        uploads: Uploads,
        config: RunConfig,
        settings: Mapping[str, Setting],
        wire: Wire,
        run_of: RunOf,
        metrics: Metrics,
        *,
        at_once: int = 4,
    ) -> None:
        self._folder, self._uploads, self._wire = state / "batches", uploads, wire
        self._config, self._settings = config, settings
        self._run_of, self._metrics = run_of, metrics
        self._lock, self._over = threading.Lock(), threading.Event()
        self._desk = ThreadPoolExecutor(1, "batch-desk")
        self._runs = ThreadPoolExecutor(at_once, "batch-run")
        self._watch = threading.Thread(target=self._look, name="batch-watch", daemon=True)
        uploads.made, uploads.forget = self._made, self._forget
        with disk_errors(state):
            make_folders(self._folder)
            for left in self._folder.glob(".*"):
                remove(left)
            found = [
                Batch(one, json_of(bytes_of(one / RECORD, _RECORD_BYTES)))
                for one in self._folder.iterdir()
            ]
        found.sort(key=lambda one: (one.record["came"], one.id))
        self._batches = {one.id: one for one in found}

    def start(self) -> None:
        """Go on with every batch that has not ended, in the order in which they came."""
        for batch in self._unended():
            self._desk.submit(self._guarded, batch, self._admit)
        self._watch.start()

    def stop(self) -> None:
        """End in order: runs stop after the step at work, and go on at the next start."""
        self._over.set()
        if self._watch.is_alive():
            self._watch.join()
        for batch in self._unended():
            batch.stop()
        for pool in (self._desk, self._runs):
            pool.shutdown(cancel_futures=True)

    def counts(self) -> Counter[str]:
        """How many batches there are of each status."""
        return Counter(one.record["status"] for one in list(self._batches.values()))

    def create(self, owner: str, asked: BatchRequest, key: str, base_url: str) -> dict[str, Any]:
        """A new batch, or the one that this `key` made before; it lasts when this returns.

        Raises Refused.
        """
        name = "batch_" + (digest.of_json([owner, key])[:24] if key else secrets.token_hex(12))
        facts = asked.model_dump(exclude_unset=True)
        came, body = time.time(), digest.of_json(facts)
        with self._lock:
            if (batch := self._batches.get(name)) is not None:
                if batch.record["asked"] != body:
                    what = "this Idempotency-Key was sent with another body"
                    raise Refused(422, what, code="batch.other-body")
                return batch.shown()
            file = self._uploads.find(asked.input_file_id, owner, "input_file_id")
            if file["purpose"] != "batch":
                what = f"the purpose of {file['id']} is {file['purpose']}, not batch"
                raise bad_request("input_file_id", what, "batch.bad-input")
            if len(self._unended()) >= _MOST_UNENDED:
                raise server_full(f"{_MOST_UNENDED:,} batches have not ended", _WAIT_S)
            expiry = facts.pop("output_expires_after", None)
            record: dict[str, Any] = {
                "id": name,
                "object": "batch",
                "status": "validating",
                "metadata": None,
            }
            record |= facts | {"created_at": int(came)}
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
            self._desk.submit(self._guarded, batch, self._admit)
        return batch.shown()

    def find(self, name: str, owner: str) -> Batch:
        """A caller's batch. Raises Refused, 404."""
        batch = self._batches.get(name)
        if batch is None or batch.record["owner"] != owner:
            what = f"No such batch: {name[:80]}"
            raise Refused(404, what, param="batch_id", code="batch.not-found")
        return batch

    def every(self, owner: str) -> list[Batch]:
        """A caller's batches, the oldest first."""
        return [one for one in list(self._batches.values()) if one.record["owner"] == owner]

    def cancel(self, batch: Batch) -> dict[str, Any]:
        """Begin no more of its jobs; what is done stays. Raises Refused where it has ended."""
        with batch.lock:
            status = batch.record["status"]
            if status in ("validating", "in_progress"):
                batch.save("cancelling")
                self._close(batch)
            elif status not in ("cancelling", "cancelled"):
                raise bad_request("", f"the batch is {status} already", "batch.is-over")
        return batch.shown()

    def _unended(self) -> list[Batch]:
        return [one for one in list(self._batches.values()) if not one.has_ended]

    def _look(self) -> None:
        """End batches whose time is over, retry those that were interrupted, sweep the uploads."""
        swept = time.monotonic()
        while not self._over.wait(_LOOK_S):
            for batch in self._unended():
                if batch.again_at and (time.monotonic() > batch.again_at or batch.is_closing):
                    batch.again_at = 0.0
                    self._desk.submit(self._guarded, batch, self._admit)
                elif batch.is_late and not batch.is_stopped:
                    self._close(batch)
            if time.monotonic() > swept + _SWEEP_S:
                swept = time.monotonic()
                try:
                    self._uploads.sweep()
                except HyimgError as error:
                    logger.warning("uploads are not swept: %s", error)

    def _close(self, batch: Batch) -> None:
        """Stop a batch; one that still waits for its turn has it now."""
        with batch.lock:
            batch.stop()
            if batch.turn is not None and batch.turn.cancel():
                self._queue(batch)

    def _queue(self, batch: Batch) -> None:
        with batch.lock:
            pool = self._desk if batch.is_closing else self._runs
            batch.turn = pool.submit(self._guarded, batch, self._run)

    def _guarded(self, batch: Batch, step: Callable[[Batch], object]) -> None:
        """Take a step of a batch. What interrupts it is shown, and the batch tried again later."""
        try:
            step(batch)
            batch.trouble = None
        except Exception as error:
            if self._over.is_set():
                return
            logger.error("%s was interrupted", batch.id, exc_info=error)
            # What another error says may be a path of the server.
            batch.trouble = error if isinstance(error, HyimgError) else internal(code="internal")
            batch.again_at = time.monotonic() + _AGAIN_S

    def _admit(self, batch: Batch) -> None:
        """Read a batch's input, unless that is done, and give it a turn."""
        record, faults = batch.record, []
        if not (batch.folder / MANIFEST).is_file():
            about = batch.folder, record["endpoint"], record["owner"]
            faults = write_manifest(*about, self._wire, self._settings)
        with batch.lock:
            if faults and batch.record["status"] == "validating":
                batch.save("failed", errors={"object": "list", "data": faults})
                return
            batch.save(request_counts=BatchResults(batch.folder).counts())
        self._queue(batch)

    def _run(self, batch: Batch) -> None:
        if not batch.is_closing:
            try:
                self._work(batch)
            except Interrupted:
                # Of a server that stops; or else the batch is cancelled or late.
                if not batch.is_closing:
                    return
        if not self._over.is_set():
            self._finish(batch)

    def _work(self, batch: Batch) -> None:
        """Run what is left of a batch's jobs. Raises Interrupted, and what ends a run."""
        results = BatchResults(batch.folder)

        def hear(event: ManifestEvent) -> None:
            if isinstance(event, JobEnded):
                self._metrics.ended("batch", event.outcome)
                results.is_done[event.outcome.custom_id] = event.is_done
            elif isinstance(event, Remark):
                logger.info("%s: %s", batch.id, event.text)

        manifest = read_manifest(batch.folder / MANIFEST)
        output = replace(self._config.output, folder=batch.folder / RUN)
        request = RunRequest(manifest, replace(self._config, output=output), self._settings)
        run = self._run_of(request, batch.id, batch.record["owner"])
        with batch.lock:
            if batch.is_stopped:
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
        """Make a batch's files known, and then its end."""
        with batch.lock:
            is_cancelled = batch.record["status"] == "cancelling"
            if not is_cancelled:
                batch.save("finalizing")
        results = BatchResults(batch.folder)
        counts, files = results.counts(), dict[str, str]()
        is_whole = counts["total"] == counts["completed"] + counts["failed"]
        status = "completed" if is_whole or not batch.is_late else "expired"
        status = "cancelled" if is_cancelled else status
        for kind in KINDS:
            if nbytes := results.nbytes(kind, batch.record, status):
                files[f"{kind}_file_id"] = name = f"file-{batch.id.partition('_')[2]}-{kind}"
                facts = {"batch": batch.id, "kind": kind, "bytes": nbytes}
                facts["filename"] = f"{batch.id}_{kind}.jsonl"
                owner, keep_s = batch.record["owner"], batch.record["keep_s"]
                self._uploads.record(name, owner, "batch_output", facts, keep_s)
        batch.save(status, request_counts=counts, **files)

    def _made(self, file: Mapping[str, Any]) -> Iterator[bytes]:
        """The content of a batch's output or error file."""
        batch = self._batches[file["batch"]]
        results = BatchResults(batch.folder)
        return results.lines(file["kind"], batch.record, batch.record["status"])

    def _forget(self, file: Mapping[str, Any]) -> None:
        """Remove the pictures of a batch whose output file was deleted."""
        if file["kind"] == "output":
            remove(self._folder / file["batch"] / RUN / "outputs")
