"""Servers around an engine without a model, in this process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Running, until
from starlette.testclient import TestClient

from hyimg_cli.serve.compose import Limits, build_server
from hyimg_cli.serve.keys import Keys, read_keys
from hyimg_cli.settings.config import build_run_config, settle


@pytest.fixture
def make_server(tmp_path: Path) -> Callable[..., Running]:
    """Builds a server; `keys`: the lines of its key file, `limits` as they are named."""

    def make(keys: str = "", **limits: Any) -> Running:
        known = Keys({})
        if keys:
            (tmp_path / "keys").write_text(keys)
            known = read_keys(tmp_path / "keys", {})
        settings = settle({}, {}, {})
        config = build_run_config(settings, tmp_path / "state", None)
        service, log = FakeService(config), list[Any]()
        server = build_server(
            service, settings, config, tmp_path / "state", known, Limits(**limits), log=log.append
        )
        return Running(server, service, tmp_path / "state", log)

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
