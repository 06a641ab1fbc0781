"""The server: puts its parts together, admits and logs requests, starts and stops."""

import asyncio
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.chat import CHAT
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.serve.batches import Batches
from hyimg_cli.serve.bodies import Bodies
from hyimg_cli.serve.connections import Connection, hear_of_accept_errors, most_requests
from hyimg_cli.serve.errors import Refused, internal, refusal_of, server_full, stopping
from hyimg_cli.serve.keys import Keys
from hyimg_cli.serve.login import Login
from hyimg_cli.serve.metrics import CONTENT_TYPE, Metrics
from hyimg_cli.serve.online import RESULTS, Online
from hyimg_cli.serve.openapi import describe
from hyimg_cli.serve.routes import routes_of_batches, routes_of_files
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.serve.wire import EVENTS, Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.paths import MODEL_NAME
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.model_name import names_file

if TYPE_CHECKING:
    from hyimg_cli.engine.service import Service

logger = logging.getLogger(__name__)
_TICK_S = 0.1
# Paths that need no key: probes of a container have none.
_WITHOUT_KEY = ("/health", "/ready")
# For web pages of other sites that are allowed.
_METHODS, _EXPOSED = ("GET", "POST", "DELETE"), ("x-request-id", "retry-after", "x-should-retry")


class Server:
    """Serves one model: single requests and batches. `fault` is the error that ended it.

    Once `is_stopping` is set it accepts no new work, and ends when the running single requests are
    answered.
    """

    def __init__(
        self,
        service: "Service",
        settings: Mapping[str, Setting],
        config: RunConfig,
        state: Path,
        keys: Keys,
        *,
        host: str = "127.0.0.1",
        max_waiting: int = 64,
        max_steps: int = 100,
        grace: float = 30.0,
        names: Sequence[str] = (),
        origins: Sequence[str] = (),
        log: Callable[[Mapping[str, Any]], object] = lambda line: None,
    ) -> None:
        """Create a server for a service that has not started; `log` receives access log lines.

        `names`: of the model in place of its own, which stays valid; `origins`: of web pages that
        may send requests. `max_waiting` limits the waiting pictures of single requests, `max_steps`
        the denoise steps of a picture; running single requests get `grace` seconds to finish.
        Raises StorageError, OutputFolderError.
        """
        self.service, self.keys, self.log = service, keys, log
        self._is_local, self._grace_s = is_loopback(host), grace
        self._created = int(time.time())
        self.is_stopping = self.is_over = False
        self.fault: BaseException | None = None
        self._most_requests, self._at_work = most_requests(), 0
        model = config.model.model
        # Only the name of a folder is shown: clients must not learn the server's paths.
        if names_file(model):
            self.model = public_model(model)
        else:
            self.model = Path(model).resolve().name if MODEL_NAME.is_path(model) else model
        self.metrics, self.uploads = Metrics(), Uploads(state)
        self.names, self._origins = tuple(names) or (self.model,), origins
        self._login = Login(state, keys)
        known = frozenset((*self.names, self.model))
        wire = Wire(known, service.card.most_sources, max_steps, self.uploads, settings)
        bodies = Bodies(self.uploads)
        self.batches = Batches(state, service, wire, self.metrics, config)
        self.online = Online(
            state,
            service,
            wire,
            self.metrics,
            bodies,
            most_waiting=max_waiting,
            share=-(-max_waiting // max(1, len(keys))),
        )
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", lambda _: JSONResponse(api)),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            *(Route(path, self.online, methods=["POST"]) for path in (*EVENTS, CHAT)),
            Route(RESULTS + "/{name}/{path:path}", self.online.result),
            *routes_of_files(self.uploads, bodies),
            *routes_of_batches(self.batches, bodies),
        ]
        api = describe(routes)
        handlers: Any = {
            HTTPException: _answer_http,
            HyimgError: _answer,
            ClientDisconnect: lambda *_: Response(status_code=499),
            Exception: lambda request, _: _answer(request, internal(code="internal")),
        }
        self._routed = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._life)
        self._routed.router.redirect_slashes = False
        # Browsers hide an answer, even an error, from a page of another site that is not allowed.
        self._open: ASGIApp = self._let_in
        if origins:
            self._open = CORSMiddleware(
                self._let_in,
                allow_origins=origins,
                allow_methods=_METHODS,
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )

    @property
    def most_connections(self) -> int:
        """The limit of connections: more than of requests, so that `/health` is always served."""
        return self._most_requests + self._most_requests // 8

    @property
    def is_ready(self) -> bool:
        """True while new work is accepted."""
        return self.service.is_ready and not self.is_stopping

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        hear_of_accept_errors(asyncio.get_running_loop())
        work = asyncio.create_task(self._work())
        yield
        self.is_stopping = True
        await work

    async def _work(self) -> None:
        """Load the model, resume the batches, wait for a stop or a fault, and end in order."""
        try:
            await asyncio.to_thread(self.service.start)
            self.batches.start()
            while not self.is_stopping and self.service.fault is None:
                await asyncio.sleep(_TICK_S)
            self.fault = self.service.fault
        except Exception as error:
            self.fault = error
        self.is_stopping = True
        try:
            await asyncio.to_thread(self.batches.stop)
            await asyncio.to_thread(self.service.stop, self._grace_s)
            await asyncio.to_thread(self.online.close)
        except Exception as error:
            self.fault = self.fault or error
        self.is_over = True

    # Coroutines: an answer does not wait for a thread.
    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        self._refuse_unready()
        return JSONResponse({"status": "ready"})

    def _refuse_unready(self) -> None:
        if not self.is_ready:
            raise stopping("stopping" if self.is_stopping else "loading")

    def _metrics(self, _: Request) -> Response:
        text = self.metrics.text(self.service.counts(), self.batches.counts(), ready=self.is_ready)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    def _models(self, request: Request) -> Response:
        """Answer with the one model, under one of its names, or with a list of them."""
        about = {"object": "model", "owned_by": "hyimg", "created": self._created}
        asked = request.path_params.get("model")
        if asked is None:
            shown = [{"id": name} | about for name in self.names]
            return JSONResponse({"object": "list", "data": shown})
        if asked in (*self.names, self.model):
            return JSONResponse({"id": asked} | about)
        raise Refused(404, "model not found", param="model", code="model_not_found")

    def _admit(self, scope: Scope, headers: Headers) -> str | None:
        """Return the name of a request's key; None if it may log in with it.

        Raises Refused if the request is not let in.
        """
        path = scope["path"]
        if self._at_work > self._most_requests and path != "/health":
            refused = server_full("the server has too many requests", 5, status=503)
            refused.headers["connection"] = "close"
            raise refused
        if self._is_local and not len(self.keys):
            self._refuse_others(headers)
        caller = self.keys.caller_of(headers.get("authorization"))
        if caller is None and path not in _WITHOUT_KEY:
            caller = self._login.caller_of(request := Request(scope))
            if caller is None and self._login.asks(request):
                return None
            if caller is None:
                what, hint = "the API key is missing or wrong", "send Authorization: Bearer KEY"
                head = {"www-authenticate": "Bearer"}
                raise Refused(401, what, hint=hint, code="invalid_api_key", headers=head)
        if scope["method"] == "POST" and path in (*EVENTS, CHAT, "/v1/batches"):
            self._refuse_unready()
        return caller or ""

    def _refuse_others(self, headers: Headers) -> None:
        """Refuse a page of another site, or a site whose name was rebound to this machine.

        Only a key keeps them out elsewhere, which no such page has.
        """
        origin = headers.get("origin", "//localhost")
        for name, address in (("Host", f"//{headers.get('host', '')}"), ("Origin", origin)):
            is_allowed = name == "Origin" and origin in self._origins
            if not is_allowed and not is_loopback(_host_in(address)):
                what = f"the {name} header names another machine"
                hint = "use localhost or 127.0.0.1, or start the server with an API key"
                raise Refused(421, what, param=name, hint=hint, code="request.host")

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, after its key was checked."""
        try:
            caller = self._admit(scope, Headers(scope=scope))
            if caller is None:
                request = Request(scope, receive)
                answer = await self._login.answer(request)
                await answer(scope, receive, send)
                return
            scope["state"]["caller"] = caller
            await self._routed(scope, receive, send)
        except Refused as refused:
            await _answer(Request(scope), refused)(scope, receive, send)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: admits each request, gives it an id, logs and counts it."""
        if scope["type"] != "http":
            await self._routed(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        name, status, nbytes = f"req_{secrets.token_hex(12)}", 499, 0
        scope["state"] = {**scope.get("state", {}), "caller": ""}

        async def sent(message: Message) -> None:
            nonlocal status, nbytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            nbytes += len(message.get("body", b""))
            await send(message)

        self._at_work += 1
        try:
            await self._open(scope, receive, sent)
        except Exception:
            logger.exception("a request failed because of a bug in hyimg")
        finally:
            self._at_work -= 1
            route = getattr(scope.get("route"), "path", "other")
            is_retry = headers.get("x-stainless-retry-count", "0") != "0"
            self.metrics.answered(route, status, is_retry=is_retry)
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "key": scope["state"]["caller"],
                "method": scope["method"],
                "route": route,
                "status": status,
                "bytes": nbytes,
                "seconds": round(time.perf_counter() - began, 3),
                "request_id": name,
            }
            with suppress(Exception):  # a log on a full disk must not fail requests
                self.log(line)


