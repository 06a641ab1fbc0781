"""Servers around an engine without a model, in this process or listening."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Running, server_of, until
from starlette.testclient import TestClient

from hyimg_cli.serve.keys import Keys, read_keys

ENDED = ("failed", "completed", "expired", "cancelled")
GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
KEYS = Keys({name: hashlib.sha256(name.encode()).digest() for name in ("ann", "bob")})


class Client:
    """A client of a server on a state folder, by default with the key of `ann`."""

    def __init__(self, folder: Path, painter: FakeService, at_once: int, **how: Any) -> None:
        self.folder = folder
        self.state = server_of(painter, folder, KEYS, **how)
        self.state.batches.at_once = at_once
        self.state.batches.start()
        painter.start()
        head = {"authorization": "Bearer ann"}
        self.http = TestClient(self.state.app, base_url="http://localhost", headers=head)

    def close(self) -> None:
        self.state.batches.stop()
        self.state.uploads.close()

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


@pytest.fixture
def painter() -> FakeService:
    return FakeService()


@pytest.fixture
def serve(tmp_path: Path, painter: FakeService) -> Iterator[Any]:
    """Starts a server on the test's folder, and ends the one before."""
    running = list[Client]()

    def start(batches_at_once: int = 4, **how: Any) -> Client:
        for one in running:
            one.close()
        running[:] = [Client(tmp_path / "state", painter, batches_at_once, **how)]
        return running[0]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def make_server(tmp_path: Path) -> Callable[..., Running]:
    """Builds a server; `keys`: the lines of its key file, `limits` as they are named."""

    def make(keys: str = "", **limits: Any) -> Running:
        known = Keys({})
        if keys:
            (tmp_path / "keys").write_text(keys)
            known = read_keys(tmp_path / "keys", {})
        service, log, state = FakeService(), list[Any](), tmp_path / "state"
        return Running(
            server_of(service, state, known, log=log.append, **limits), service, state, log
        )

    return make


@pytest.fixture
def client_of() -> Iterator[Callable[..., TestClient]]:
    """A client in this process for a server that is ready, which ends with the test."""
    with ExitStack() as held:

        def client(running: Running, key: str = "") -> TestClient:
            head = {"authorization": f"Bearer {key}"} if key else {}
            made = TestClient(running.server.app, base_url="http://127.0.0.1", headers=head)
            held.enter_context(made)
            until(lambda: running.server.is_ready)
            return made

        yield client


@pytest.fixture
def listening(make_server: Callable[..., Running]) -> Iterator[Running]:
    """A server without keys that listens."""
    running = make_server()
    with running.listening():
        yield running


@pytest.fixture
def http(listening: Running) -> Iterator[httpx.Client]:
    """A plain client of it."""
    with httpx.Client(base_url=listening.url, timeout=20) as client:
        yield client
