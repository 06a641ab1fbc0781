"""Files and batches by the official client, unchanged."""

import base64
import io
import json
from typing import Any

import openai
import pytest
from PIL import Image

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


def png(mode: str = "RGB", colour: Any = "red") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (32, 32), colour).save(file, "PNG")
    return file.getvalue()


def begin(client: openai.OpenAI, url: str, *bodies: Any, **more: Any) -> Any:
    rows = [
        json.dumps({"custom_id": f"r-{n}", "method": "POST", "url": url, "body": body})
        for n, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", **more
    )


def wait(client: openai.OpenAI, batch: Any) -> Any:
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        batch = client.batches.retrieve(batch.id)
    return batch


def lines(client: openai.OpenAI, name: str | None) -> list[Any]:
    return [json.loads(line) for line in client.files.content(name or "").text.splitlines()]


def test_files(listening: Any) -> None:
    client = listening.openai()
    policy = {"anchor": "created_at", "seconds": 3600}
    made = [
        client.files.create(file=(f"{n}.png", png()), purpose="vision", expires_after=policy)
        for n in range(5)
    ]
    one = made[2]
    assert client.files.wait_for_processing(one.id) == client.files.retrieve(one.id) == one
    assert (one.bytes, one.filename, one.status) == (len(png()), "2.png", "processed")
    assert one.expires_at == one.created_at + 3600
    # The client follows the pages.
    assert [*client.files.list(limit=2, order="asc", purpose="vision")] == made
    assert client.files.content(one.id).read() == png()
    assert client.files.delete(one.id).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.retrieve(one.id)
    assert (gone.value.code, gone.value.param) == ("file.not-found", "file_id")
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=b"x", purpose="fine-tune")
    assert (refused.value.param, refused.value.type) == ("purpose", "invalid_request_error")


def test_batches(listening: Any) -> None:
    client = listening.openai()
    made = [begin(client, GENERATIONS, {"prompt": "a cat"}, metadata={"n": str(n)}) for n in "abc"]
    made = [wait(client, one) for one in made]
    assert [one.status for one in made] == ["completed"] * 3
    assert [*client.batches.list(limit=2)] == made[::-1]
    assert [one.metadata for one in made] == [{"n": n} for n in "abc"]
    counts = made[0].request_counts
    assert (counts.total, counts.completed, counts.failed) == (1, 1, 0)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(made[0].id)


def test_a_batch_of_edits(listening: Any) -> None:
    client = listening.openai()
    data = f"data:image/png;base64,{base64.b64encode(png(colour='blue')).decode()}"
    file = client.files.create(file=("a.png", png()), purpose="vision")
    mask = base64.b64encode(png("RGBA", (0, 0, 0, 0))).decode()
    batch = begin(
        client,
        EDITS,
        {"prompt": "by id", "images": [{"file_id": file.id}], "seed": 3, "n": 2},
        {"prompt": "by data", "images": [{"image_url": data}, {"file_id": file.id}], "user": "u"},
        {"prompt": "a mask", "images": [data], "mask": f"data:image/png;base64,{mask}"},
        {"prompt": "fail", "images": [data], "n": 2},
    )
    batch = wait(client, batch)
    assert batch.status == "completed", batch.errors
    found = lines(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == ["r-0", "r-1", "r-2"]
    two = found[0]["response"]["body"]
    assert two["hyimg"][0]["seed"] == 3
    assert len(two["data"]) == 2
    picture = Image.open(io.BytesIO(base64.b64decode(two["data"][0]["b64_json"])))
    assert picture.getpixel((0, 0)) == (3, 3, 3)
    (lost,) = lines(client, batch.error_file_id)
    body = lost["response"]["body"]
    assert (lost["response"]["status_code"], body["error"]["code"]) == (500, "job.fake")
    assert str(listening.state) not in body["error"]["message"]
    assert "image 1" in body["error"]["message"]
    assert len(body["data"]) == 1  # the other one was drawn


def test_faults_are_told_by_line(listening: Any) -> None:
    client = listening.openai()
    batch = begin(
        client,
        GENERATIONS,
        {"prompt": "fine"},
        {"prompt": "x", "model": "dall-e-3"},
        {"prompt": "x", "lora": "/etc/hostname"},
        {"prompt": "x", "n": 11},
        {"size": "16x16"},
    )
    batch = wait(client, batch)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [(one.line, one.param, one.code) for one in batch.errors.data] == [
        (2, "model", "model_not_found"),
        (3, "lora", "manifest.refused-field"),
        (4, "n", "manifest.out-of-range"),
        (5, "prompt", "manifest.missing-field"),
    ]
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


def test_a_batch_is_cancelled(listening: Any) -> None:
    client = listening.openai()
    listening.service.hold.clear()
    batch = begin(client, GENERATIONS, *[{"prompt": f"cat {n}"} for n in range(4)])
    while not listening.service.drawn:
        pass
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    never = lines(client, batch.error_file_id)
    assert [one["error"]["code"] for one in never] == ["batch_cancelled"] * 4


def test_the_same_key_is_the_same_batch(listening: Any) -> None:
    client = listening.openai()
    file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    asked: Any = {"input_file_id": file.id, "endpoint": GENERATIONS, "completion_window": "24h"}
    head = {"idempotency-key": "night"}
    first, again = (client.batches.create(**asked, extra_headers=head) for _ in range(2))
    assert first.id == again.id
    with pytest.raises(openai.UnprocessableEntityError) as other:
        client.batches.create(**asked | {"metadata": {"a": "b"}}, extra_headers=head)
    assert other.value.code == "batch.other-body"
    assert len([*client.batches.list()]) == 1
