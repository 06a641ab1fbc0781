"""Single requests: one or a few pictures, drawn while the caller waits.

Each request is a manifest line with its own small run folder and its own session of the engine.
Equal requests of a caller share a run; a run that no request waits for is dropped.
"""

import asyncio
import json
import logging
import math
import secrets
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hyimg_cli.engine.runner import accept, cards
from hyimg_cli.engine.sources import probe_sources
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.files import remove
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.journal.journal import RunFolder, outcome_to_json
from hyimg_cli.manifest.chat import CHAT
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.serve.bodies import Bodies
from hyimg_cli.serve.chat import chunks, stream_options
from hyimg_cli.serve.errors import Refused, bad_request, internal, refusal_of, server_full, stopping
from hyimg_cli.serve.metrics import Metrics
from hyimg_cli.serve.results import respond
from hyimg_cli.serve.wire import EVENTS, Wire, typed
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Progress
from hyimg_cli.spec.job import Job, TextJob

if TYPE_CHECKING:
    from hyimg_cli.engine.service import ServedSession, Service

# How long results are kept, and how long a client that timed out can ask again.
KEEP_S = 600.0
RETRY_S = 10.0
HEARTBEAT_S = 10.0
# The oldest results beyond these limits are removed early.
MOST_KEPT, MOST_KEPT_BYTES = 10_000, 10_000_000_000
_LONGEST_WAIT_S, _USUAL_WAIT_S = 60, 10
RESULTS = "/v1/images/results"
# The fields of a result line that a response needs.
_SHOWN = (
    *("custom_id", "status", "outputs", "cot_text", "warnings", "notes", "kv_reuse", "error"),
    *("answer", "answer_token_ids", "finish", "choices", "mass", "thought"),
)
# A request's line, its jobs, and the options of its stream; None to answer at once.
Read = tuple[dict[str, Any], list[Job], Mapping[str, Any] | None]
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class OnlineRun:
    """The jobs of one line, and their results while these are kept.

    `line_digest`: equal for equal lines. `key`: the key of requests that share it. `waiting`: jobs
    that have not started. `waiters`: requests that wait for it. `entries`: result lines by
    custom_id; `said`: what is written of answers that stream. `error`: the error that ended all its
    jobs. `news`: set and replaced at each new entry or token. `work`: ends with the last job.
    `nbytes`: bytes on the disk after that.
    """

    name: str
    caller: str
    line: dict[str, Any]
    line_digest: str
    key: tuple[str, str] | None
    jobs: list[Job]
    folder: Path
    session: "ServedSession"
    waiting: int
    created: int = field(default_factory=lambda: int(time.time()))
    waiters: int = 0
    nbytes: int = 0
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    error: HyimgError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Task[None] = field(init=False)

    def add(self, event: Event) -> None:
        """Record an event of its jobs."""
        if isinstance(event, JobStarted):
            self.waiting = max(0, self.waiting - 1)
        elif isinstance(event, Progress) and event.answer:
            self.said[event.custom_id] = event.answer
            self._tell()
        elif isinstance(event, JobEnded):
            entry = outcome_to_json(event.outcome)
            kept = {name: entry[name] for name in _SHOWN if name in entry}
            self.entries[event.outcome.custom_id] = kept
            self._tell()

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def body(self, base: str, names: Iterable[str], *, is_event: bool = False) -> dict[str, Any]:
        """Return the response body for some of its jobs. Raises Refused if one failed."""
        entries = [self.entries[name] for name in names]
        url = f"{base}{RESULTS}/{self.name}"
        return respond(self.line, entries, self.folder, url, self.created, is_event=is_event)

    def files(self) -> list[str]:
        """Return the paths of its pictures, from its folder."""
        return [one["path"] for entry in self.entries.values() for one in entry["outputs"]]

    @property
    def is_kept(self) -> bool:
        """True if its results are kept after its requests are answered."""
        by_url = self.line.get("x_response_format") == "url"
        return self.error is None and (self.key is not None or by_url)


