"""Single requests: a picture, or a few, drawn while their caller waits.

Each is a manifest line with a small run folder of its own, and a session of the one engine. Equal
requests of a caller share a drawing; one that nobody waits for any more is dropped.
"""

import asyncio
import json
import logging
import math
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hyimg_cli.engine.runner import accept, cards
from hyimg_cli.engine.sources import probe_sources
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.journal import RunFolder, outcome_to_json
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.serve.bodies import Bodies
from hyimg_cli.serve.errors import Refused, bad_request, internal, refusal_of, server_full, stopping
from hyimg_cli.serve.metrics import Metrics
from hyimg_cli.serve.results import Pictures, respond
from hyimg_cli.serve.wire import EVENTS, Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Event, JobEnded, JobStarted
from hyimg_cli.spec.job import Job

if TYPE_CHECKING:
    from hyimg_cli.engine.service import ServedSession, Service

# Results last so long; and so long a client that ran out of patience may take to ask again.
KEEP_S = 600.0
RETRY_S = 10.0
HEARTBEAT_S = 10.0
_MOST_KEPT = 10_000
_LONGEST_WAIT_S, _USUAL_WAIT_S = 60, 10
_SEEDS = 2**31
RESULTS = "/v1/images/results"
# Of a result line, what a response is made of.
_SHOWN = ("custom_id", "status", "outputs", "cot_text", "warnings", "kv_reuse", "error")
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Drawing:
    """The jobs of a line at work, and their results while these last.

    `asked`: a digest of the line. `waiting`: jobs that have not begun. `waiters`: requests that
    wait. `entries`: result lines by custom_id. `error`: what ended all of it. `news` is set, and
    replaced, with each entry. `work` ends with the last of its jobs.
    """

    name: str
    caller: str
    line: dict[str, Any]
    asked: str
    key: tuple[str, str] | None
    jobs: list[Job]
    folder: Path
    session: "ServedSession"
    created: int = field(default_factory=lambda: int(time.time()))
    waiting: int = 0
    waiters: int = 0
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: HyimgError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = len(self.jobs)

    def add(self, event: Event) -> None:
        """Take an event of its jobs."""
        if isinstance(event, JobStarted):
            self.waiting = max(0, self.waiting - 1)
        elif isinstance(event, JobEnded):
            entry = outcome_to_json(event.outcome)
            self.entries[event.outcome.custom_id] = {name: entry[name] for name in _SHOWN}
            self.news.set()
            self.news = asyncio.Event()

    def body(self, base: str, names: Iterable[str]) -> dict[str, Any]:
        """The body of a response about these of its jobs. Raises Refused where one failed."""
        entries = [self.entries[name] for name in names]
        pictures = Pictures(self.folder, f"{base}{RESULTS}/{self.name}")
        return respond(self.line, entries, pictures, self.created)

    @property
    def is_good(self) -> bool:
        """True where every job is done."""
        done = [one["status"] == "done" for one in self.entries.values()]
        return self.error is None and all(done) and len(done) == len(self.jobs)

    @property
    def is_kept(self) -> bool:
        """True if its results outlast the requests that wait."""
        by_url = self.line.get("x_response_format") == "url"
        return self.error is None and (self.key is not None or by_url)


