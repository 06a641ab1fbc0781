"""An S3 endpoint on this machine (moto's, over real HTTP) that can be made to misbehave."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from hyimg_cli import remote


@dataclass
class Endpoint:
    """The server's address; `fault` is asked of every request, by method and path: `503`, `409` (it
    met another for one name), `lost` (it is done, and its answer never comes), or seconds to wait.
    """

    url: str = ""
    fault: Callable[[str, str], Any] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def addresses_at(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have `s3://` lead to an endpoint."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", served.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    remote._system.cache_clear()
    yield
    remote._system.cache_clear()


@contextmanager
def s3_endpoint() -> Iterator[Endpoint]:
    """An endpoint with the bucket `bucket`."""
    moto, endpoint = DomainDispatcherApplication(create_backend_app), Endpoint()
    # A store creates a name once; moto looks whether it is there, and then creates it.
    at_work = threading.Lock()

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        endpoint.requests.append((method, path))
        fault = endpoint.fault(method, path)
        if fault == "503":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code></Error>"]
        if fault == "409":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("409 Conflict", [("Content-Type", "application/xml")])
            return [b"<Error><Code>ConditionalRequestConflict</Code></Error>"]
        if isinstance(fault, float):
            time.sleep(fault)
        with at_work:
            answer = moto(environ, start)
        if fault == "lost":
            environ["werkzeug.socket"].shutdown(2)
        return answer

    server = make_server("127.0.0.1", 0, app, threaded=True)
    endpoint.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    # What an earlier test left is the process's.
    urlopen(Request(f"{endpoint.url}/moto-api/reset", method="POST")).close()
    endpoint.requests.clear()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