class Online:
    """Answers requests for pictures; an ASGI application."""

    def __init__(
        self,
        state: Path,
        service: "Service",
        wire: Wire,
        metrics: Metrics,
        bodies: Bodies,
        most_waiting: int,
        share: int,
    ) -> None:
        """`share`: one key's part of the `most_waiting` pictures. Raises StorageError."""
        self._folder, self._service, self._metrics = state / "online", service, metrics
        self._bodies, self._wire = bodies, wire
        self._most_waiting, self._share = most_waiting, share
        # Faulty lines are always refused.
        off = Setting("skip_invalid", False, "flag")
        self._settings = dict(wire.settings) | {"skip_invalid": off}
        # By name, oldest first.
        self._runs: dict[str, OnlineRun] = {}
        self._is_closed = False
        # A thread only waits for its session; there are more than the queue admits.
        self._threads = ThreadPoolExecutor(most_waiting + 64, "online")
        with disk_errors(state):
            with suppress(OSError):
                remove(self._folder)  # left by a kill
            make_folders(self._folder)

    @property
    def waiting(self) -> Counter[str]:
        """Pictures that have not started, by caller."""
        found = Counter[str]()
        for one in self._runs.values():
            found[one.caller] += one.waiting
        return found

    def close(self) -> None:
        """Accept no more requests, and wait for the threads, whose sessions have ended."""
        self._is_closed = True
        self._threads.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Draw the pictures of a request, or share an equal request's run. Raises Refused."""
        request, began = Request(scope, receive), time.monotonic()
        base = str(request.base_url).rstrip("/")
        line, jobs, stream = await self._read(request)
        run = self._join(request, line, jobs)
        run.waiters += 1
        try:
            if stream is not None:
                head = {"cache-control": "no-cache", "x-accel-buffering": "no"}
                if (kind := EVENTS.get(request.url.path)) is not None:
                    events = _events(run, kind, base)
                else:
                    events = chunks(run, base, has_usage=stream.get("include_usage") is True)
                answer: Response = StreamingResponse(events, 200, head, "text/event-stream")
            else:
                answer = await self._whole(run, request, base)
            await answer(scope, receive, send)
        finally:
            run.waiters -= 1
            may_retry = run.key is not None and _may_retry(request, time.monotonic() - began)
            after_s = RETRY_S if may_retry else 0.0
            asyncio.get_running_loop().call_later(after_s, self._drop_unwanted, run)

    async def _whole(self, run: OnlineRun, request: Request, base: str) -> Response:
        """Return the response once all jobs have ended or the client has left."""
        gone = asyncio.create_task(_wait_until_gone(request))
        try:
            await asyncio.wait({gone, run.work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not run.work.done():
            return Response(status_code=499)  # for the log
        if run.error is not None:
            raise refusal_of(run.error)
        names = [job.custom_id for job in run.jobs]
        return JSONResponse(await run_in_threadpool(run.body, base, names))

    async def result(self, request: Request) -> Response:
        """Return the file of a result by its path. Raises Refused."""
        run, path = self._runs.get(request.path_params["name"]), request.path_params["path"]
        caller = request.state.caller
        if run is None or run.caller != caller or path not in run.files():
            what, hint = "result not found", f"results are kept for {KEEP_S / 60:.0f} minutes"
            raise Refused(404, what, hint=hint, code="result.not-found")
        head = {"cache-control": "private", "x-content-type-options": "nosniff"}
        return FileResponse(run.folder / path, headers=head)

    async def _read(self, request: Request) -> Read:
        """Return the line of a request, its jobs, and how to stream them. Raises Refused."""
        if request.headers.get("content-type", "").startswith("multipart/"):
            body = await self._bodies.form(request, self._wire.most_images + 1)  # and a mask
            return await run_in_threadpool(self._accept, request, body)
        async with self._bodies.json(request) as body:
            return await run_in_threadpool(self._accept, request, body)

    def _accept(self, request: Request, body: dict[str, Any]) -> Read:
        """Check a body as a manifest line; a line without a seed gets a random one."""
        is_stream = typed("stream", body.pop("stream", None)) or False
        if type(is_stream) is not bool:
            raise bad_request("stream", "stream must be true or false", "manifest.wrong-type")
        stream = None
        if is_stream:
            is_chat = request.url.path == CHAT
            stream = stream_options(body.pop("stream_options", None)) if is_chat else {}
        line = self._wire.line_of(request.url.path, body, request.state.caller)
        own: dict[str, Any] = {"custom_id": f"img_{secrets.token_hex(12)}"}
        if self._settings["seed"].value is None and request.url.path != CHAT:
            own["seed"] = secrets.randbelow(2**31)
        try:
            data = json.dumps(own | line).encode()
            jobs, _ = accept(manifest_of(data, "request"), self._settings)
            kept = [job for job in jobs if getattr(job, "outside", None)]
            with self._wire.uploads.decoding:
                found = probe_sources(kept)
            for error in filter(None, map(found.error_of, kept)):
                raise error
        except HyimgError as error:
            raise refusal_of(error, line) from None
        if stream is not None:
            jobs = tuple(replace(j, streams=True) if isinstance(j, TextJob) else j for j in jobs)
        return line, list(jobs), stream

    def _join(self, request: Request, line: dict[str, Any], jobs: list[Job]) -> OnlineRun:
        """Return the run of an equal request, or start one. Raises Refused."""
        caller, line_digest, key = request.state.caller, digest.of_json(line), None
        if "idempotency-key" in request.headers:
            key = (caller, digest.of_json(["key", request.headers["idempotency-key"]]))
        elif "seed" in line:
            key = (caller, line_digest)
        shared = [one for one in self._runs.values() if one.key == key] if key else []
        if shared:
            if shared[0].line_digest != line_digest:
                what, hint = "the Idempotency-Key was used with another body", "use a new key"
                code = "request.idempotency-key"
                raise Refused(422, what, param="Idempotency-Key", hint=hint, code=code)
            return shared[0]
        if self._is_closed:  # since the body began to arrive
            raise stopping()
        self._refuse_full(caller, len(jobs))
        name = jobs[0].custom_id.partition("-")[0]
        session = self._service.session(caller, caller, is_online=True)
        run = OnlineRun(
            name=name,
            caller=caller,
            line=line,
            line_digest=line_digest,
            key=key,
            jobs=jobs,
            folder=self._folder / name,
            session=session,
            waiting=len(jobs),
        )
        run.work = asyncio.create_task(self._draw(run))
        run.work.add_done_callback(lambda _: self._end(run))
        self._runs[name] = run
        return run

    def _refuse_full(self, caller: str, count: int) -> None:
        """Raise Refused if the queue, or the share of a caller that waits already, is full."""
        counts = self.waiting
        limits = [(counts.total(), self._most_waiting, "")]
        if own := counts[caller]:
            limits.append((own, self._share, " for this key"))
        for waiting, most, whose in limits:
            if waiting + count > most:
                rate = self._service.counts()["pictures_per_s"] or max(1, waiting) / _USUAL_WAIT_S
                wait_s = min(_LONGEST_WAIT_S, max(1, math.ceil(waiting / rate)))
                what = f"{waiting} pictures are waiting{whose}; the limit is {most}"
                raise server_full(what, wait_s)

    async def _draw(self, run: OnlineRun) -> None:
        """Run the jobs of a run in a thread."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            plan = make_plan(run.jobs, cards(self._settings["revision"].value))
            with RunFolder(run.folder) as folder:
                for event in run.session.run(plan, folder):
                    if isinstance(event, JobEnded):
                        self._metrics.ended("online", event.outcome)
                    loop.call_soon_threadsafe(run.add, event)

        try:
            await loop.run_in_executor(self._threads, work)
        except Interrupted:
            run.error = stopping()
        except HyimgError as error:
            run.error = error
        except Exception:
            logger.exception("a request failed because of a bug in hyimg")
            run.error = internal(code="job.internal")

    def _end(self, run: OnlineRun) -> None:
        """Keep the results of a run for a while, within limits, or remove them."""
        run.waiting = 0
        run.news.set()
        ends = [one["status"] for one in run.entries.values()]
        if run.error is not None or ends != ["done"] * len(run.jobs):
            run.key = None  # an equal request tries again
        if run.is_kept:
            asyncio.get_running_loop().call_later(KEEP_S, self._forget, run)
            with suppress(OSError):
                sizes = [(run.folder / path).stat().st_size for path in run.files()]
                run.nbytes = sum(sizes)
            unused = [one for one in self._runs.values() if one.work.done() and not one.waiters]
            nbytes = sum(one.nbytes for one in self._runs.values())
            for one in unused:
                if len(self._runs) <= MOST_KEPT and nbytes <= MOST_KEPT_BYTES:
                    break
                nbytes -= one.nbytes
                self._forget(one)
        self._drop_unwanted(run)

    def _drop_unwanted(self, run: OnlineRun) -> None:
        """Drop the jobs, or remove the results, of a run that no request waits for."""
        if run.waiters:
            return
        if not run.work.done():
            run.key = None
            run.session.request_stop(signal.SIGTERM)
        elif not run.is_kept:
            self._forget(run)

    def _forget(self, run: OnlineRun) -> None:
        self._runs.pop(run.name, None)
        asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, run.folder, True)


async def _events(run: OnlineRun, kind: str, base: str) -> AsyncIterator[bytes]:
    """Yield an event for each picture once it is done, and comments in between."""
    shown = set[str]()
    while True:
        news, names = run.news, [name for name in run.entries if name not in shown]
        shown.update(names)
        for name in names:
            try:
                body = await run_in_threadpool(run.body, base, [name], is_event=True)
            except Refused as refused:
                yield _event("error", refused.body())
                continue
            # The official client requires a quality of events, but of responses allows no "auto".
            picture = {**body.pop("data")[0], "created_at": body.pop("created"), "quality": "auto"}
            yield _event(kind, {"type": kind} | picture | body)
        if names:  # others may have ended while these were encoded
            continue
        if run.work.done():
            if run.error is not None:
                yield _event("error", refusal_of(run.error).body())
            return
        try:
            await asyncio.wait_for(news.wait(), HEARTBEAT_S)
        except TimeoutError:
            yield b": at work\n\n"


def _event(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _may_retry(request: Request, seconds: float) -> bool:
    """Return True if a client that left may ask again.

    That is, it sent a key, or its `openai` client reached the timeout that it announced.
    """
    with suppress(ValueError):
        patience_s = float(request.headers.get("x-stainless-read-timeout", "inf"))
        return seconds >= 0.9 * patience_s or "idempotency-key" in request.headers
    return "idempotency-key" in request.headers
