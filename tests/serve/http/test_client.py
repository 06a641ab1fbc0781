"""The official client, unchanged, against a server that listens."""

import asyncio
import base64
import io
import json
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from hyimg_cli.serve.online import _events


def png(size: tuple[int, int] = (16, 16), colour: Any = "red", mode: str = "RGB") -> bytes:
    data = io.BytesIO()
    Image.new(mode, size, colour).save(data, "PNG")
    return data.getvalue()


def decoded(data: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data or "")))


def test_the_model_is_listed(listening: Any) -> None:
    client = listening.openai()
    assert [one.id for one in client.models.list()] == ["tiny-image"]
    assert client.models.retrieve("tiny-image").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_pictures_are_generated(listening: Any) -> None:
    made = listening.openai().images.generate(
        model="tiny-image",
        prompt="a cat",
        n=2,
        size="auto",
        output_format="webp",
        quality="auto",
        user="somebody",
        extra_body={"seed": 7, "num_inference_steps": 2, "metadata": {"a": 1}, "top_k": None},
    )
    assert [one.seed for one in map(to_object, made.hyimg)] == [7, 8]
    assert made.size == "16x16"
    assert made.output_format == "webp"
    assert made.usage is not None
    assert [decoded(one.b64_json).format for one in made.data or ()] == ["WEBP", "WEBP"]
    assert {one.revised_prompt for one in made.data or ()} == {"a text"}


class to_object:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)


def test_a_seed_is_drawn_and_told(listening: Any) -> None:
    client = listening.openai()
    seeds = {client.images.generate(prompt="a cat").hyimg[0]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_result_by_its_url(listening: Any, http: httpx.Client) -> None:
    made = listening.openai().images.generate(prompt="a cat", response_format="url", n=2)
    for one in made.data or ():
        answer = http.get(one.url or "")
        assert answer.headers["content-type"] == "image/png"
        assert Image.open(io.BytesIO(answer.content)).size == (16, 16)
    assert http.get(f"{(made.data or [])[0].url}9").json()["error"]["code"] == "result.not-found"


def test_pictures_are_edited(listening: Any) -> None:
    client = listening.openai()
    one = client.images.edit(image=("a.png", png()), prompt="blue", extra_body={"seed": 3})
    assert one.hyimg[0]["seed"] == 3
    two = client.images.edit(
        image=[("a.png", png()), ("b.png", png(colour="green"))],
        prompt="both",
        extra_body={"num_inference_steps": 2, "bot_task": "none", "metadata": {"sku": "A17"}},
    )
    assert decoded((two.data or [])[0].b64_json).format == "PNG"
    mask = png(mode="RGBA", colour=(0, 0, 0, 0))
    assert client.images.edit(image=png(), mask=mask, prompt="here").data


def test_edits_by_json(listening: Any, http: httpx.Client) -> None:
    data = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    file = listening.openai().files.create(file=("a.png", png()), purpose="vision")
    for given in (data, {"image_url": data}, {"image_url": {"url": data}}, {"file_id": file.id}):
        body = {"prompt": "blue", "images": [given], "seed": 5}
        answer = http.post("/v1/images/edits", json=body)
        assert answer.status_code == 200, answer.text
    # The pictures are equal, and so are the requests.
    assert listening.service.drawn["blue"] == 1


def test_a_stream_has_an_event_for_each_picture(
    listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = listening.openai()
    with client.images.generate(prompt="a cat", n=2, stream=True) as stream:
        events = list(stream)
    assert [one.type for one in events] == ["image_generation.completed"] * 2
    assert decoded(events[0].b64_json).size == (16, 16)
    with client.images.edit(image=png(), prompt="blue", stream=True) as edits:
        assert [one.type for one in edits] == ["image_edit.completed"]
    monkeypatch.setattr("hyimg_cli.serve.online.HEARTBEAT_S", 0.02)
    listening.service.hold.clear()
    url = f"{listening.url}/v1/images/generations"
    with httpx.stream("POST", url, json={"prompt": "slow", "stream": True}) as raw:
        lines = raw.iter_lines()
        assert next(lines) == ": at work"
        listening.service.hold.set()
        rest = [line for line in lines if line and line != ": at work"]
    assert rest[0] == "event: image_generation.completed"
    assert json.loads(rest[1].removeprefix("data: "))["created_at"] > 0


def test_one_job_that_fails_is_its_requests_error(listening: Any) -> None:
    client = listening.openai(max_retries=2)
    with pytest.raises(openai.InternalServerError) as caught:
        client.images.edit(image=png(), prompt="fail", n=2)
    assert caught.value.code == "job.fake"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "told to: ('image 1',)" in caught.value.message
    assert str(listening.state) not in caught.value.message
    # The other one was drawn, and is there.
    assert len(caught.value.response.json()["data"]) == 1
    assert listening.service.drawn["fail"] == 2
    with pytest.raises(openai.APIError) as in_stream:
        list(client.images.generate(prompt="crash", stream=True))
    assert in_stream.value.code == "job.internal"


def test_a_batch_is_drawn(listening: Any) -> None:
    client = listening.openai()
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/images/generations", "body": body}
        for name, body in (
            ("a", {"prompt": "a cat", "model": "tiny-image"}),
            ("b", {"prompt": "b"}),
        )
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    found = [
        json.loads(line)
        for line in client.files.content(batch.output_file_id or "").text.splitlines()
    ]
    assert [one["custom_id"] for one in found] == ["a", "b"]
    body = found[0]["response"]["body"]
    assert decoded(body["data"][0]["b64_json"]).size == (16, 16)
    metrics = httpx.get(f"{listening.url}/metrics").text
    assert 'hyimg_pictures_total{origin="batch",status="done"} 2.0' in metrics
    assert 'hyimg_batches{status="completed"} 1.0' in metrics


def test_a_stream_tells_of_pictures_that_end_while_another_is_encoded() -> None:
    ended = {"a": {}}

    def body(base: str, names: list[str], *, is_event: bool) -> dict[str, Any]:
        assert is_event
        ended["b"] = {}  # the last one
        return {"created": 1, "data": [{"b64_json": names[0]}]}

    drawing: Any = SimpleNamespace(
        news=asyncio.Event(),
        entries=ended,
        error=None,
        body=body,
        work=SimpleNamespace(done=lambda: "b" in ended),
    )

    async def read() -> list[bytes]:
        return [event async for event in _events(drawing, "image_generation.completed", "")]

    assert [b'"a"' in one or b'"b"' in one for one in asyncio.run(read())] == [True, True]
