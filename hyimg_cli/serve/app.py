"""The server: its parts put together, who may call it, the access log, start and end."""

import asyncio
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import HyimgError
from hyimg_cli.serve.batches import Batches
from hyimg_cli.serve.bodies import Bodies
from hyimg_cli.serve.errors import Refused, internal, refusal_of, stopping
from hyimg_cli.serve.keys import Keys
from hyimg_cli.serve.metrics import CONTENT_TYPE, Metrics
from hyimg_cli.serve.online import RESULTS, Online
from hyimg_cli.serve.openapi import describe
from hyimg_cli.serve.routes import routes_of_batches, routes_of_files
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.serve.wire import EVENTS, Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.paths import MODEL_NAME
from hyimg_cli.settings.run import RunConfig

if TYPE_CHECKING:
    from hyimg_cli.engine.service import Service

logger = logging.getLogger(__name__)
_TICK_S = 0.1
# Below the usual 1,024 files that a process may open: more get 503.
MOST_CONNECTIONS = 512
_WITHOUT_KEY = ("/health",)
_MAKES_WORK = (*EVENTS, "/v1/batches")
_SLUGS = {404: "route.not-found", 405: "route.method"}


class Server:
    """One model, its single requests and its batches. `fault`: what ended it."""

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
        batches_at_once: int = 4,
        log: Callable[[Mapping[str, Any]], object] = lambda line: None,
    ) -> None:
        """Around a service that is not started yet; `log` takes a line of the access log.

        So many pictures of single requests may wait, one may have so many denoise steps, and they
        have `grace` seconds to end. Raises StorageError, OutputFolderError.
        """
        self.service, self.keys, self.log = service, keys, log
        self._is_local, self._grace_s = is_loopback(host), grace
        self._created = int(time.time())
        self.is_stopping = self.is_over = False
        self.fault: BaseException | None = None
        model = config.model.model
        # A folder is shown by its name alone: paths of the server are nobody's business.
        self.models = (Path(model).resolve().name if MODEL_NAME.is_path(model) else model,)
        self.metrics, self.uploads = Metrics(), Uploads(state)
        wire = Wire(self.models, service.card.most_images, max_steps, self.uploads)
        bodies = Bodies(self.uploads)

        def run_of(request: RunRequest, scope: str, caller: str) -> ManifestRun:
            return ManifestRun(request, lambda _: service.session(scope, caller))

        about = state, self.uploads, config, settings, wire, run_of, self.metrics
        self.batches = Batches(*about, at_once=batches_at_once)
        self.online = Online(*(state, service, settings, bodies, wire, self.metrics, max_waiting))
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", lambda _: JSONResponse(api)),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            *(Route(path, self.online.answer, methods=["POST"]) for path in EVENTS),
            Route(RESULTS + "/{name}/{path:path}", self.online.result),
            *routes_of_files(self.uploads, bodies),
            *routes_of_batches(self.batches, bodies),
        ]
        api = describe(routes)
        handlers: Any = {
            HTTPException: _answer_http,
            HyimgError: _answer,
            ClientDisconnect: lambda *_: Response(status_code=499),
            Exception: _answer_bug,
        }
        inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._life)
        inner.router.redirect_slashes = False
        self.app: ASGIApp = Front(self, inner)

    @property
    def is_ready(self) -> bool:
        """True while new work is taken."""
        return self.service.is_ready and not self.is_stopping

    def request_stop(self) -> None:
        """Take no new work, and end once the single requests at work are answered."""
        self.is_stopping = True

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        work = asyncio.create_task(self._work())
        yield
        self.request_stop()
        await work

    async def _work(self) -> None:
        """Load the model, go on with the batches, watch, and end in order."""
        try:
            await asyncio.to_thread(self.service.start)
            await asyncio.to_thread(self.batches.start)
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

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        if not self.is_ready:
            raise self._unready()
        return JSONResponse({"status": "ready"})

    def _unready(self) -> Refused:
        return stopping("stopping" if self.is_stopping else "loading")

    def _metrics(self, _: Request) -> Response:
        counts = self.service.counts()
        text = self.metrics.text(counts, self.batches.counts(), ready=self.is_ready)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    def _models(self, _: Request) -> Response:
        data = [self._shown(name) for name in self.models]
        return JSONResponse({"object": "list", "data": data})

    def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self.models:
            raise Refused(404, "No such model", param="model", code="model_not_found")
        return JSONResponse(self._shown(name))

    def _shown(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "hyimg"}

    def admit(self, method: str, path: str, headers: Headers) -> str:
        """The name of the key that a request has. Raises Refused where it may not come in."""
        # A page of a browser on this machine, by a name of its own or from elsewhere.
        asked = {
            "Host": f"//{headers.get('host', '')}",
            "Origin": headers.get("origin", "//localhost"),
        }
        asked = {name: host for name, host in asked.items() if not is_loopback(_host_in(host))}
        if self._is_local and asked:
            name = next(iter(asked))
            what = f"the {name} header names another machine than this one"
            hint = "ask for localhost or 127.0.0.1"
            raise Refused(421, what, param=name, hint=hint, code="request.host")
        caller = self.keys.caller_of(headers.get("authorization"))
        if caller is None and path not in _WITHOUT_KEY:
            what, hint = "the API key is missing or wrong", "send Authorization: Bearer KEY"
            head = {"www-authenticate": "Bearer"}
            raise Refused(401, what, hint=hint, code="invalid_api_key", headers=head)
        if method == "POST" and path in _MAKES_WORK and not self.is_ready:
            raise self._unready()
        return caller or ""


