"""What a server refuses: each refusal has type, code and param, and nothing is opened for it."""

import base64
import io
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import until
from PIL import Image
from starlette.testclient import TestClient

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"


def as_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png(size: tuple[int, int] = (16, 16), mode: str = "RGB", colour: Any = 0) -> bytes:
    data = io.BytesIO()
    Image.new(mode, size, colour).save(data, "PNG")
    return data.getvalue()


PICTURE = as_url(png())


@pytest.fixture
def client(make_server: Callable[..., Any], client_of: Callable[..., TestClient]) -> TestClient:
    return client_of(make_server())


def refused(answer: Any, status: int, code: str, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "manifest.missing-field", "prompt"),
        ({"prompt": 1}, 400, "manifest.wrong-type", "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        ({"prompt": "a", "model": ["tiny-image"]}, 404, "model_not_found", "model"),
        ({"prompt": "a", "n": 11}, 400, "manifest.out-of-range", "n"),
        ({"prompt": "a", "n": 0}, 400, "manifest.out-of-range", "n"),
        ({"prompt": "a", "n": "two"}, 400, "manifest.wrong-type", "n"),
        ({"prompt": "a", "n": 1.5}, 400, "manifest.wrong-type", "n"),
        ({"prompt": "a", "n": 11.0}, 400, "manifest.out-of-range", "n"),
        ({"prompt": "a", "n": "1000.0"}, 400, "manifest.out-of-range", "n"),
        ({"prompt": "a", "steps": "many"}, 400, "manifest.wrong-type", "steps"),
        (
            {"prompt": "a", "num_inference_steps": 101.0},
            400,
            "manifest.out-of-range",
            "num_inference_steps",
        ),
        ({"prompt": "a", "steps": 101}, 400, "manifest.out-of-range", "steps"),
        ({"prompt": "a", "sede": 1}, 400, "manifest.unknown-field", "sede"),
        ({"prompt": "a", "quality": "best"}, 400, "manifest.openai-envelope", "quality"),
        ({"prompt": "a", "background": "red"}, 400, "manifest.openai-envelope", "background"),
        ({"prompt": "a", "partial_images": 4}, 400, "manifest.openai-envelope", "partial_images"),
        ({"prompt": "a", "lossless": True}, 400, "manifest.unconsumed", "lossless"),
        (
            {"prompt": "a", "output_format": "jpeg", "output_compression": 101},
            400,
            "manifest.out-of-range",
            "output_compression",
        ),
        ({"prompt": "a", "response_format": "gif"}, 400, "manifest.bad-value", "response_format"),
        ({"prompt": "a", "output_format": "gif"}, 400, "manifest.bad-value", "output_format"),
        ({"prompt": "a", "stream": "yes"}, 400, "manifest.wrong-type", "stream"),
        ({"prompt": "a", "images": [PICTURE]}, 400, "manifest.conflict", "images"),
        ({"prompt": "a", "mask": PICTURE}, 400, "manifest.conflict", "mask"),
    ],
)
def test_a_field_that_is_wrong(
    client: TestClient, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = client.post(GENERATE, json=body)
    refused(answer, status, code, param)
    if param in ("n", "steps", "num_inference_steps"):
        most = 10 if param == "n" else 100
        assert f"(this server allows 1 to {most})" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("custom_id", "mine"),
        ("image_path", "/etc/hostname"),
        ("input_reference", "/etc/hostname"),
        ("camera", "../../poses.npy"),
        ("lora", "/tmp/a.safetensors"),
        ("name", "../{custom_id}"),
        ("matrix", {"seed": [1, 2]}),
        ("seeds", [1, 2]),
        ("written", {}),
        ("num_frames", 5),
    ],
)
def test_what_could_name_something_of_the_server(
    client: TestClient, field: str, value: Any
) -> None:
    refused(
        client.post(GENERATE, json={"prompt": "a", field: value}),
        400,
        "manifest.refused-field",
        field,
    )


