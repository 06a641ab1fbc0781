"""Browsers: pages of batches after one login, and web pages of other sites that are allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import Running
from starlette.testclient import TestClient

from hyimg_cli.cli.serve import _origin
from hyimg_cli.errors import UsageError

GENERATE = "/v1/images/generations"
PAGE = {"accept": "text/html,*/*"}
Make = Callable[..., Running]
ClientOf = Callable[..., TestClient]


@pytest.fixture
def running(make_server: Make) -> Running:
    return make_server("ann secret-a\nbob secret-b\n")


def batch_of(running: Running, key: str) -> str:
    """The path of a page of a key's batch."""
    headers = {"authorization": f"Bearer {key}"}
    client = TestClient(running.server.app, base_url="http://127.0.0.1", headers=headers)
    line = f'{{"custom_id": "a", "url": "{GENERATE}", "body": {{"prompt": "a cat"}}}}'
    file = client.post("/v1/files", files={"file": line}, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": GENERATE, "completion_window": "24h"}
    name = client.post("/v1/batches", json=asked).json()["id"]
    while client.get(f"/v1/batches/{name}").json()["status"] != "completed":
        pass
    page = running.state / "batches" / name / "run" / "report.html"
    page.write_text("<p>the page")
    return f"/batches/{name}/"


def browser_of(running: Running, base: str = "http://127.0.0.1") -> TestClient:
    return TestClient(running.server.app, base_url=base, headers=PAGE, follow_redirects=False)


def test_a_page_asks_for_the_key_once(running: Running, client_of: ClientOf) -> None:
    client_of(running)
    own, others = batch_of(running, "secret-a"), batch_of(running, "secret-b")
    browser = browser_of(running)
    asked = browser.get(own)
    assert asked.status_code == 401
    assert asked.headers["content-type"].startswith("text/html")
    assert 'type="password"' in asked.text
    assert "frame-ancestors 'none'" in asked.headers["content-security-policy"]
    for wrong in ("", "secret", "secret-a " * 1000):
        answer = browser.post(own, data={"key": wrong})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    answer = browser.post(own, data={"key": "secret-a"})
    assert (answer.status_code, answer.headers["location"]) == (303, own)
    cookie = answer.headers["set-cookie"].lower()
    assert {"httponly", "samesite=strict", "path=/"} <= {*cookie.split("; ")}
    assert "secure" not in cookie
    assert "secret" not in cookie
    assert browser.get(own).text == "<p>the page"
    assert browser.get(f"{own}outputs/a.png").headers["content-type"] == "image/png"
    assert browser.get(others).json()["error"]["code"] == "batch.not-found"
    assert "secret" not in str(running.log)


def test_the_cookie_reads_pages_only(
    running: Running, client_of: ClientOf, make_server: Make
) -> None:
    client_of(running)
    own = batch_of(running, "secret-a")
    browser = browser_of(running, "https://pictures.example")
    answer = browser.post(
        own, data={"key": "secret-a"}, headers={"origin": "https://pictures.example"}
    )
    assert "secure" in answer.headers["set-cookie"].lower()
    for method, path in (
        ("GET", "/v1/batches"),
        ("GET", "/v1/files"),
        ("POST", GENERATE),
        ("POST", f"/v1{own}cancel"),
        ("GET", "/metrics"),
    ):
        assert browser.request(method, path).status_code == 401, path
    # Signed: another name, a later end or another signature is not let in.
    name, until, signature = browser.cookies["hyimg_pages"].strip('"').split(":")
    good = f"{name}:{until}:{signature}"
    for cookie in (
        f"bob:{until}:{signature}",
        f"{name}:{int(until) + 1}:{signature}",
        f"{name}:{until}:{signature[:-1]}",
        f"{name}:{until}:é",
        f"nobody:{until}:{signature}",
        f"{name}:1:{signature}",
        f"{name}::",
        "",
    ):
        plain = TestClient(running.server.app, base_url="http://127.0.0.1")
        head = {"cookie": f"hyimg_pages={cookie}".encode()}
        assert plain.get(own, headers=head).status_code == 401, cookie
    assert plain.get(own, headers={"cookie": f"hyimg_pages={good}"}).status_code == 200
    # It outlives the server, and ends with its key.
    running.server.uploads.close()
    for keys, status in (("ann secret-a", 200), ("ann other-key", 401), ("bob secret-a", 401)):
        again = make_server(f"{keys}\n")
        plain = TestClient(again.server.app, base_url="http://127.0.0.1")
        head = {"cookie": f"hyimg_pages={good}"}
        assert plain.get(own, headers=head).status_code == status, keys
        again.server.uploads.close()
    secret = Path(running.state, "login-secret")
    assert secret.stat().st_mode & 0o077 == 0


def test_a_cookie_whose_time_is_over_opens_nothing(
    running: Running, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed by this server, for a key that is still known."""
    client_of(running)
    own = batch_of(running, "secret-a")
    for seconds, status in ((60, 200), (-1, 401)):
        monkeypatch.setattr("hyimg_cli.serve.login._LASTS_S", seconds)
        answer = browser_of(running).post(own, data={"key": "secret-a"})
        head = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
        assert browser_of(running).get(own, headers=head).status_code == status


def test_a_result_is_for_the_key_that_drew_it(running: Running, client_of: ClientOf) -> None:
    client_of(running)
    body = {"prompt": "a cat", "response_format": "url", "seed": 1}
    clients = [
        TestClient(
            running.server.app,
            base_url="http://127.0.0.1",
            headers={"authorization": f"Bearer {key}"},
        )
        for key in ("secret-a", "secret-b")
    ]
    url = clients[0].post(GENERATE, json=body).json()["data"][0]["url"]
    assert [client.get(url).status_code for client in clients] == [200, 404]


def test_a_form_of_another_site_and_other_clients(running: Running, client_of: ClientOf) -> None:
    client_of(running)
    browser, own = browser_of(running), "/batches/batch_1/"
    head = {"sec-fetch-site": "cross-site"}
    assert browser.post(own, data={"key": "secret-a"}, headers=head).status_code == 403
    # Programs get the error that they can read.
    plain = browser.get(own, headers={"accept": "*/*"})
    assert (plain.status_code, plain.json()["error"]["code"]) == (401, "invalid_api_key")
    assert browser.get("/v1/batches").json()["error"]["code"] == "invalid_api_key"


def test_a_page_without_its_slash(running: Running, client_of: ClientOf) -> None:
    client = client_of(running, "secret-a")
    path = batch_of(running, "secret-a")
    answer = client.get(path[:-1], follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (308, path.split("/")[2] + "/")
    assert client.get(path[:-1]).text == "<p>the page"
    assert client.get("/batches/batch_none").status_code == 404


def test_with_keys_any_host_and_origin_is_right(running: Running, client_of: ClientOf) -> None:
    client = client_of(running, "secret-a")
    for head in ({"origin": "https://pictures.example"}, {"host": "pictures.example"}):
        assert client.post(GENERATE, json={"prompt": "a"}, headers=head).status_code == 200
    plain = TestClient(running.server.app, base_url="http://127.0.0.1")
    assert plain.post(GENERATE, json={"prompt": "a"}, headers=head).status_code == 401


@pytest.mark.parametrize("keys", ["", "ann secret-a\n"])
def test_web_pages_of_an_allowed_origin(make_server: Make, client_of: ClientOf, keys: str) -> None:
    origin = "https://pictures.example"
    client = client_of(make_server(keys, origins=[origin]), "secret-a")
    ask = {"origin": origin, "access-control-request-method": "POST"}
    ask |= {"access-control-request-headers": "authorization, content-type, x-stainless-lang"}
    plain = TestClient(client.app, base_url="http://127.0.0.1")
    preflight = plain.options(GENERATE, headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    answer = client.post(GENERATE, json={"prompt": "a"}, headers={"origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    # Errors can be read, too.
    answer = plain.post(GENERATE, json={"prompt": 1}, headers={"origin": origin})
    assert answer.status_code == (401 if keys else 400)
    assert answer.headers["access-control-allow-origin"] == origin
    other = client.post(GENERATE, json={"prompt": "a"}, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert other.status_code == (200 if keys else 421)
    without = TestClient(make_server_app(make_server, keys, client), base_url="http://127.0.0.1")
    assert without.options(GENERATE, headers=ask).status_code in (401, 405, 421)


def make_server_app(make_server: Make, keys: str, client: Any) -> Any:
    """A server like the client's without an allowed origin."""
    client.app.__self__.uploads.close()
    return make_server(keys).server.app


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("https://a.example", "https://a.example"),
        ("HTTPS://A.example/", "https://a.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("https://a.example:443", "https://a.example"),
        ("*", None),
        ("a.example", None),
        ("https://*.example", None),
        ("https://a.example/page", None),
        ("https://a.example:x", None),
        ("null", None),
        ("", None),
    ],
)
def test_an_origin_is_written_as_browsers_do(text: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(UsageError, match="origin of a web page"):
            _origin(text, has_keys=False)
    else:
        assert _origin(text, has_keys=False) == found
    assert _origin("*", has_keys=True) == "*"


def test_the_model_has_other_names(make_server: Make, client_of: ClientOf) -> None:
    client = client_of(make_server(names=["gpt-image-1", "dall-e-3"]))
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == [
        "gpt-image-1",
        "dall-e-3",
    ]
    for name in ("gpt-image-1", "dall-e-3", "tiny-image"):
        assert client.get(f"/v1/models/{name}").json()["id"] == name
        assert client.post(GENERATE, json={"prompt": "a", "model": name}).status_code == 200
    refused = client.post(GENERATE, json={"prompt": "a", "model": "dall-e-2"})
    assert refused.status_code == 404
    assert "gpt-image-1" in refused.json()["error"]["message"]