class Front:
    """What each request passes first and each response last: key, request id, log, count."""

    def __init__(self, server: Server, app: ASGIApp) -> None:
        self._server, self._app = server, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        server, headers, began = self._server, Headers(scope=scope), time.perf_counter()
        name, status, nbytes = f"req_{secrets.token_hex(12)}", 499, 0
        scope["state"] = {**scope.get("state", {}), "caller": ""}

        async def sent(message: Message) -> None:
            nonlocal status, nbytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            nbytes += len(message.get("body", b""))
            await send(message)

        try:
            scope["state"]["caller"] = server.admit(scope["method"], scope["path"], headers)
            await self._app(scope, receive, sent)
        except Refused as refused:
            await _answer(Request(scope), refused)(scope, receive, sent)
        except Exception:
            logger.exception("a request failed by a fault of hyimg's own")
        finally:
            route = getattr(scope.get("route"), "path", "other")
            is_retry = headers.get("x-stainless-retry-count", "0") != "0"
            server.metrics.answered(route, status, is_retry=is_retry)
            with suppress(Exception):  # a full log ends no request
                server.log(
                    {
                        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                        "key": scope["state"]["caller"],
                        "method": scope["method"],
                        "route": route,
                        "status": status,
                        "bytes": nbytes,
                        "seconds": round(time.perf_counter() - began, 3),
                        "request_id": name,
                    }
                )


def _answer(_: Request, error: HyimgError) -> Response:
    refused = refusal_of(error)
    return JSONResponse(refused.body(), refused.status, refused.headers)


def _answer_http(request: Request, error: HTTPException) -> Response:
    """Starlette's own refusals: no such route, no such method."""
    what = f"{request.method} {request.url.path[:200]}: {HTTPStatus(error.status_code).phrase}"
    code = _SLUGS.get(error.status_code, "request.bad")
    return _answer(request, Refused(error.status_code, what, code=code, headers=error.headers))


def _answer_bug(request: Request, _: Exception) -> Response:
    return _answer(request, internal(code="internal"))


def is_loopback(host: str) -> bool:
    """True if a host is this machine and reached from it alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def _host_in(address: str) -> str:
    """The host of an address, without its port; of none, nothing."""
    with suppress(ValueError):
        return urlsplit(address).hostname or ""
    return ""


class HttpServer(uvicorn.Server):
    """uvicorn, which a signal ends once the server behind it is through, with exit code 0."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            uvicorn.Config(
                server.app,
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=5,
            )
        )
        self._server = server

    def handle_exit(self, sig: int, frame: Any) -> None:
        """The first signal stops in order, the second at once."""
        if self._server.is_stopping:
            os._exit(128 + sig)
        self._server.request_stop()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        return await super().on_tick(counter) or self._server.is_over
