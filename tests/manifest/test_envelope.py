"""The OpenAI batch envelope is the line that its body is, or a fault that says why not."""

import json
from io import StringIO
from typing import Any

import pytest

from hyimg_cli.manifest.manifest import Manifest, read_manifest

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
            wrapped(PICTURES, prompt="x", model="m", quality="auto", user="me", seed=3, n=None),
            {"task": "t2i", "prompt": "x", "model": "m", "seed": 3, "x_user": "me"},
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


@pytest.mark.parametrize(
    ("envelope", "what"),
    [
        (wrapped("/v1/images/edit", prompt="x"), '"/v1/images/edit" is not an endpoint'),
        (wrapped("/v1/chat/completions", prompt="x"), "is not an endpoint for pictures or videos"),
        (wrapped(EDITS, prompt="x") | {"method": "GET"}, 'method is "GET"'),
        ({"url": EDITS, "body": "x"}, 'body is "x"'),
        ({"url": EDITS}, "body is null"),
        ({"body": {"prompt": "x"}}, "null is not an endpoint"),
        (
            wrapped(EDITS, prompt="x", task="t2i"),
            'the endpoint is for it2i, but the body has task "t2i"',
        ),
        (
            wrapped(VIDEOS, prompt="x", task="t2i"),
            "the endpoint is for t2v and i2v, but the body has task",
        ),
        (wrapped(EDITS, prompt="x", custom_id="b"), "custom_id is given twice"),
        (
            wrapped(PICTURES, prompt="x", quality="high"),
            'quality is "high", which hyimg does not support',
        ),
        (wrapped(PICTURES, prompt="x", stream=0), "stream is 0"),
        (wrapped(EDITS, prompt="x", image="a.png", mask="m.png"), "mask is not read"),
        (wrapped(VIDEOS, prompt="x", seconds="4"), "seconds is not read"),
    ],
)
def test_a_wrong_envelope_says_why(envelope: dict[str, Any], what: str) -> None:
    manifest = read(envelope)
    (fault,) = manifest.faults
    assert fault.code == "manifest.openai-envelope"
    assert what in fault.what
    assert fault.hint
    assert manifest.bad_ids == {1: envelope.get("custom_id", "stdin-0001")}


@pytest.mark.parametrize(
    ("envelope", "code", "where"),
    [
        (wrapped(PICTURES, promt="x"), "unknown-field", "stdin:1: promt"),
        (wrapped(PICTURES, prompt="x") | {"boddy": 1}, "unknown-field", "stdin:1: boddy"),
        (wrapped(EDITS, prompt="x"), "missing-field", "stdin:1: images"),
        (wrapped(EDITS, prompt="x", image={"file_id": "f"}), "wrong-type", "stdin:1: image"),
        (
            wrapped(EDITS, prompt="x", image="data:image/png;base64,AA"),
            "bad-value",
            "stdin:1: image",
        ),
        (
            wrapped(VIDEOS, prompt="x", task="t2v", image="a.png"),
            "foreign-field",
            "stdin:1: images",
        ),
        (wrapped(VIDEOS, prompt="x", task="i2v"), "missing-field", "stdin:1: images"),
        (
            wrapped(VIDEOS, prompt="x", images=["a.png"], input_reference="b.png"),
            "duplicate-field",
            "stdin:1: image_path",
        ),
    ],
)
def test_what_is_wrong_in_the_body_is_a_fault_of_its_field(
    envelope: dict[str, Any], code: str, where: str
) -> None:
    found = {(fault.code.removeprefix("manifest."), fault.where) for fault in read(envelope).faults}
    assert (code, where) in found


def test_two_envelopes_may_not_share_an_id() -> None:
    faults = read(wrapped(PICTURES, prompt="x"), wrapped(PICTURES, prompt="y")).faults
    assert [fault.code for fault in faults] == ["manifest.duplicate-id"]