def _answer(_: Request, error: HyimgError) -> Response:
    refused = refusal_of(error)
    return JSONResponse(refused.body(), refused.status, refused.headers)


def _answer_http(request: Request, error: HTTPException) -> Response:
    """Answer with one of starlette's own refusals: unknown route or method."""
    what = f"{request.method} {request.url.path[:200]}: {HTTPStatus(error.status_code).phrase}"
    code = {404: "route.not-found", 405: "route.method"}.get(error.status_code, "request.bad")
    head = dict(error.headers or {})
    if error.status_code == 405:  # starlette names the methods of one route only
        same = (one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE)
        head["Allow"] = ", ".join(sorted({method for one in same for method in one.methods}))
    hint = _meant_by(request) if error.status_code == 404 else ""
    return _answer(request, Refused(error.status_code, what, code=code, hint=hint, headers=head))


def _meant_by(request: Request) -> str:
    """Return a hint for a client whose base URL lacks `/v1`, has it twice, or ends with a slash."""
    path = re.sub(r"^/*(v1/+)*", "/v1/", request.url.path)
    scope = {**request.scope, "path": path}
    is_known = any(one.matches(scope)[0] != Match.NONE for one in request.app.routes)
    if is_known and path != request.url.path:
        return f"the address is {path}: set the client's base URL to http://…/v1"
    return ""


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a host."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def _host_in(address: str) -> str:
    """Return the host of an address without its port, or an empty text."""
    with suppress(ValueError):
        return urlsplit(address).hostname or ""
    return ""


class HttpServer(uvicorn.Server):
    """Runs uvicorn until the server has ended; a signal then gives exit code 0."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            uvicorn.Config(
                server.app,
                interface="asgi3",
                http=Connection.of(server.most_connections, server.metrics),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                # The kernel's queue, and how many connections asyncio accepts in one go.
                backlog=128,
                timeout_graceful_shutdown=5,
            )
        )
        self._server = server

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop in order at the first signal, at once at the second."""
        if self._server.is_stopping:
            os._exit(128 + sig)
        self._server.is_stopping = True

    async def on_tick(self, counter: int) -> bool:
        """Return True to end; uvicorn calls it ten times a second."""
        return await super().on_tick(counter) or self._server.is_over
