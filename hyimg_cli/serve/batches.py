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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from hyimg_cli.engine.run import ManifestEvent, ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.files import bytes_of, json_of, refuse_links, remove, replace_file, replacing
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.manifest.line import child_ids
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.serve.answers import KINDS, RUN, Answers, Journal, lines_of
from hyimg_cli.serve.bodies import read_json
from hyimg_cli.serve.errors import Refused, bad_value
from hyimg_cli.serve.intake import INPUT, MANIFEST, Fault, Intake, link
from hyimg_cli.serve.uploads import Uploads, page_of, seconds_kept
from hyimg_cli.serve.wire import EVENTS, Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import JobEnded, Remark

logger = logging.getLogger(__name__)
RECORD = "batch.json"
_RECORD_BYTES = 100_000_000
_ENDED = ("failed", "completed", "expired", "cancelled")
# What another than the client needs of batch.json.
_HIDDEN = ("owner", "came", "asked", "base_url", "keep_s")
# What the API shows of every batch, whatever became of it.
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_UNSET = dict.fromkeys([f"{name}_at" for name in _TIMES], None)
_UNSET |= dict.fromkeys(("errors", "output_file_id", "error_file_id"), None)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
_ASKED = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
# What the run's page is made of.
_PAGE = ("report.html", "report", "outputs")
# A run that the machine ended, a full disk say, is tried again so much later.
_AGAIN_S = 30.0
_LOOK_S, _SWEEP_S = 0.5, 60.0


# Makes the run of a batch, of its request, its id and its owner.
RunOf = Callable[[RunRequest, str, str], ManifestRun]