class Online:
    """Answers requests for pictures."""

    def __init__(
        self,
        state: Path,
        service: "Service",
        settings: Mapping[str, Setting],
        bodies: Bodies,
        wire: Wire,
        metrics: Metrics,
        most_waiting: int,
    ) -> None:
        self._folder, self._service, self._metrics = state / "online", service, metrics
        self._bodies, self._wire, self._most_waiting = bodies, wire, most_waiting
        # A faulty line is refused.
        self._settings = dict(settings) | {"skip_invalid": Setting("skip_invalid", False, "flag")}
        # By name, the oldest first; and those that an equal request would share.
        self._drawings: dict[str, Drawing] = {}
        self._by_key: dict[tuple[str, str], Drawing] = {}
        self._is_closed = False
        # More than the queue lets in: a thread does nothing but wait for its session.
        self._threads = ThreadPoolExecutor(most_waiting + 64, "online")
        with disk_errors(state):
            shutil.rmtree(self._folder, ignore_errors=True)  # of a server that was killed
            self._folder.mkdir(parents=True)

    @property
    def waiting(self) -> int:
        """Pictures whose work has not begun."""
        return sum(one.waiting for one in self._drawings.values())

    def close(self) -> None:
        """Take no more requests, and wait for the threads, whose sessions have ended."""
        self._is_closed = True
        self._threads.shutdown()

    async def answer(self, request: Request) -> Response:
        """Draw what a request asks for, or share an equal request's drawing. Raises Refused."""
        endpoint, began = request.url.path, time.monotonic()
        base = str(request.base_url).rstrip("/")
        line, jobs, is_stream = await self._read(request)
        drawing = self._join(request.state.caller, line, jobs, request.headers)
        drawing.waiters += 1

        def leave() -> None:
            self._leave(drawing, may_retry=_may_retry(request, time.monotonic() - began))

        if is_stream:
            return _Stream(_events(drawing, EVENTS[endpoint], base), leave)
        gone = asyncio.create_task(_wait_until_gone(request))
        try:
            await asyncio.wait({gone, drawing.work}, return_when=asyncio.FIRST_COMPLETED)
            if not drawing.work.done():
                return Response(status_code=499)  # for the log
            if drawing.error is not None:
                raise refusal_of(drawing.error)
            names = [job.custom_id for job in drawing.jobs]
            return JSONResponse(await run_in_threadpool(drawing.body, base, names))
        finally:
            gone.cancel()
            leave()

    async def result(self, request: Request) -> Response:
        """The file of a result, by its path. Raises Refused."""
        drawing, path = self._drawings.get(request.path_params["name"]), request.path_params["path"]
        if drawing is not None and drawing.caller == request.state.caller:
            outputs = [one for entry in drawing.entries.values() for one in entry["outputs"]]
            if any(output["path"] == path for output in outputs):
                head = {"cache-control": "private", "x-content-type-options": "nosniff"}
                return FileResponse(drawing.folder / path, headers=head)
        what, hint = "No such result", f"results last {KEEP_S / 60:.0f} minutes"
        raise Refused(404, what, hint=hint, code="result.not-found")

    async def _read(self, request: Request) -> tuple[dict[str, Any], list[Job], bool]:
        """The line that a request stands for, its jobs, and whether to stream them."""
        if request.headers.get("content-type", "").startswith("multipart/"):
            # A mask, too.
            body = await self._bodies.form(request, most_files=self._wire.most_images + 1)
            return await run_in_threadpool(self._accept, request, body)
        async with self._bodies.json(request) as body:
            return await run_in_threadpool(self._accept, request, body)

    def _accept(
        self, request: Request, body: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Job], bool]:
        """As `_read`: jobs are checked as those of a manifest; one without a seed gets a random
        one. Raises Refused.
        """
        is_stream = body.pop("stream", None) or False
        if type(is_stream) is not bool:
            raise bad_request("stream", "stream is true or false", "manifest.wrong-type")
        line = self._wire.line_of(request.url.path, body, request.state.caller)
        own: dict[str, Any] = {"custom_id": f"img_{secrets.token_hex(12)}"}
        if self._settings["seed"].value is None:
            own["seed"] = secrets.randbelow(_SEEDS)
        try:
            data = json.dumps(own | line).encode()
            jobs, _ = accept(manifest_of(data, "request"), self._settings)
            kept = [job for job in jobs if getattr(job, "outside", None)]
            with self._wire.uploads.decoding:
                found = probe_sources(kept)
            for job in kept:
                if error := found.error_of(job):
                    raise error
        except HyimgError as error:
            raise refusal_of(error) from None
        return line, list(jobs), is_stream

    def _join(
        self, caller: str, line: dict[str, Any], jobs: list[Job], headers: Headers
    ) -> Drawing:
        """The drawing of an equal request, or a new one. Raises Refused."""
        asked, key = digest.of_json(line), None
        if "idempotency-key" in headers:
            key = (caller, digest.of_json(["key", headers["idempotency-key"]]))
        elif "seed" in line:
            key = (caller, asked)
        if key in self._by_key:
            if self._by_key[key].asked != asked:
                what, hint = "the Idempotency-Key was used with another body", "use a new key"
                code = "request.idempotency-key"
                raise Refused(422, what, param="Idempotency-Key", hint=hint, code=code)
            return self._by_key[key]
        if self._is_closed:  # since its body began to come
            raise stopping()
        self._refuse_full(len(jobs))
        name = jobs[0].custom_id.partition("-")[0]
        session = self._service.session(caller, caller, is_online=True)
        drawing = Drawing(name, caller, line, asked, key, jobs, self._folder / name, session)
        drawing.work = asyncio.create_task(self._draw(drawing))
        drawing.work.add_done_callback(lambda _: self._end(drawing))
        if len(self._drawings) >= _MOST_KEPT:
            ended = (one for one in self._drawings.values() if one.work.done() and not one.waiters)
            for oldest in islice(ended, 1):
                self._forget(oldest)
        self._drawings[name] = drawing
        if key is not None:
            self._by_key[key] = drawing
        return drawing

    def _refuse_full(self, count: int) -> None:
        """Raise Refused where so many pictures more would wait too long."""
        waiting, most = self.waiting, self._most_waiting
        if waiting + count > most:
            rate = self._service.counts()["pictures_per_s"] or max(1, waiting) / _USUAL_WAIT_S
            wait_s = min(_LONGEST_WAIT_S, math.ceil(waiting / rate))
            raise server_full(f"{waiting} pictures wait, of {most} at most", max(1, wait_s))

    async def _draw(self, drawing: Drawing) -> None:
        """Run the jobs of a drawing, in a thread of its own."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            plan = make_plan(drawing.jobs, cards(self._settings["revision"].value))
            with RunFolder(drawing.folder) as folder:
                for event in drawing.session.run(plan, folder):
                    if isinstance(event, JobEnded):
                        self._metrics.ended("online", event.outcome)
                    loop.call_soon_threadsafe(drawing.add, event)

        try:
            await loop.run_in_executor(self._threads, run)
        except Interrupted:
            drawing.error = stopping()
        except HyimgError as error:
            drawing.error = error
        except Exception:
            logger.exception("a request failed because of a bug of hyimg")
            drawing.error = internal(code="job.internal")

    def _end(self, drawing: Drawing) -> None:
        drawing.waiting = 0
        drawing.news.set()
        if not drawing.is_good:
            self._forget_key(drawing)  # who asks again has it tried again
        if drawing.is_kept:
            asyncio.get_running_loop().call_later(KEEP_S, self._forget, drawing)
        elif not drawing.waiters:
            self._forget(drawing)

    def _leave(self, drawing: Drawing, *, may_retry: bool) -> None:
        """A request does not wait any more: with the last one the drawing ends."""
        drawing.waiters -= 1
        if drawing.waiters:
            return
        if not drawing.work.done():
            after_s = RETRY_S if may_retry and drawing.key is not None else 0.0
            asyncio.get_running_loop().call_later(after_s, self._drop_unwanted, drawing)
        elif not drawing.is_kept:
            self._forget(drawing)

    def _drop_unwanted(self, drawing: Drawing) -> None:
        if not drawing.waiters and not drawing.work.done():
            self._forget_key(drawing)
            drawing.session.request_stop(signal.SIGTERM)

    def _forget_key(self, drawing: Drawing) -> None:
        if drawing.key is not None and self._by_key.get(drawing.key) is drawing:
            del self._by_key[drawing.key]

    def _forget(self, drawing: Drawing) -> None:
        self._forget_key(drawing)
        self._drawings.pop(drawing.name, None)
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, shutil.rmtree, drawing.folder, True)


async def _events(drawing: Drawing, kind: str, base: str) -> AsyncIterator[bytes]:
    """A streamed answer: an event for each picture once it is done, comments meanwhile."""
    shown = set[str]()
    while True:
        news, names = drawing.news, [name for name in drawing.entries if name not in shown]
        shown.update(names)
        for name in names:
            try:
                body = await run_in_threadpool(drawing.body, base, [name])
            except Refused as refused:
                yield _event("error", refused.body())
                continue
            picture = {**body.pop("data")[0], "created_at": body.pop("created")}
            yield _event(kind, {"type": kind} | picture | body)
        if names:  # others may have ended while these were encoded
            continue
        if drawing.work.done():
            if drawing.error is not None:
                yield _event("error", refusal_of(drawing.error).body())
            return
        try:
            await asyncio.wait_for(news.wait(), HEARTBEAT_S)
        except TimeoutError:
            yield b": at work\n\n"


def _event(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()


class _Stream(StreamingResponse):
    """A stream of events; `on_end` is called however it ends."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], object]) -> None:
        head = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=head)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _may_retry(request: Request, seconds: float) -> bool:
    """True if a client that left is about to ask again: it sent a key, or was out of the patience
    that the `openai` client names.
    """
    patience = request.headers.get("x-stainless-read-timeout", "")
    try:
        is_out = seconds >= 0.9 * float(patience)
    except ValueError:
        is_out = False
    return is_out or "idempotency-key" in request.headers
