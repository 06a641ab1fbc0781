"""The OpenAI batch envelope is the line that its body is, or a fault that says why not."""

import json
from io import StringIO
from typing import Any

import pytest

from hyimg_cli.manifest.ids import child_ids
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.settings.kinds import is_custom_id

EDITS, PICTURES, VIDEOS = "/v1/images/edits", "/v1/images/generations", "/v1/videos"


def read(*entries: dict[str, Any]) -> Manifest:
    return read_manifest("-", StringIO("\n".join(json.dumps(entry) for entry in entries)))


def wrapped(url: str, /, **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


@pytest.mark.parametrize(
    ("envelope", "plain"),
    [
        (
            wrapped(EDITS, prompt="x", image="a.png", size="1024x1024", n=2),
            {"task": "it2i", "prompt": "x", "image": "a.png", "size": "1024x1024", "n": 2},
        ),
        (
            wrapped(EDITS, prompt="x", images=[{"image_url": "a.png"}, "b.png"]),
            {"task": "it2i", "prompt": "x", "images": ["a.png", "b.png"]},
        ),
        (
            wrapped(EDITS, prompt="x", image={"image_url": {"url": "a.png"}}),
            {"task": "it2i", "prompt": "x", "image": "a.png"},
        ),
        (
            wrapped(EDITS, prompt="x", image="a.png", mask={"image_url": "m.png"}),
            {
                "task": "it2i",
                "prompt": "x",
                "image": "a.png",
                "keep_outside": True,
                "region": "transparent:m.png",
                "region_mode": "auto",
            },
        ),
        (
            wrapped(PICTURES, prompt="x", model="m", quality="auto", user="me", seed=3, n=None),
            {"task": "t2i", "prompt": "x", "model": "m", "seed": 3, "x_user": "me"},
        ),
        (
            wrapped(PICTURES, prompt="x", quality="hd", style="natural", background="opaque"),
            {
                "task": "t2i",
                "prompt": "x",
                "x_ignored": {"quality": "hd", "style": "natural"},
            },
        ),
        (
            wrapped(PICTURES, prompt="x", quality="standard", size="", user="", negative_prompt=""),
            {"task": "t2i", "prompt": "x", "negative_prompt": ""},
        ),
        (
            wrapped(VIDEOS, prompt="x", num_frames=9, fps=8) | {"x_sku": 4},
            {"task": "t2v", "prompt": "x", "num_frames": 9, "fps": 8, "x_sku": 4},
        ),
        (
            wrapped(VIDEOS, prompt="x", input_reference={"image_url": "a.png"}),
            {"task": "i2v", "prompt": "x", "images": ["a.png"]},
        ),
        (
            wrapped(VIDEOS, prompt="x", task="i2v", images=["a.png", "b.png"]),
            {"task": "i2v", "prompt": "x", "images": ["a.png", "b.png"]},
        ),
        (
            wrapped(VIDEOS, prompt="x", image="a.png", num_frames=9),
            {"task": "i2v", "prompt": "x", "image": "a.png", "num_frames": 9},
        ),
        (
            wrapped(PICTURES, prompt="x", output_format="jpeg", output_compression=80),
            {"task": "t2i", "prompt": "x", "format": "jpeg", "quality": 80},
        ),
        (
            {"url": PICTURES, "body": {"task": "t2i", "prompt": "x", "stream": False}},
            {"task": "t2i", "prompt": "x"},
        ),
    ],
)
def test_an_envelope_is_the_line_in_it(envelope: dict[str, Any], plain: dict[str, Any]) -> None:
    own = {key: envelope[key] for key in ("custom_id",) if key in envelope}
    (found,), (expected,) = read(envelope).lines, read(own | plain).lines
    assert (found.fields, found.extra_json) == (expected.fields, expected.extra_json)
    assert found.given == expected.given


def test_a_wrong_envelope_is_recorded_under_its_custom_id() -> None:
    assert read(wrapped("/v1/images/edit", prompt="x")).bad_ids == {1: "a"}
    assert read({"url": EDITS}).bad_ids == {1: "stdin-0001"}


@pytest.mark.parametrize(
    "text",
    [
        "Order 12: cat.jpg",
        "req:1",
        "job#1",
        "a|b",
        "a@b.c",
        "тест",
        "a" * 129,
        "../../etc",
        ".x",
        "猫",
    ],
)
def test_a_request_may_have_any_custom_id(text: str) -> None:
    (line,) = read(wrapped(PICTURES, prompt="x") | {"custom_id": text}).lines
    assert is_custom_id(line.fields["custom_id"])
    assert json.loads(line.extra_json) == {"x_custom_id": text}
    assert read({"custom_id": text, "prompt": "x"}).faults  # names a file: not any text


def test_requests_keep_ids_that_can_name_a_job() -> None:
    (line,) = read(wrapped(PICTURES, prompt="x") | {"custom_id": "shop/Cat.1"}).lines
    assert (line.fields["custom_id"], line.extra_json) == ("shop/Cat.1", "{}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"custom_id": "A"}, {"custom_id": "a"}),
        ({"custom_id": "cat", "n": 2}, {"custom_id": "cat-0"}),
        ({"custom_id": "cat-1"}, {"custom_id": "cat", "seeds": [5, 6]}),
        ({"custom_id": "a b"}, {"custom_id": "a:b"}),
        ({"custom_id": "cat"}, {"custom_id": "cat.mask"}),
        ({"custom_id": "cat.redraw"}, {"custom_id": "cat"}),
    ],
)
def test_requests_never_share_an_id_or_a_file(first: Any, second: Any) -> None:
    entries = [
        wrapped(PICTURES, prompt="x", **{name: one[name] for name in one if name != "custom_id"})
        | {"custom_id": one["custom_id"]}
        for one in (first, second)
    ]
    found = read(*entries)
    ids = [name.lower() for line in found.lines for name in child_ids(line.fields)]
    stems = [name.removesuffix(".mask").removesuffix(".redraw") for name in ids]
    assert not found.faults
    assert len(set(stems)) == len(ids) >= 2
    assert json.loads(found.lines[1].extra_json) == {"x_custom_id": second["custom_id"]}
    assert read(*entries).lines == found.lines  # the same again, so that it can be resumed


def test_the_jobs_of_a_request_with_a_matrix_carry_its_custom_id() -> None:
    request = wrapped(PICTURES, prompt="x", matrix={"seed": [1, 2]}) | {"custom_id": "a b"}
    lines = read(request).lines
    assert [json.loads(line.extra_json) for line in lines] == [{"x_custom_id": "a b"}] * 2
    assert len({line.fields["custom_id"] for line in lines}) == 2


def test_a_request_with_the_custom_id_of_a_line_is_a_fault() -> None:
    plain = {"custom_id": "a", "prompt": "x"}
    assert [one.where for one in read(plain, wrapped(PICTURES, prompt="x")).faults] == ["stdin:2"]


def test_what_asks_for_nothing_else_is_taken() -> None:
    entry = wrapped(PICTURES, prompt="x") | {"method": "post", "priority": None, "x_shop": 1}
    assert not read(entry).faults
