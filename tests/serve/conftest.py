"""Files and batches over HTTP in this process, with an application's errors."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from serve.served import Painter, State
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from hyimg_cli.errors import HyimgError
from hyimg_cli.serve import batches, uploads
from hyimg_cli.serve.errors import error_body, status_of

ENDED = ("failed", "completed", "expired", "cancelled")


class Server:
    """A client of a server on a state folder, by default the key `ann`'s."""

    def __init__(self, folder: Path, painter: Painter, **how: Any) -> None:
        self.folder = folder
        self.state = State.of(folder, painter, **how)
        self.state.batches.start()
        routes = [*uploads.routes(self.state.uploads), *batches.routes(self.state.batches)]
        app = Starlette(routes=routes, exception_handlers={HyimgError: _told})
        self.http = TestClient(_Named(app), headers={"x-caller": "ann"})

    def upload(self, data: bytes, purpose: str = "batch", **more: Any) -> Any:
        form = {"purpose": purpose} | more.pop("fields", {})
        return self.http.post("/v1/files", files={"file": ("a.jsonl", data)}, data=form, **more)

    def begin(self, *bodies: Mapping[str, Any], headers: Any = None, **more: Any) -> Any:
        """The answer to a batch of lines `a`, `b`, …"""
        url = EDITS if any("images" in body for body in bodies) else GENERATIONS
        lines = [
            {"custom_id": chr(97 + n), "method": "POST", "url": url, "body": body}
            for n, body in enumerate(bodies)
        ]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        asked = {"input_file_id": self.upload(data).json()["id"], "endpoint": url}
        asked |= {"completion_window": "24h"} | more
        return self.http.post("/v1/batches", json=asked, headers=headers)

    def get(self, path: str, **more: Any) -> Any:
        return self.http.get(path, **more).json()

    def wait(self, batch: Any, *statuses: str) -> Any:
        """A batch once it has one of the statuses, by default one of those that end it."""
        for _ in range(1000):
            found = self.get(f"/v1/batches/{batch['id']}")
            if found["status"] in (statuses or ENDED):
                return found
            time.sleep(0.01)
        raise AssertionError(found)

    def lines(self, name: str | None) -> list[Any]:
        response = self.http.get(f"/v1/files/{name}/content")
        assert response.status_code == 200, response.text
        size = self.get(f"/v1/files/{name}")["bytes"]
        assert len(response.content) == size, "bytes are those of the content"
        return [json.loads(line) for line in response.content.splitlines()]


GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"


def _told(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HyimgError)
    return JSONResponse(error_body(error), status_of(error))


class _Named:
    """Says who asks, as an application does that looked at the key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        scope.setdefault("state", {})["caller"] = headers.get(b"x-caller", b"").decode()
        await self._app(scope, receive, send)


@pytest.fixture
def painter() -> Painter:
    return Painter()


@pytest.fixture
def serve(tmp_path: Path, painter: Painter) -> Iterator[Any]:
    """Starts a server on the test's folder; whoever starts another one has ended the first."""
    running = list[Server]()

    def start(**how: Any) -> Server:
        for one in running:
            one.state.batches.stop()
            one.state.uploads.close()
        running[:] = [Server(tmp_path / "state", painter, **how)]
        return running[0]

    yield start
    for one in running:
        one.state.batches.stop()
        one.state.uploads.close()