class Batch:
    """One batch: its record as it is on the disk, and what is known of it while it runs."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder, self.record, self.lock = folder, record, threading.RLock()
        # Why its run ended before its time; it is tried again then.
        self.trouble: HyimgError | None = None
        self.again_at = 0.0
        self.is_stopped = False
        self.turn: Future[None] | None = None
        # Its requests by what became of them, while it runs; before and after, the record has them.
        self.counts: Counts | None = None
        self._run: ManifestRun | None = None

    @property
    def id(self) -> str:
        name: str = self.record["id"]
        return name

    @property
    def is_late(self) -> bool:
        """True once its completion window is over."""
        return bool(time.time() >= self.record["expires_at"])

    @property
    def is_closing(self) -> bool:
        """True where no job of it is to be begun any more."""
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
        record, counts, trouble = self.record, self.counts, self.trouble
        found = _UNSET | {name: value for name, value in record.items() if name not in _HIDDEN}
        if counts is not None:
            found["request_counts"] = counts.shown()
        if trouble is not None:
            what = f"the run was interrupted and is tried again: {trouble.what}"
            error = {"line": None, "param": None, "code": trouble.code, "message": what}
            found["errors"] = {"object": "list", "data": [error]}
        return found

    def run(self, run: ManifestRun) -> None:
        """Do what is left of its jobs. Raises Interrupted after `stop`, and what ends a run."""
        self.counts = Counts(self.folder)
        with self.lock:
            if self.is_stopped:
                raise Interrupted(signal.SIGTERM)
            self._run = run
        try:
            run.run(self._look)
        finally:
            self._run = None

    def stop(self) -> None:
        """Stop it after the step that is at work, or before it begins."""
        with self.lock:
            self.is_stopped = True
            if self._run is not None:
                self._run.request_stop(signal.SIGTERM)

    def _look(self, event: ManifestEvent) -> None:
        if isinstance(event, JobEnded) and self.counts is not None:
            self.counts.end(event.outcome.custom_id, is_done=event.is_done)
        elif isinstance(event, Remark):
            logger.info("%s: %s", self.id, event.text)


class Counts:
    """The requests of a batch at work by what became of them: one ends with the last of its jobs.

    Begins with what the run's journal has.
    """

    def __init__(self, folder: Path) -> None:
        self._left, self._line_of = dict[str, int](), dict[str, str]()
        self._failed, self._ended = set[str](), set[str]()
        self._counts = Counter[str]()
        journal = Journal(folder / RUN)
        for line in lines_of(folder):
            jobs = child_ids(line)
            self._left[line["custom_id"]] = len(jobs)
            if len(jobs) > 1:
                self._line_of |= dict.fromkeys(jobs, line["custom_id"])
            for job in jobs:
                if (is_done := journal.is_done(job)) is not None:
                    self.end(job, is_done=is_done)

    def shown(self) -> dict[str, int]:
        """The counts as the API shows them."""
        ends = {name: self._counts[name] for name in ("completed", "failed")}
        return {"total": len(self._left)} | ends

    def end(self, job: str, *, is_done: bool) -> None:
        """Count the end of a job."""
        if job in self._ended:  # again: its picture was gone
            return
        self._ended.add(job)
        name = self._line_of.get(job, job)
        self._left[name] -= 1
        if not is_done:
            self._failed.add(name)
        if not self._left[name]:
            self._counts["failed" if name in self._failed else "completed"] += 1


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
        run_of: RunOf,
        wire: Wire,
        *,
        at_once: int = 4,
    ) -> None:
        self._folder, self._uploads, self._settings = state / "batches", uploads, settings
        self._config = config
        self._run_of, self._wire = run_of, wire
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

    def create(
        self, owner: str, body: Mapping[str, Any], key: str, base_url: str
    ) -> dict[str, Any]:
        """A new batch, or the one that this `key` made before; it lasts when this returns.

        Raises Refused.
        """
        name = "batch_" + (digest.of_json([owner, key])[:24] if key else secrets.token_hex(12))
        came, asked = time.time(), digest.of_json(body)
        record = {"id": name, "object": "batch", "owner": owner, "came": came}
        record |= _checked(body) | {"asked": asked, "base_url": base_url, "status": "validating"}
        record["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
        record["created_at"] = int(came)
        record["expires_at"] = int(came) + _seconds_of(body["completion_window"])
        with self._lock:
            if (batch := self._batches.get(name)) is not None:
                if batch.record["asked"] != asked:
                    what = "this Idempotency-Key was sent with another body"
                    raise Refused(422, what, code="batch.other-body")
                return batch.shown()
            file = self._uploads.find(body["input_file_id"], owner, "input_file_id")
            if file["purpose"] != "batch":
                what = f"the purpose of {file['id']} is {file['purpose']}, not batch"
                raise Refused(400, what, param="input_file_id", code="batch.bad-input")
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
        """Begin none of its jobs any more; what is done stays. Raises Refused where it is over."""
        with batch.lock:
            status = batch.record["status"]
            if status in ("validating", "in_progress"):
                batch.save("cancelling")
                self._close(batch)
            elif status not in ("cancelling", "cancelled"):
                raise Refused(400, f"the batch is {status} already", code="batch.is-over")
        return batch.shown()

    def _unended(self) -> list[Batch]:
        return [one for one in list(self._batches.values()) if one.record["status"] not in _ENDED]

    def _look(self) -> None:
        """End batches whose time is over, try again what was interrupted, and sweep the uploads."""
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
        """Take a step of a batch. What interrupts it is told, and the batch tried again later."""
        try:
            step(batch)
            batch.trouble = None
        except Exception as error:
            if self._over.is_set():
                return
            logger.error("%s was interrupted", batch.id, exc_info=error)
            what = f"{type(error).__name__}: {error}"
            batch.trouble = error if isinstance(error, HyimgError) else HyimgError(what)
            batch.again_at = time.monotonic() + _AGAIN_S

    def _admit(self, batch: Batch) -> None:
        """Read a batch's input, unless that is done, and give it a turn."""
        record = batch.record
        if record["status"] != "finalizing":
            faults = list[Fault]()
            if not (batch.folder / MANIFEST).is_file():
                facts = batch.folder, record["endpoint"], record["owner"]
                faults = Intake(*facts, self._wire).accept(self._settings)
            counts = Counts(batch.folder).shown()
            with batch.lock:
                if faults and batch.record["status"] == "validating":
                    batch.save("failed", errors={"object": "list", "data": faults})
                    return
                batch.save(request_counts=counts)
        self._queue(batch)

    def _run(self, batch: Batch) -> None:
        if not batch.is_closing:
            with batch.lock:
                if batch.record["status"] == "validating":
                    batch.save("in_progress")
            try:
                batch.run(self._run_for(batch))
            except Interrupted:
                # Of a server that stops; or else the batch is cancelled or late.
                if not batch.is_closing:
                    return
        if not self._over.is_set():
            self._finish(batch)

    def _run_for(self, batch: Batch) -> ManifestRun:
        manifest = read_manifest(batch.folder / MANIFEST)
        output = replace(self._config.output, folder=batch.folder / RUN)
        request = RunRequest(manifest, replace(self._config, output=output), self._settings)
        return self._run_of(request, batch.id, batch.record["owner"])

    def _finish(self, batch: Batch) -> None:
        """Make a batch's files known, and then its end."""
        with batch.lock:
            is_cancelled = batch.record["status"] == "cancelling"
            if not is_cancelled:
                batch.save("finalizing")
        counts = Counts(batch.folder).shown()
        is_whole = counts["total"] == counts["completed"] + counts["failed"]
        status = "completed" if is_whole or not batch.is_late else "expired"
        status = "cancelled" if is_cancelled else status
        answers = Answers(batch.folder, batch.record, status)
        files = dict[str, str]()
        for kind in KINDS:
            if nbytes := answers.nbytes(kind):
                files[f"{kind}_file_id"] = name = f"file-{batch.id.partition('_')[2]}-{kind}"
                facts = {"batch": batch.id, "kind": kind, "bytes": nbytes}
                facts["filename"] = f"{batch.id}_{kind}.jsonl"
                owner, keep_s = batch.record["owner"], batch.record["keep_s"]
                self._uploads.record(name, owner, "batch_output", facts, keep_s)
        batch.save(status, request_counts=counts, **files)
        batch.counts = None

    def _made(self, file: Mapping[str, Any]) -> Iterator[bytes]:
        """The content of a batch's output or error file."""
        batch = self._batches[file["batch"]]
        return Answers(batch.folder, batch.record, batch.record["status"]).read(file["kind"])

    def _forget(self, file: Mapping[str, Any]) -> None:
        """Remove the pictures of a batch whose output file was deleted."""
        if file["kind"] == "output":
            remove(self._folder / file["batch"] / RUN / "outputs")


