"""Requests that wait, share a drawing, leave, are too many, or meet a server that stops."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_service import until

from hyimg_cli.errors import MachineError
from hyimg_cli.serve.app import HttpServer

GENERATE = "/v1/images/generations"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def test_equal_requests_share_a_drawing(listening: Any, pool: Any) -> None:
    listening.service.hold.clear()

    def post(body: dict[str, Any], **head: str) -> httpx.Response:
        return httpx.post(f"{listening.url}{GENERATE}", json=body, headers=head, timeout=20)

    equal = {"prompt": "equal", "seed": 1}
    asked = [pool.submit(post, equal) for _ in range(3)]
    asked += [pool.submit(post, {"prompt": "keyed"}, **{"idempotency-key": "k"}) for _ in range(3)]
    alone = [pool.submit(post, {"prompt": "alone"}) for _ in range(2)]
    until(lambda: len(listening.service.sessions) == 4)
    other = post({"prompt": "other"}, **{"idempotency-key": "k"})
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "request.idempotency-key"
    listening.service.hold.set()
    answers = [one.result().json() for one in asked]
    assert all(answer == answers[0] for answer in answers[:3])
    assert all(answer == answers[3] for answer in answers[3:])
    assert all(one.result().status_code == 200 for one in alone)
    # Behind the drawing, too.
    assert post(equal).json() == answers[0]
    assert listening.service.drawn == {"equal": 1, "keyed": 1, "alone": 2}


def test_what_failed_is_tried_again(listening: Any, http: httpx.Client) -> None:
    for _ in range(2):
        answer = http.post(GENERATE, json={"prompt": "crash", "seed": 1})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "job.internal"
    assert listening.service.drawn["crash"] == 2
    # A key of a request that failed is free, for the same body and for another.
    head = {"idempotency-key": "once"}
    for prompt, status in (("crash", 500), ("crash", 500), ("a cat", 200)):
        answer = http.post(GENERATE, json={"prompt": prompt}, headers=head)
        assert answer.status_code == status, answer.text
    assert listening.service.drawn["crash"] == 4


def begin(running: Any, body: str, **head: str) -> socket.socket:
    """A request whose answer is not read."""
    lines = [f"POST {GENERATE} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in head.items()]
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    return connection


def test_who_leaves_drops_its_job_and_no_other(listening: Any) -> None:
    service = listening.service
    service.hold.clear()
    body = '{"prompt": "one", "seed": 1%s}'
    first, second = begin(listening, body % ""), begin(listening, body % "")
    stream = begin(listening, body % ', "stream": true, "n": 2')
    until(lambda: len(service.sessions) == 2)
    until(lambda: len(listening.server.online._runs) == 2)
    stream.close()
    until(lambda: service.dropped == 1)
    first.close()
    time.sleep(0.1)
    assert service.dropped == 1  # another waits for the same
    second.close()
    until(lambda: service.dropped == 2)
    until(lambda: not list((listening.state / "online").iterdir()))
    assert not listening.server.online._runs
    assert 499 in [one["status"] for one in listening.log]


def test_a_call_that_timed_out_is_drawn_once(listening: Any, pool: Any) -> None:
    listening.service.hold.clear()
    client = listening.openai(timeout=0.4, max_retries=5)
    call = pool.submit(client.images.generate, prompt="slow", extra_body={"seed": 1})
    until(lambda: len([one for one in listening.log if one["status"] == 499]) >= 2)
    listening.service.hold.set()
    assert call.result().data
    assert listening.service.drawn["slow"] == 1
    assert listening.service.dropped == 0


def test_too_many_wait(make_server: Callable[..., Any], pool: Any) -> None:
    running = make_server(max_waiting=2)
    with running.listening():
        running.service.gate.clear()
        client = running.openai(max_retries=8)
        calls = [pool.submit(client.images.generate, prompt="a cat") for _ in range(2)]
        until(lambda: running.server.online.waiting.total() == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            running.openai(max_retries=0, timeout=5).images.generate(prompt="one more")
        assert caught.value.code == "server.full"
        assert caught.value.response.headers["retry-after"] == "1"  # two at four a second
        assert caught.value.response.json()["error"]["type"] == "rate_limit_error"
        calls += [pool.submit(client.images.generate, prompt="a cat") for _ in range(3)]
        until(lambda: sum(one["status"] == 429 for one in running.log) >= 3)
        running.service.gate.set()
        assert all(call.result().data for call in calls)
        assert running.server.online.waiting.total() == 0


def test_results_end_with_their_time(
    listening: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = listening.state / "online"
    http.post(GENERATE, json={"prompt": "a cat"})
    until(lambda: not list(folder.iterdir()))
    monkeypatch.setattr("hyimg_cli.serve.online.KEEP_S", 0.1)
    http.post(GENERATE, json={"prompt": "a cat", "seed": 1})
    assert list(folder.iterdir())
    until(lambda: not list(folder.iterdir()))
    until(lambda: not listening.server.online._runs)


def test_kept_results_have_a_size_limit(
    listening: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyimg_cli.serve.online.MOST_KEPT_BYTES", 1)
    urls = []
    for seed in (1, 2):
        body = {"prompt": "a cat", "seed": seed, "response_format": "url"}
        urls.append(http.post(GENERATE, json=body).json()["data"][0]["url"])
        assert http.get(urls[-1]).status_code == 200
    assert http.get(urls[0]).json()["error"]["code"] == "result.not-found"


def test_one_key_cannot_fill_the_queue(make_server: Callable[..., Any], pool: Any) -> None:
    running = make_server("ann key-a\nbob key-b\n", max_waiting=4)
    with running.listening():
        running.service.gate.clear()

        def post(key: str, count: int = 1, timeout: float = 20) -> httpx.Response:
            head = {"authorization": f"Bearer {key}"}
            body = {"prompt": "a cat", "n": count}
            return httpx.post(f"{running.url}{GENERATE}", json=body, headers=head, timeout=timeout)

        calls = [pool.submit(post, "key-a") for _ in range(2)]
        until(lambda: running.server.online.waiting["ann"] == 2)
        refused = post("key-a", timeout=5)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server.full")
        # Within bob's own share, and still too many for the queue.
        assert post("key-b", 3, timeout=5).status_code == 429
        calls.append(pool.submit(post, "key-b", 2))
        until(lambda: running.server.online.waiting == {"ann": 2, "bob": 2})
        assert post("key-b", timeout=5).status_code == 429
        running.service.gate.set()
        assert [call.result().status_code for call in calls] == [200] * 3


def test_a_stop_answers_what_waits(make_server: Callable[..., Any], pool: Any) -> None:
    running = make_server(grace=10.0)
    with running.listening() as server:
        running.service.hold.clear()
        call = pool.submit(running.openai().images.generate, prompt="a cat")
        until(lambda: running.service.sessions)
        server.handle_exit(15, None)
        ready = httpx.get(f"{running.url}/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "server.stopping")
        new = httpx.post(f"{running.url}{GENERATE}", json={"prompt": "new"})
        assert (new.status_code, new.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"{running.url}/health").status_code == 200
        running.service.hold.set()
        assert call.result().data
        until(lambda: not running.thread.is_alive())
    assert running.server.fault is None


def test_a_stop_waits_no_longer_than_its_grace(make_server: Callable[..., Any], pool: Any) -> None:
    running = make_server(grace=0.1)
    with running.listening() as server:
        running.service.hold.clear()
        url = f"{running.url}{GENERATE}"
        call = pool.submit(httpx.post, url, json={"prompt": "a cat"}, timeout=20)
        until(lambda: running.service.sessions)
        server.handle_exit(15, None)
        assert call.result().status_code == 503
        assert call.result().json()["error"]["code"] == "server.stopping"
        until(lambda: not running.thread.is_alive())


def test_while_it_loads_nothing_is_taken(make_server: Callable[..., Any]) -> None:
    running = make_server()
    loaded = threading.Event()
    running.service.start = loaded.wait  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        http = HttpServer(running.server)
        thread = threading.Thread(target=lambda: http.run(sockets=[listener]))
        thread.start()
        until(lambda: http.started)
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").json()["error"]["code"] == "server.loading"
        posted = httpx.post(f"{url}{GENERATE}", json={"prompt": "a"})
        assert posted.status_code == 503
        assert httpx.get(f"{url}/metrics").text.count("hyimg_ready 0.0") == 1
        running.server.is_stopping = True
        loaded.set()
        thread.join(20)
        assert not thread.is_alive()


def test_a_fault_of_the_machine_ends_it(make_server: Callable[..., Any]) -> None:
    running = make_server()
    with running.listening():
        running.service.fault = MachineError("the GPU failed", code="machine.gpu")
        until(lambda: not running.thread.is_alive())
    assert running.server.fault is running.service.fault


def test_a_model_that_does_not_load_ends_it(make_server: Callable[..., Any]) -> None:
    running, fault = make_server(), MachineError("it is too large", code="machine.memory")

    def start() -> None:
        raise fault

    running.service.start = start
    with socket.create_server(("127.0.0.1", 0)) as listener:
        HttpServer(running.server).run(sockets=[listener])
    assert running.server.fault is fault
