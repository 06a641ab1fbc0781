"""What clients send: fields and pictures in the spellings of other programs."""

import base64
import io
import typing
from collections.abc import Callable
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from openai.types.image_edit_params import ImageEditParamsBase
from openai.types.image_generate_params import ImageGenerateParamsBase
from PIL import Image
from starlette.testclient import TestClient

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"


def png(mode: str = "RGB", colour: Any = 0) -> bytes:
    data = io.BytesIO()
    Image.new(mode, (16, 16), colour).save(data, "PNG")
    return data.getvalue()


RED, GREEN = png(colour="red"), png(colour="green")
OPTIONS = ("background", "moderation", "quality", "style", "response_format", "input_fidelity")


@pytest.fixture
def running(make_server: Callable[..., Any]) -> Any:
    return make_server()


@pytest.fixture
def client(running: Any, client_of: Callable[..., TestClient]) -> TestClient:
    return client_of(running)


def warnings(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json()["hyimg"][0]["warnings"]
    return found


def of_client(name: str) -> list[str]:
    """The values that the official client knows for a field."""
    own = ImageEditParamsBase if name == "input_fidelity" else ImageGenerateParamsBase
    (literal,) = (
        one
        for one in typing.get_args(typing.get_type_hints(own)[name])
        if typing.get_origin(one) is typing.Literal
    )
    return [*typing.get_args(literal)]


def test_every_value_of_the_official_client_is_taken(client: TestClient) -> None:
    usual = {"auto", "standard", "opaque", "url", "b64_json"}
    found = {}
    for name in OPTIONS:
        for value in of_client(name):
            answer = client.post(GENERATE, json={"prompt": "a", name: value})
            found[name, value] = warnings(answer)
            if value in usual or (name, value) in (
                ("moderation", "low"),
                ("input_fidelity", "high"),
            ):
                assert found[name, value] == [], (name, value)
            else:
                assert found[name, value] == [f'{name} "{value}" has no effect']
    assert found["quality", "hd"]
    assert found["background", "transparent"]


NOTHING_ELSE: list[tuple[dict[str, Any], list[str]]] = [
    ({"output_compression": 100}, []),
    ({"output_compression": 100, "output_format": "png"}, []),
    ({"output_compression": "50"}, ["output_compression 50 has no effect"]),
    ({"output_compression": 50, "output_format": "webp"}, []),
    ({"partial_images": 2}, ["partial_images 2 has no effect"]),
    ({"partial_images": "0", "stream": "false"}, []),
    ({"negative_prompt": ""}, []),
    ({"seed": -1}, []),
    (dict.fromkeys(("quality", "size", "response_format", "background", "style"), ""), []),
    (dict.fromkeys(("user", "n", "seed", "mask", "image", "model"), ""), []),
    ({"safety_identifier": "me", "x_note": ""}, []),
]


def test_what_asks_for_nothing_else_is_taken(client: TestClient) -> None:
    for fields, expected in NOTHING_ELSE:
        answer = client.post(GENERATE, json={"prompt": "a"} | fields)
        assert warnings(answer) == expected, fields


def test_numbers_may_be_texts(client: TestClient) -> None:
    body = {"prompt": "7", "n": "2", "seed": "5", "num_inference_steps": "3", "size": "16x16"}
    answer = client.post(GENERATE, json=body)
    assert [one["seed"] for one in answer.json()["hyimg"]] == [5, 6]
    assert [one["notes"] for one in answer.json()["hyimg"]] == [["a note"]] * 2
    answer = client.post(GENERATE, json={"prompt": "a", "stream": "true"})
    assert answer.headers["content-type"].startswith("text/event-stream")


def in_lines(data: bytes) -> str:
    return base64.encodebytes(data).decode().replace("\n", "\r\n")


PLAIN = base64.b64encode(RED).decode()
URLS = [
    f"data:image/png;base64,{PLAIN}",
    f"data:image/png;charset=utf-8;base64,{PLAIN}",
    f"DATA:IMAGE/PNG;BASE64,{PLAIN}",
    f"data:;base64,{PLAIN}",
    f"data:application/octet-stream;name=a.png;base64,{PLAIN}",
    f"data:image/jpg;base64,{in_lines(RED)}",
    f"data:image/png;base64,{base64.urlsafe_b64encode(RED).decode().rstrip('=')}",
    f"data:image/png;base64,{quote_from_bytes(base64.b64encode(RED), safe='')}",
    f"data:image/png;base64, {PLAIN}\n",
    f"data:image/png,{quote_from_bytes(RED)}",
]


def test_a_data_url_in_every_spelling(running: Any, client: TestClient) -> None:
    for url in URLS:
        line = running.server.online._wire.line_of(EDIT, {"prompt": "a", "image": url}, "local")
        with open(line["images"][0], "rb") as file:
            assert file.read() == RED, url


def test_objects_around_a_picture_and_ids_of_files(running: Any, client: TestClient) -> None:
    upload = {"file": ("a.png", RED)}
    for purpose in ("vision", "user_data", "assistants"):
        file = client.post("/v1/files", files=upload, data={"purpose": purpose}).json()["id"]
    spellings = [
        file,
        {"file_id": file},
        {"type": "input_image", "file_id": file},
        {"type": "input_image", "image_url": URLS[0], "detail": "high"},
        {"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}},
        {"url": URLS[0]},
    ]
    lines = [
        running.server.online._wire.line_of(EDIT, {"prompt": "a", name: given}, "local")
        for one in spellings
        for name, given in (("image", one), ("images", [one]), ("images", one))
    ]
    assert all(line == lines[0] for line in lines)
    mask = png(mode="RGBA", colour=(0, 0, 0, 0))
    file = client.post("/v1/files", files={"file": mask}, data={"purpose": "vision"}).json()["id"]
    body = {"prompt": "a", "image": URLS[0], "mask": file}
    assert client.post(EDIT, json=body).status_code == 200


FORMS = [
    (["image"], "r"),
    (["image[]", "image[]"], "rg"),
    (["image", "image"], "rg"),
    (["image[0]", "image[1]"], "rg"),
    (["image[1]", "image[0]"], "gr"),
    (["image", "image[]"], "rg"),
    (["images", "images"], "rg"),
    (["images[]"], "r"),
]


def test_pictures_of_a_form(running: Any, client: TestClient) -> None:
    asked = list[Any]()
    running.server.online._wire.uploads.checked = lambda path: asked.append(path) or path
    for names, order in FORMS:
        asked.clear()
        files = [(name, ("a.png", data)) for name, data in zip(names, (RED, GREEN), strict=False)]
        files.append(("mask", ("", b"")))  # a browser's field without a file
        answer = client.post(EDIT, data={"prompt": "a", "n": "1"}, files=files)
        assert answer.status_code == 200, answer.text
        assert ["r" if path.read_bytes() == RED else "g" for path in asked] == [*order], names


def test_a_mask_may_be_written_as_a_list(client: TestClient) -> None:
    mask = ("m.png", png(mode="RGBA", colour=(0, 0, 0, 0)))
    for name in ("mask", "mask[]", "mask[0]"):
        files = [("image[]", ("a.png", RED)), (name, mask)]
        assert client.post(EDIT, data={"prompt": "a"}, files=files).status_code == 200, name
    answer = client.post(EDIT, data={"prompt": "a"}, files=[*files, ("mask", mask)])
    assert answer.json()["error"]["message"] == "2 masks; a request has one"
    answer = client.post(EDIT, data={"prompt": "a"}, files=[("image[a]", mask[1])])
    assert "Upload(" not in answer.text