@pytest.mark.parametrize(
    "place",
    [
        "/etc/hostname",
        "../../etc/hostname",
        "file:///etc/hostname",
        "http://127.0.0.1:9/a.png",
        "s3://b/a.png",
        "AAAA",
        {"image_url": "https://example.org/a.png"},
        {"image_url": {"url": "/etc/hostname"}},
        {"path": "/etc/hostname"},
        7,
    ],
)
def test_no_path_and_no_address_is_read(client: TestClient, place: Any) -> None:
    for name, body in (
        ("images", {"images": [place]}),
        ("image", {"image": place}),
        ("mask", {"images": [PICTURE], "mask": place}),
    ):
        answer = client.post(EDIT, json={"prompt": "a"} | body)
        refused(answer, 400, "manifest.not-served", name)
    if isinstance(place, str):
        for alpha in ("", "transparent:", "opaque:"):
            body = {"prompt": "a", "images": [PICTURE], "region": f"{alpha}{place}"}
            refused(client.post(EDIT, json=body), 400, "manifest.bad-value", "region")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"images": [{"file_id": "file-0"}]}, "file.not-found", "images"),
        ({"images": ["data:image/png;base64,?"]}, "manifest.bad-value", "images"),
        ({"images": ["data:image/png;base64,AAAAA"]}, "manifest.bad-value", "images"),
        ({"images": ["data:text/plain,hello"]}, "source.not-an-image", "images"),
        ({"images": ["file-0"]}, "file.not-found", "images"),
        ({"images": [as_url(b"no picture")]}, "source.not-an-image", "images"),
        ({"images": [as_url(png((5001, 5001), "1"))]}, "source.too-large", "images"),
        ({"images": [PICTURE] * 4}, "manifest.too-many-images", "images"),
        ({"images": [PICTURE], "image": PICTURE}, "manifest.duplicate-field", "image"),
        ({}, "manifest.missing-field", "images"),
        ({"images": [PICTURE], "mask": PICTURE}, "source.region", "mask"),
        ({"images": [PICTURE], "mask": as_url(png((8, 6), "RGBA"))}, "source.region", "mask"),
        (
            {"images": [PICTURE], "mask": as_url(png(mode="RGBA", colour=(0, 0, 0, 255)))},
            "source.region",
            "mask",
        ),
        (
            {"images": [PICTURE], "mask": PICTURE, "region": [0, 0, 4, 4]},
            "manifest.conflict",
            "mask",
        ),
        ({"images": [PICTURE], "region": [0, 0, 40, 4]}, "manifest.region", "region"),
    ],
)
def test_a_picture_that_is_wrong(
    client: TestClient, body: dict[str, Any], code: str, param: str | None
) -> None:
    status = 404 if code == "file.not-found" else 400
    refused(client.post(EDIT, json={"prompt": "a"} | body), status, code, param)


