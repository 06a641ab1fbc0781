"""Single requests: a picture, or a few, drawn while their caller waits.

Each is a manifest line with a small run folder of its own, and a session of the one engine. Equal
requests of a caller share a drawing; one that nobody waits for any more is dropped.
"""

import asyncio
import base64
import json
import logging
import math
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hyimg_cli.engine.runner import accept, cards
from hyimg_cli.engine.sources import probe_sources
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.files import bytes_of
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.journal import RunFolder, outcome_to_json
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.serve.bodies import read_form, read_json
from hyimg_cli.serve.errors import Refused, error_body
from hyimg_cli.serve.metrics import Metrics
from hyimg_cli.serve.wire import EVENTS, Wire, body_of, failed_body, fields_of_form, refusal_of
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Event, JobEnded, JobStarted
from hyimg_cli.spec.job import Job

if TYPE_CHECKING:
    from hyimg_cli.engine.service import ServedSession

# Results last so long; and so long a client that ran out of patience may take to ask again.
KEEP_S = 600.0
RETRY_S = 10.0
HEARTBEAT_S = 10.0
_MOST_BYTES = 200_000_000  # of a picture's file
_LONGEST_WAIT_S, _USUAL_WAIT_S = 60, 10
_HEARTBEAT = b": at work\n\n"
_SEEDS = 2**31
RESULTS = "/v1/images/results"
# Asked again, it would fail again.
NO_RETRY = {"x-should-retry": "false"}
_TOLD = ("custom_id", "status", "outputs", "cot_text", "warnings", "kv_reuse", "error")
_NONE: dict[str, Any] = {"outputs": ()}
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Drawing:
    """The jobs of a line while they are at work, and their results while these last.

    `digest`: of what was asked for. `names`: the jobs' custom_ids. `entries`: by these, of the
    result lines what is told. `waiters`: requests that
    wait. `error`: what ended all of it. `changed` is set, and replaced, at each news.
    """

    name: str
    caller: str
    line: dict[str, Any]
    digest: str
    names: list[str]
    folder: Path
    session: "ServedSession"
    key: tuple[str, str] | None
    created: int = field(default_factory=lambda: int(time.time()))
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    waiting: int = 0
    waiters: int = 0
    error: HyimgError | None = None
    is_done: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wake whoever waits for news."""
        self.changed, changed = asyncio.Event(), self.changed
        changed.set()

    @property
    def in_order(self) -> list[dict[str, Any]]:
        """The result lines that are there, as their jobs were asked for."""
        return [self.entries[name] for name in self.names if name in self.entries]

    @property
    def keeps_results(self) -> bool:
        """True if its results outlast the requests that wait."""
        is_asked = self.key is not None or self.line.get("x_response_format") == "url"
        return is_asked and self.error is None


class Online:
    """Answers requests for pictures.

    `session_for` gives a session by the caller's name; `rate` the pictures a second of late,
    None before the first.
    """

    def __init__(
        self,
        state: Path,
        settings: Mapping[str, Setting],
        wire: Wire,
        metrics: Metrics,
        *,
        session_for: Callable[[str], "ServedSession"],
        rate: Callable[[], float | None],
        most_waiting: int,
    ) -> None:
        self._folder, self._wire, self._metrics = state / "online", wire, metrics
        # A faulty line of a request is its refusal.
        self._settings = dict(settings) | {"skip_invalid": Setting("skip_invalid", False, "flag")}
        self._session_for, self._rate, self._most_waiting = session_for, rate, most_waiting
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

    async def answer(self, request: Request) -> Response:
        """Draw what a request asks for, or take it from an equal one. Raises Refused."""
        endpoint, began = request.url.path, time.monotonic()
        base = str(request.base_url).rstrip("/")
        is_form = request.headers.get("content-type", "").startswith("multipart/")
        if is_form:
            uploads = self._wire.uploads
            form = await read_form(request, uploads, most_files=self._wire.most_images + 1)
            files = [(name, upload.path) for name, upload in form.files]
            body = fields_of_form(form.fields, files)
        else:
            body = await read_json(request)
        is_stream = body.pop("stream", None) or False
        if type(is_stream) is not bool:
            raise Refused(400, "stream is no truth", param="stream", code="manifest.wrong-type")
        caller = request.state.caller
        name = f"img_{secrets.token_hex(12)}"
        line = await run_in_threadpool(self._wire.line_of, endpoint, body, caller)
        jobs = await run_in_threadpool(self._jobs_of, name, line)
        key = request.headers.get("idempotency-key")
        drawing = self._join(name, caller, line, jobs, idempotency=key)

        def leave() -> None:
            self._leave(drawing, may_retry=_may_retry(request, time.monotonic() - began))

        if is_stream:
            return _Stream(self._events(drawing, EVENTS[endpoint], base), leave)
        try:
            gone = asyncio.create_task(_wait_until_gone(request))
            while not drawing.is_done and not gone.done():
                news = asyncio.create_task(drawing.changed.wait())
                await asyncio.wait({gone, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            gone.cancel()
            if not drawing.is_done:
                return Response(status_code=499)  # which nobody hears
            return await run_in_threadpool(self._response_of, drawing, base)
        finally:
            leave()

    async def result(self, request: Request) -> Response:
        """The file of a result, by its path. Raises Refused."""
        drawing = self._drawings.get(request.path_params["name"])
        number = request.path_params["number"]
        if drawing is not None and drawing.caller == request.state.caller:
            names = drawing.names[number : number + 1]
            for output in [one for n in names for one in drawing.entries.get(n, _NONE)["outputs"]]:
                head = {"cache-control": "private", "x-content-type-options": "nosniff"}
                return FileResponse(drawing.folder / output["path"], headers=head)
        what = "this result is not here"
        hint = f"results last {KEEP_S / 60:.0f} minutes"
        raise Refused(404, what, hint=hint, code="result.not-found")

    def close(self) -> None:
        """Take nothing in any more, and wait for the threads, whose sessions have ended."""
        self._is_closed = True
        self._threads.shutdown()

    def _join(
        self,
        name: str,
        caller: str,
        line: dict[str, Any],
        jobs: list[Job],
        *,
        idempotency: str | None,
    ) -> Drawing:
        """The drawing of a line, which counts one more request that waits for it: one that is
        there for an equal line, or a new one. Raises Refused.
        """
        asked, key = digest.of_json(line), None
        if idempotency is not None:
            key = (caller, f"key {idempotency}")
        elif "seed" in line:
            key = (caller, asked)
        if key in self._by_key:
            drawing = self._by_key[key]
            if drawing.digest != asked:
                what, hint = "the Idempotency-Key was used with another body", "use a new key"
                code = "request.idempotency-key"
                raise Refused(422, what, param="Idempotency-Key", hint=hint, code=code)
            drawing.waiters += 1
            return drawing
        if self._is_closed:  # since its body began to come
            raise _stopping()
        self._refuse_full(len(jobs))
        drawing = Drawing(
            *(name, caller, line, asked, [job.custom_id for job in jobs]),
            *(self._folder / name, self._session_for(caller), key),
            waiting=len(jobs),
            waiters=1,
        )
        self._drawings[name] = drawing
        if key is not None:
            self._by_key[key] = drawing
        loop = asyncio.get_running_loop()
        self._threads.submit(self._draw, drawing, jobs, loop.call_soon_threadsafe)
        return drawing

    def _refuse_full(self, count: int) -> None:
        """Raise Refused where so many pictures more would wait that it takes too long."""
        waiting = self.waiting
        if waiting + count <= self._most_waiting:
            return
        rate = self._rate() or waiting / _USUAL_WAIT_S
        wait_s = min(_LONGEST_WAIT_S, math.ceil(waiting / rate))
        what = f"{waiting} pictures wait, and this server lets {self._most_waiting} wait"
        head = {"retry-after": str(max(1, wait_s))}
        raise Refused(429, what, hint="try again later", code="server.full", headers=head)

    def _jobs_of(self, name: str, line: dict[str, Any]) -> list[Job]:
        """The jobs of a line, checked as those of a manifest; one without a seed gets one by
        chance. Raises Refused.
        """
        own: dict[str, Any] = {"custom_id": name}
        if self._settings["seed"].value is None:
            own["seed"] = secrets.randbelow(_SEEDS)
        try:
            data = json.dumps(own | line).encode()
            jobs, _ = accept(manifest_of(data, "request"), self._settings)
            kept = [job for job in jobs if getattr(job, "outside", None)]
            found = probe_sources(kept)
            for job in kept:
                if error := found.error_of(job):
                    raise refusal_of(error)
        except HyimgError as error:
            raise refusal_of(error) from None
        return list(jobs)

    def _draw(self, drawing: Drawing, jobs: list[Job], in_loop: Callable[..., object]) -> None:
        """Run the jobs of a drawing, in a thread of its own."""
        error: HyimgError | None = None
        try:
            plan = make_plan(jobs, cards(self._settings["revision"].value))
            with RunFolder(drawing.folder) as folder:
                for event in drawing.session.run(plan, folder):
                    in_loop(self._add, drawing, event)
        except Interrupted:
            error = _stopping()
        except HyimgError as caught:
            error = caught
        except Exception as caught:
            logger.exception("a request failed by a fault of hyimg's own")
            error = _internal(caught)
        in_loop(self._end, drawing, error)

    def _add(self, drawing: Drawing, event: Event) -> None:
        match event:
            case JobStarted():
                drawing.waiting = max(0, drawing.waiting - 1)
            case JobEnded():
                self._metrics.ended("online", event.outcome)
                entry = outcome_to_json(event.outcome)
                # For ten minutes, perhaps, so that no more is kept than needed.
                drawing.entries[entry["custom_id"]] = {name: entry[name] for name in _TOLD}
                drawing.notify()

    def _end(self, drawing: Drawing, error: HyimgError | None) -> None:
        drawing.is_done, drawing.waiting, drawing.error = True, 0, error
        if error is None and len(drawing.entries) < len(drawing.names):
            drawing.error = _internal(RuntimeError("a job has no end"))
        is_good = all(entry["status"] == "done" for entry in drawing.in_order)
        if drawing.error is not None or not is_good:
            self._forget_key(drawing)  # who asks again has it tried again
        drawing.notify()
        if drawing.keeps_results:
            asyncio.get_running_loop().call_later(KEEP_S, self._forget, drawing)
        elif not drawing.waiters:
            self._forget(drawing)

    def _leave(self, drawing: Drawing, *, may_retry: bool) -> None:
        """A request waits no more: the last one that goes takes the drawing along."""
        drawing.waiters -= 1
        if drawing.waiters:
            return
        if drawing.is_done:
            if not drawing.keeps_results:
                self._forget(drawing)
        elif may_retry and drawing.key is not None:
            asyncio.get_running_loop().call_later(RETRY_S, self._drop_unwanted, drawing)
        else:
            self._drop_unwanted(drawing)

    def _drop_unwanted(self, drawing: Drawing) -> None:
        if not drawing.waiters and not drawing.is_done:
            self._forget_key(drawing)
            drawing.session.request_stop(signal.SIGTERM)

    def _forget_key(self, drawing: Drawing) -> None:
        if drawing.key is not None and self._by_key.get(drawing.key) is drawing:
            del self._by_key[drawing.key]

    def _forget(self, drawing: Drawing) -> None:
        self._forget_key(drawing)
        self._drawings.pop(drawing.name, None)
        asyncio.get_running_loop().run_in_executor(
            None, lambda: shutil.rmtree(drawing.folder, ignore_errors=True)
        )

    def _response_of(self, drawing: Drawing, base: str) -> Response:
        """The response to a request whose drawing is done. Raises what ended it."""
        if drawing.error is not None:
            raise refusal_of(drawing.error)
        status, head, body = self._body_of(drawing, drawing.in_order, base)
        return JSONResponse(body, status, head)

    def _body_of(
        self, drawing: Drawing, entries: Sequence[Mapping[str, Any]], base: str
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body that tell of these result lines of a drawing."""
        numbers = {
            output["path"]: drawing.names.index(entry["custom_id"])
            for entry in entries
            for output in entry["outputs"]
        }

        def picture(output: Mapping[str, Any]) -> dict[str, str]:
            if drawing.line.get("x_response_format") == "url":
                return {"url": f"{base}{RESULTS}/{drawing.name}/{numbers[output['path']]}"}
            data = bytes_of(drawing.folder / output["path"], _MOST_BYTES)
            return {"b64_json": base64.b64encode(data).decode()}

        failed = [entry["error"] for entry in entries if entry["status"] != "done"]
        if not failed:
            return 200, {}, body_of(drawing.line, entries, picture, drawing.created)
        head = {} if failed[0]["retryable"] else NO_RETRY
        status, body = failed_body(drawing.line, entries, picture, drawing.created)
        return status, head, body

    async def _events(self, drawing: Drawing, kind: str, base: str) -> AsyncIterator[bytes]:
        """A streamed answer: an event for each picture as it is done, comments meanwhile."""
        told = set[str]()
        while True:
            news = drawing.changed
            for name in [name for name in drawing.entries if name not in told]:
                told.add(name)
                entry = drawing.entries[name]
                status, _, body = await run_in_threadpool(self._body_of, drawing, [entry], base)
                yield _event(kind, body) if status == 200 else _event("error", body)
            if drawing.is_done:
                if drawing.error is not None:
                    yield _event("error", error_body(refusal_of(drawing.error)))
                return
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT_S)
            except TimeoutError:
                yield _HEARTBEAT


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


def _event(kind: str, body: dict[str, Any]) -> bytes:
    if kind != "error":
        own = {**body.pop("data")[0], **body, "created_at": body.pop("created")}
        body = {"type": kind} | own
    return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _may_retry(request: Request, seconds: float) -> bool:
    """True if a client that left is about to ask again: it said so by a key, or was out of the
    patience that the `openai` client tells.
    """
    patience = request.headers.get("x-stainless-read-timeout", "")
    try:
        is_out = seconds >= 0.9 * float(patience)
    except ValueError:
        is_out = False
    return is_out or "idempotency-key" in request.headers


def _stopping() -> Refused:
    what, hint = "the server is stopping", "try again later"
    return Refused(503, what, hint=hint, code="server.stopping")


def _internal(error: Exception) -> Refused:
    what, hint = f"a mistake of hyimg's own: {type(error).__name__}", "the server's log has more"
    return Refused(500, what, hint=hint, code="job.internal", headers=NO_RETRY)