def _seconds_of(window: Any) -> int:
    """The seconds of a completion window. Raises Refused."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        what = "completion_window is a time such as 24h, 30d at most"
        raise bad_value("completion_window", what)
    return seconds


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a body asks for, each part of it as it should be. Raises Refused."""
    for name in body.keys() - {*_ASKED}:
        what = f"{name[:80]} is not known; a batch has {', '.join(_ASKED)}"
        raise Refused(400, what, param=name[:80], code="request.unknown-field")
    for name in _ASKED[:3]:
        if not isinstance(body.get(name), str):
            raise Refused(400, f"{name} is missing", param=name, code="request.missing-field")
    if body["endpoint"] not in EVENTS:
        raise bad_value("endpoint", f"endpoint is one of {', '.join(EVENTS)}")
    _seconds_of(body["completion_window"])
    metadata = body.get("metadata") or {}
    if (
        not isinstance(metadata, dict)
        or len(metadata) > 16
        or not all(
            isinstance(value, str) and len(name) <= 64 and len(value) <= 512
            for name, value in metadata.items()
        )
    ):
        what = "metadata is an object of up to 16 texts of up to 512 characters, names up to 64"
        raise bad_value("metadata", what)
    keep_s = seconds_kept(body.get("output_expires_after"), "output_expires_after")
    asked = {name: body[name] for name in _ASKED[:3]}
    return asked | {"metadata": body.get("metadata"), "keep_s": keep_s}


def routes(batches: Batches) -> list[Route]:
    """The routes of batches. `request.state.caller` is the name of the key that asks."""

    async def create(request: Request) -> Response:
        body = await read_json(request)
        key, base_url = request.headers.get("idempotency-key", ""), str(request.base_url)
        asked = request.state.caller, body, key, base_url.rstrip("/")
        return JSONResponse(await run_in_threadpool(batches.create, *asked))

    def found(request: Request) -> Batch:
        return batches.find(request.path_params["batch_id"], request.state.caller)

    def listing(request: Request) -> Response:
        every = (one.shown() for one in batches.every(request.state.caller))
        return JSONResponse(page_of(every, request.query_params, 100, 20))

    def retrieve(request: Request) -> Response:
        return JSONResponse(found(request).shown())

    def cancel(request: Request) -> Response:
        return JSONResponse(batches.cancel(found(request)))

    def page(request: Request) -> Response:
        run = found(request).folder / RUN
        path = Path(request.path_params["path"] or "report.html")
        place = run / path
        with suppress(OSError, ValueError):  # a link, a name that no file can have
            refuse_links(place, run)
            if path.parts[0] in _PAGE and ".." not in path.parts and place.is_file():
                return FileResponse(place, headers={"cache-control": "no-cache"})
        raise Refused(404, "the batch has no such page, or not yet", code="batch.no-page")

    one = "/v1/batches/{batch_id}"
    return [
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", listing, methods=["GET"]),
        Route(one, retrieve, methods=["GET"]),
        Route(f"{one}/cancel", cancel, methods=["POST"]),
        Route("/batches/{batch_id}/{path:path}", page, methods=["GET"]),
    ]
