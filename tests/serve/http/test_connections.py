"""Connections without requests: bounded in time and number, refused in words, and counted."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fake_service import until

from hyimg_cli.serve import bodies, connections

HALF = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-a: "
WHOLE = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, make_server: Any) -> Iterator[Any]:
    """A server with 16 requests and 18 connections at most."""
    monkeypatch.setattr(connections, "MOST_REQUESTS", 16)
    running = make_server()
    with running.listening():
        yield running


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(running: Any, held: ExitStack, data: bytes = b"") -> socket.socket:
    one = held.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=10))
    one.sendall(data)
    return one


def answer(one: socket.socket) -> tuple[bytes, Any]:
    """The status line, and the error of the body, once the server has closed the connection."""
    data = b""
    while piece := one.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)["error"] if body else head


def refusals(running: Any, status: int) -> float:
    text = httpx.get(f"{running.url}/metrics").text
    counted = f'hyimg_http_requests_total{{route="other",status="{status}"}} '
    return sum(float(one.removeprefix(counted)) for one in text.splitlines() if counted in one)


def test_many_half_open_connections_keep_nobody_out(few: Any, held: ExitStack) -> None:
    half = [connect(few, held, HALF) for _ in range(50)]
    assert httpx.get(f"{few.url}/health", timeout=5).status_code == 200
    assert httpx.get(f"{few.url}/v1/models", timeout=5).status_code == 200
    # The oldest have ended, in words.
    status, error = answer(half[0])
    assert status.startswith(b"HTTP/1.1 503")
    assert (error["code"], error["type"]) == ("server.full", "server_error")
    assert refusals(few, 503) >= 50 - 18
    until(lambda: few.log[-1]["route"] == "/metrics")


@pytest.mark.parametrize("sent", [HALF, HALF[:3], WHOLE + HALF, b"POST /v1/files HTTP/1.1\r\n"])
def test_half_a_request_ends_in_time(
    listening: Any, held: ExitStack, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    one = connect(listening, held, sent)
    if sent.startswith(WHOLE):
        assert one.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: b'"data"' in one.recv(65536))
    status, error = answer(one)
    assert status.startswith(b"HTTP/1.1 408")
    assert (error["code"], error["message"]) == (
        "request.timeout",
        "the request did not arrive within 0 s",
    )
    assert refusals(listening, 408) == 1


def test_a_connection_without_a_byte_is_closed_without_a_word(
    listening: Any, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    assert connect(listening, held).recv(10) == b""


def test_bytes_that_trickle_do_not_extend_the_time(
    listening: Any, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    one, sent = connect(listening, held, HALF), 0
    one.settimeout(0.05)

    def is_closed() -> bool:
        nonlocal sent
        try:
            one.sendall(b"a")
            sent += 1
            return one.recv(1) in (b"", b"H")
        except TimeoutError:
            return False
        except OSError:
            return True

    until(is_closed, 5)
    assert sent > 2


def test_a_body_that_pauses_ends_in_time(
    listening: Any, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.3)
    for kind in ("application/json", "multipart/form-data; boundary=x"):
        head = (
            f"POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
        )
        one = connect(listening, held, f"{head}content-length: 90\r\n\r\n--x".encode())
        status, error = answer(one)
        assert status.startswith(b"HTTP/1.1 408")
        assert error["message"] == "the body did not arrive within 0 s"
    assert listening.log[-1]["status"] == 408


def test_more_requests_than_the_limit_are_refused_but_not_health(few: Any, held: ExitStack) -> None:
    few.service.hold.clear()
    body = b'{"prompt": "a"}'
    head = f"POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
    for _ in range(16):
        connect(few, held, f"{head}\r\n\r\n".encode() + body)
    until(lambda: few.server._at_work == 16)
    refused = httpx.get(f"{few.url}/v1/models", timeout=5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server.full")
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["connection"] == "close"
    for _ in range(3):
        assert httpx.get(f"{few.url}/health", timeout=5).status_code == 200
    few.service.hold.set()
    until(lambda: few.server._at_work == 0)
    assert httpx.get(f"{few.url}/v1/models", timeout=5).status_code == 200


def test_few_files_mean_few_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, before[1]))
        assert connections.most_requests() == 200
        connections.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_full_file_table_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connections.hear_of_accept_errors(loop)
        for error in (OSError(24, "Too many open files"), OSError(24, "Too many open files")):
            loop.call_exception_handler({"message": "accept", "exception": error})
        loop.call_exception_handler({"message": "other", "exception": OSError(5, "broken")})

    asyncio.run(run())
    assert [one.levelname for one in caplog.records] == ["ERROR", "ERROR"]
    assert "Too many open files" in caplog.records[0].message
    assert "other" in caplog.records[1].message