def test_bodies_and_routes(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), 404, "route.not-found", None)
    refused(client.get("/"), 404, "route.not-found", None)
    for path in (GENERATE.removeprefix("/v1"), f"/{GENERATE}", f"/v1{GENERATE}"):
        answer = client.post(f"http://127.0.0.1{path}", json={"prompt": "a"})
        refused(answer, 404, "route.not-found", None)
        assert f"(the address is {GENERATE}: set the client's base URL" in answer.text
    assert "the address is" not in client.get("/v1/nothing").text
    refused(client.get(GENERATE), 405, "route.method", None)
    refused(client.delete("/v1/models"), 405, "route.method", None)
    for path, methods in (("/v1/files", "GET, HEAD, POST"), ("/v1/files/x", "DELETE, GET, HEAD")):
        answer = client.put(path)
        refused(answer, 405, "route.method", None)
        assert answer.headers["allow"] == methods
    for data, code in ((b"{", "request.bad-json"), (b"[]", "request.not-an-object")):
        refused(client.post(GENERATE, content=data), 400, code, None)
    packed = client.post(GENERATE, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    refused(packed, 415, "request.bad", None)
    assert "the JSON is compressed (gzip)" in packed.text
    nameless = client.post(EDIT, data={"prompt": "a"}, files=[("image", (None, png()))])
    refused(nameless, 400, "request.bad-form", "image")
    assert "image is a file without a name" in nameless.text
    refused(client.post(GENERATE, content=b'{"prompt": NaN}'), 400, "request.bad-json", None)
    head = {"content-type": "multipart/form-data; boundary=x"}
    refused(client.post(EDIT, content=b"--x\r\nno", headers=head), 400, "request.bad-form", None)
    files = [("image[]", ("a.png", png())) for _ in range(5)]
    answer = client.post(EDIT, data={"prompt": "a"}, files=files)
    refused(answer, 413, "request.too-many-parts", "image[]")
    twice = [("file", ("a.png", png())), ("file", ("b.png", png()))]
    answer = client.post(EDIT, data={"prompt": "a"}, files=twice)
    refused(answer, 400, "manifest.duplicate-field", "file")
    for name in ("size", "metadata[a]", "prompt[]", "file"):
        answer = client.post(EDIT, data={"user": "a"}, files=[(name, ("a.png", png()))])
        refused(answer, 400, "manifest.wrong-type", name.partition("[")[0])
    answer = client.post(EDIT, files=[("image", (None, "/etc/hostname"))])
    refused(answer, 400, "manifest.not-served", "image")


def test_messages_are_in_our_words(client: TestClient) -> None:
    batch = {"input_file_id": "a", "endpoint": GENERATE, "completion_window": "1"}
    content, purpose = ("file", ("a", b"x")), ("purpose", (None, "wonder"))
    text, batches = ("file", (None, "x")), ("purpose", (None, "batch"))
    for answer, said in (
        (client.post("/v1/files", files=[text, batches]), 'file is "x" (send it as a file of'),
        (client.post("/v1/files", files=[batches]), "file is missing"),
        (client.post("/v1/files", files=[content]), "purpose is missing"),
        (client.post("/v1/files", files=[content, purpose]), 'purpose is "wonder" (expected \'b'),
        (client.get("/v1/files?limit=x"), 'limit is "x" (expected a valid integer)'),
        (client.get("/v1/files?limit=0"), 'limit is "0" (expected greater than'),
        (client.post("/v1/batches", json=batch), 'completion_window is "1" (expected a time'),
        (
            client.post("/v1/batches", json=batch | {"completion_window": "1h", "a": 1}),
            '"a" is not known',
        ),
        (client.post(GENERATE), "the body is not JSON (send a JSON object)"),
        (client.post(GENERATE, data={"prompt": "a"}), "(send a JSON object)"),
    ):
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400, message
        assert said in message


def test_a_body_that_is_too_large(http: Any) -> None:
    # Who goes on sending hears of it.
    refused(http.post(GENERATE, content=b" " * 60_000_000), 413, "request.too-large", None)


def test_bodies_that_come_at_once_are_bounded(
    listening: Any, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyimg_cli.serve.bodies.JSON_BYTES_AT_ONCE", 100_000)
    body = b'{"prompt": "a"' + b" " * 60_000 + b"}"
    assert http.post(GENERATE, content=body).status_code == 200
    with socket.create_connection(("127.0.0.1", listening.port)) as slow:
        head = f"POST {GENERATE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body[:-1])
        until(lambda: bodies_in_flight(listening) == len(body) - 1)
        answer = http.post(GENERATE, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "server.full")
        assert answer.headers["retry-after"] == "5"
    # The client that was slow has left: its bytes count no more.
    until(lambda: bodies_in_flight(listening) == 0)
    assert http.post(GENERATE, content=body).status_code == 200
    until(lambda: sum(one["status"] == 499 for one in listening.log) == 1)


def bodies_in_flight(listening: Any) -> int:
    return int(listening.server.online._bodies._now["JSON"])


def test_a_body_of_very_many_values_or_very_long_is_refused(client: TestClient) -> None:
    many = b'{"prompt": "a", "metadata": [' + b"[]," * 1_000_000 + b"1]}"
    refused(client.post(GENERATE, content=many), 400, "request.bad-json", None)
    nested = b'{"prompt": "a", "metadata": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"
    refused(client.post(GENERATE, content=nested), 400, "request.bad-json", None)
    long = {"prompt": "a" * 1_000_001}
    refused(client.post(GENERATE, json=long), 413, "request.too-large", None)


def test_the_host_is_this_machine(client: TestClient) -> None:
    for host, is_ours in (
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("localhost:8000", True),
        ("[::1]:8000", True),
        ("127.0.0.1", True),
    ):
        answer = client.get("/v1/models", headers={"host": host})
        if is_ours:
            assert answer.status_code == 200
        else:
            refused(answer, 421, "request.host", "Host")
    for origin in ("https://evil.example", "null", "http://[::1"):
        answer = client.post(GENERATE, json={"prompt": "a"}, headers={"origin": origin})
        refused(answer, 421, "request.host", "Origin")
    head = {"origin": "http://localhost:3000"}
    assert client.get("/v1/models", headers=head).status_code == 200


def test_a_key_is_asked_for_everywhere(
    make_server: Callable[..., Any], client_of: Callable[..., TestClient]
) -> None:
    running = make_server("alice secret-a\n# more\nbob secret-b\n")
    alice = client_of(running, "secret-a")
    paths = ("/metrics", "/v1/models", "/v1/files", "/v1/batches", "/nothing")
    for path in paths:
        for head in ({}, {"authorization": "Bearer secret"}, {"authorization": "Basic secret-a"}):
            plain = TestClient(running.server.app, base_url="http://127.0.0.1")
            answer = plain.get(path, headers=head)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["type"] == "authentication_error"
        assert alice.get(path).status_code == (404 if path == "/nothing" else 200)
    assert plain.get("/health").status_code == 200
    assert plain.get("/ready").status_code == 200
    # What is one key's is not there for another.
    body = {"prompt": "a cat", "seed": 1, "response_format": "url"}
    made = alice.post(GENERATE, json=body).json()
    url = made["data"][0]["url"]
    assert alice.get(url).status_code == 200
    bob = {"authorization": "Bearer secret-b"}
    assert plain.get(url, headers=bob).json()["error"]["code"] == "result.not-found"
    # Nor does an equal request of another key share its drawing.
    assert plain.post(GENERATE, json=body, headers=bob).json()["data"][0]["url"] != url
    assert running.service.drawn["a cat"] == 2
    assert [one["key"] for one in running.log if one["route"] == GENERATE] == ["alice", "bob"]


def test_nothing_of_a_prompt_is_told(
    make_server: Callable[..., Any], client_of: Callable[..., TestClient]
) -> None:
    running = make_server()
    client = client_of(running)
    client.post(GENERATE, json={"prompt": "a secret cat", "user": "me"})
    client.get("/v1/files/file-secret")
    client.post(GENERATE, json={"prompt": "x"}, headers={"x-stainless-retry-count": "1"})
    text = client.get("/metrics").text
    assert 'hyimg_pictures_total{origin="online",status="done"} 2.0' in text
    assert 'hyimg_picture_seconds_count{origin="online",phase="denoise_rest"} 2.0' in text
    assert f'hyimg_http_requests_total{{route="{GENERATE}",status="200"}} 2.0' in text
    assert 'route="/v1/files/{file_id}",status="404"' in text
    for line in (
        'hyimg_pictures_at_work{stage="think"} 2.0',
        'hyimg_pictures_waiting{origin="online"} 0.0',
        "hyimg_retries_total 1.0",
        "hyimg_ready 1.0",
    ):
        assert line in text
    assert "secret" not in text + str(running.log)
    first = running.log[0]
    assert first.keys() == {
        *("time", "key", "method", "route", "status", "bytes", "seconds", "request_id")
    }
    assert first["status"] == 200
    assert first["bytes"] > 100


def test_a_mask_becomes_a_region(
    make_server: Callable[..., Any], client_of: Callable[..., TestClient], tmp_path: Path
) -> None:
    running = make_server()
    client_of(running)
    mask = Image.new("RGBA", (16, 16), (9, 9, 9, 255))
    mask.paste((9, 9, 9, 0), (4, 4, 12, 8))
    data = io.BytesIO()
    mask.save(data, "PNG")
    body = {"prompt": "a", "image": PICTURE, "mask": as_url(data.getvalue())}
    wire = running.server.online._wire
    line = wire.line_of(EDIT, body, "local")
    assert (line["keep_outside"], line["region_mode"], line["n"]) == (True, "auto", 1)
    assert "size" not in line
    written = wire.line_of(GENERATE, {"prompt": "a", "n": "2.0"}, "local")["n"]
    assert (written, type(written)) == (2, int)
    # The result has its image's size, whatever other size a client sends.
    for size, ignored in (
        ("1024x1024", {"size": "1024x1024"}),
        ("16:9", {"size": "16:9"}),
        ("16x16", None),
        ("auto", None),
        ("big", None),
    ):
        sized = wire.line_of(EDIT, body | {"size": size}, "local")
        assert (sized.get("x_ignored"), "size" in sized) == (ignored, ignored is None), size
    region = Image.open(line["region"])
    assert (region.mode, region.getbbox(), region.getpixel((4, 4))) == ("L", (4, 4, 12, 8), 255)
    assert {Path(path).parent for path in (*line["images"], line["region"])} == {
        running.state / "uploads"
    }


def test_the_document_names_every_route_and_field(
    client: TestClient, make_server: Callable[..., Any]
) -> None:
    told = client.get("/openapi.json").json()
    assert told["openapi"] == "3.1.0"
    paths = told["paths"]
    assert {GENERATE, EDIT, "/v1/files/{file_id}/content", "/v1/models/{model}"} <= paths.keys()
    asked = paths[GENERATE]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = asked["properties"].keys()
    assert {"prompt", "n", "seed", "steps", "output_format", "stream"} <= fields
    assert not fields & {"lora", "images", "image_path", "custom_id", "name", "seeds", "matrix"}
    for one in paths.values():
        for operation in one.values():
            assert {"4XX", "5XX"} <= operation["responses"].keys()
