"""Every fault of a manifest is found, at its place and all at once; nothing in a file raises."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.manifest.manifest import Manifest, failed_lines, in_line_order, read_manifest
from hyimg_cli.spec.job import SizeRequest

WriteManifest = Callable[..., Path]


def read(text: str | bytes) -> Manifest:
    """A manifest read from standard input."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return read_manifest("-", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def line(**fields: Any) -> str:
    return json.dumps({"prompt": "a cat"} | fields) + "\n"


def found(manifest: Manifest) -> set[tuple[str, str]]:
    """Code and place of each fault, without the prefixes that all share."""
    return {(f.code.removeprefix("manifest."), f.where) for f in manifest.faults}


def only_fault(**fields: Any) -> HyimgError:
    manifest = read(line(**fields))
    assert len(manifest.faults) == 1, [str(f) for f in manifest.faults]
    assert not manifest.lines
    return manifest.faults[0]


def fields_of(**fields: Any) -> dict[str, Any]:
    manifest = read(line(**fields))
    assert not manifest.faults, [str(f) for f in manifest.faults]
    return manifest.lines[0].fields


def test_a_full_line_comes_back_typed(write_manifest: WriteManifest) -> None:
    path = write_manifest(
        {
            "custom_id": "cat-001",
            "task": "it2i",
            "prompt": "make the scarf red",
            "images": ["in/cat.png"],
            "seed": 42,
            "size": "1024x768",
            "num_inference_steps": 50,
            "guidance_scale": 3,
            "bot_task": "think_recaption",
            "metadata": {"sku": "A17"},
            "x_shelf": 3,
        }
    )
    manifest = read_manifest(path)
    assert not manifest.faults
    assert (manifest.name, manifest.title, manifest.folder) == ("jobs", "jobs.jsonl", path.parent)
    (only,) = manifest.lines
    assert (only.line_number, only.where, only.extra_json) == (1, "jobs.jsonl:1", '{"x_shelf": 3}')
    assert only.fields == {
        "custom_id": "cat-001",
        "task": "it2i",
        "prompt": "make the scarf red",
        "images": ("in/cat.png",),
        "seed": 42,
        "size": SizeRequest(height=768, width=1024),
        "num_inference_steps": 50,
        "guidance_scale": 3.0,
        "bot_task": "think_recaption",
        "metadata": '{"sku": "A17"}',
    }


def test_id_and_task_are_filled_in_but_not_given() -> None:
    (plain, edit) = read(line() + "\n" + line(image="a.png")).lines
    assert (plain.fields["custom_id"], plain.fields["task"]) == ("stdin-0001", "t2i")
    assert (edit.fields["custom_id"], edit.fields["task"]) == ("stdin-0003", "it2i")
    assert plain.given == {"prompt"}
    assert edit.given == {"prompt", "images"}


@pytest.mark.parametrize(
    ("alias", "name", "value", "typed"),
    [
        ("id", "custom_id", "a", "a"),
        ("request_id", "custom_id", "a", "a"),
        ("image", "images", "a.png", ("a.png",)),
        ("image_path", "images", ["a.png", "b.png"], ("a.png", "b.png")),
        ("num_outputs_per_prompt", "n", 3, 3),
        ("steps", "num_inference_steps", 7, 7),
    ],
)
def test_aliases(alias: str, name: str, value: Any, typed: Any) -> None:
    fields = fields_of(**{alias: value})
    assert fields[name] == typed
    assert alias not in fields


@pytest.mark.parametrize("alias", ["image", "auto"])
def test_bot_task_image_is_none(alias: str) -> None:
    assert fields_of(bot_task=alias)["bot_task"] == "none"


@pytest.mark.parametrize(
    ("size", "height", "width"),
    [
        ("auto", 0, 0),
        ("1024x768", 768, 1024),
        ("640X480", 480, 640),
        ("16:9", 9, 16),
        ("1:16", 16, 1),
    ],
)
def test_sizes(size: str, height: int, width: int) -> None:
    assert fields_of(size=size)["size"] == SizeRequest(height=height, width=width)


@pytest.mark.parametrize("key", ["strength", "denoising_strength", "upscale", "enable_hr"])
def test_what_others_can_is_answered_by_name(key: str) -> None:
    fault = only_fault(**{key: 0.5})
    assert f'"{key}" is not supported' in fault.what


@pytest.mark.parametrize(
    ("value", "meant"),
    [("768x1280", '"1280x768"'), ("16:9", '"16:9"'), ("auto", '"auto"'), (5, "WIDTHxHEIGHT")],
)
def test_the_official_scripts_size_gets_a_hint(value: Any, meant: str) -> None:
    fault = only_fault(image_size=value)
    assert (fault.code, fault.where) == ("manifest.unknown-field", "stdin:1: image_size")
    assert meant in fault.hint
    assert "height first" in fault.hint


def test_width_and_height_become_size() -> None:
    fields = fields_of(width=640, height=480)
    assert fields["size"] == SizeRequest(height=480, width=640)
    assert not {"width", "height"} & fields.keys()


@pytest.mark.parametrize(
    "size",
    [
        "",
        "big",
        "12x512",
        "512x9000",
        "16x512",
        "1:17",
        "0:1",
        "512",
        "512x",
        "-1x5",
        "٣x٣",
        " auto",
    ],
)
def test_bad_sizes(size: str) -> None:
    assert only_fault(size=size).where == "stdin:1: size"


@pytest.mark.parametrize(
    ("fields", "code", "place"),
    [
        ({"sede": 1}, "unknown-field", "sede"),
        ({"messages": [{"role": "user", "content": "a"}]}, "unknown-field", "messages"),
        ({"prompt": "  "}, "empty-text", "prompt"),
        ({"prompt": "a\0b"}, "empty-text", "prompt"),
        ({"prompt": 5}, "wrong-type", "prompt"),
        ({"seed": True}, "wrong-type", "seed"),
        ({"seed": 1.5}, "wrong-type", "seed"),
        ({"seed": "1"}, "wrong-type", "seed"),
        ({"seed": None}, "wrong-type", "seed"),
        ({"seed": -1}, "out-of-range", "seed"),
        ({"seed": 2**63}, "out-of-range", "seed"),
        ({"num_inference_steps": 0}, "out-of-range", "num_inference_steps"),
        ({"steps": 1001}, "out-of-range", "steps"),
        ({"guidance_scale": "5"}, "wrong-type", "guidance_scale"),
        ({"guidance_scale": True}, "wrong-type", "guidance_scale"),
        ({"guidance_scale": -0.5}, "out-of-range", "guidance_scale"),
        ({"guidance_scale": 10**400}, "out-of-range", "guidance_scale"),
        ({"flow_shift": 0}, "out-of-range", "flow_shift"),
        ({"top_p": 0}, "out-of-range", "top_p"),
        ({"top_p": 1.01}, "out-of-range", "top_p"),
        ({"top_k": -1}, "out-of-range", "top_k"),
        ({"n": 0}, "out-of-range", "n"),
        ({"seeds": []}, "out-of-range", "seeds"),
        ({"seeds": 5}, "wrong-type", "seeds"),
        ({"seeds": [1, True]}, "wrong-type", "seeds"),
        ({"seeds": [1, 1]}, "bad-value", "seeds"),
        ({"seeds": [1, 2], "n": 2}, "conflict", "n"),
        ({"seeds": [1, 2], "seed": 2}, "conflict", "seed"),
        ({"bot_task": "thinking"}, "bad-value", "bot_task"),
        ({"use_system_prompt": "none"}, "bad-value", "use_system_prompt"),
        ({"drop_think": 1}, "wrong-type", "drop_think"),
        ({"metadata": {"a": [1e300 * 1e300]}}, "bad-json", ""),
        ({"images": ["a.png"] * 13}, "too-many-images", "images"),
        ({"images": [1]}, "wrong-type", "images"),
        ({"images": [""]}, "bad-value", "images"),
        ({"images": ["https://example.org/a.png"]}, "bad-value", "images"),
        ({"image": "a\0.png"}, "bad-value", "image"),
        ({"task": "it2i"}, "missing-field", "images"),
        ({"task": "it2i", "images": []}, "missing-field", "images"),
        ({"task": "t2i", "images": ["a.png"]}, "conflict", "images"),
        ({"task": "t2v", "images": ["a.png"]}, "foreign-field", "images"),
        ({"task": "t2v", "bot_task": "think"}, "foreign-field", "bot_task"),
        ({"task": "t2v", "temperature": 0}, "foreign-field", "temperature"),
        ({"task": "t2v", "cot_text": "a"}, "foreign-field", "cot_text"),
        ({"task": "t2v", "num_frames": 0}, "out-of-range", "num_frames"),
        ({"task": "t2v", "num_frames": 1000000}, "out-of-range", "num_frames"),
        ({"task": "t2v", "num_frames": 9.5}, "wrong-type", "num_frames"),
        ({"task": "t2v", "fps": 0}, "out-of-range", "fps"),
        ({"task": "t2v", "negative_prompt": 1}, "wrong-type", "negative_prompt"),
        ({"task": "t2i", "guidance_scale_2": 3}, "foreign-field", "guidance_scale_2"),
        ({"task": "edit"}, "bad-value", "task"),
        ({"image": "a.png", "images": ["a.png"]}, "duplicate-field", "images"),
        ({"steps": 5, "num_inference_steps": 5}, "duplicate-field", "num_inference_steps"),
        ({"width": 512}, "conflict", "width"),
        ({"height": 512}, "conflict", "height"),
        ({"width": 512, "height": 512, "size": "auto"}, "conflict", "size"),
        ({"width": 16, "height": 512}, "out-of-range", "width"),
        ({"num_frames": 16}, "foreign-field", "num_frames"),
        ({"fps": 8}, "foreign-field", "fps"),
        ({"cot_text": "a", "cot_token_ids": [1]}, "conflict", "cot_text"),
        ({"cot_text": "a", "temperature": 0.5}, "unconsumed", "temperature"),
        ({"cot_text": "a", "bot_task": "think"}, "unconsumed", "bot_task"),
        ({"cot_token_ids": [1, 2], "ar_seed": 5}, "unconsumed", "ar_seed"),
        ({"bot_task": "none", "top_k": 5}, "unconsumed", "top_k"),
        ({"bot_task": "image", "max_new_tokens": 5}, "unconsumed", "max_new_tokens"),
        ({"bot_task": "none", "drop_think": True}, "unconsumed", "drop_think"),
        ({"bot_task": "recaption", "drop_think": True}, "unconsumed", "drop_think"),
        ({"temperature": 0, "top_k": 5}, "unconsumed", "top_k"),
        ({"temperature": 0.0, "top_p": 0.5}, "unconsumed", "top_p"),
        ({"temperature": 0, "ar_seed": 5}, "unconsumed", "ar_seed"),
        ({"use_system_prompt": "None", "system_prompt": "Be."}, "unconsumed", "system_prompt"),
        ({"use_system_prompt": "dynamic", "system_prompt": "Be."}, "unconsumed", "system_prompt"),
    ],
)
def test_one_fault_each(fields: dict[str, Any], code: str, place: str) -> None:
    fault = only_fault(**fields)
    assert fault.code == f"manifest.{code}"
    assert fault.where == (f"stdin:1: {place}" if place else "stdin:1")
    assert fault.hint
    assert fault.exit_code == 2


def test_frames_are_of_a_video_whose_task_may_have_been_forgotten() -> None:
    assert 'set "task": "t2v"' in only_fault(num_frames=5).hint


@pytest.mark.parametrize(
    "custom_id",
    [
        "../../x",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "./a",
        "a/.b",
        "a.frames/b",
        f"{'x' * 100}/{'y' * 28}",
        "a\\b",
        "x" * 129,
        "x" * 300,
        "a\0b",
        "",
        ".",
        "..",
        ".hidden",
        "a b",
        "é",
        "a\n",
        7,
    ],
)
def test_bad_ids(custom_id: Any) -> None:
    fault = only_fault(custom_id=custom_id)
    assert fault.where == "stdin:1: custom_id"
    assert "\n" not in fault.what
    assert "\0" not in fault.what


@pytest.mark.parametrize(
    "custom_id", ["a", "x" * 128, "-", "_a.B-9", "0", "a..b", "a/b", "-/_/c.d"]
)
def test_good_ids(custom_id: str) -> None:
    assert fields_of(custom_id=custom_id)["custom_id"] == custom_id


def test_a_missing_prompt_is_named() -> None:
    assert found(read('{"seed": 1}\n')) == {("missing-field", "stdin:1: prompt")}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{'a': 1}", "bad-json"),
        ('{"prompt": "a"', "bad-json"),
        ('{"prompt": "a", "seed": NaN}', "bad-json"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "bad-json"),
        ("[" * 100_000, "bad-json"),
        ('{"prompt": "\\ud800"}', "bad-json"),
        ('{"prompt": "a", "x_a": {"\\udc00": 1}}', "bad-json"),
        ('["a"]', "not-an-object"),
        ("null", "not-an-object"),
        ('"text"', "not-an-object"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', "duplicate-field"),
    ],
)
def test_lines_that_are_no_jobs(text: str, code: str) -> None:
    assert found(read(text + "\n" + line())) == {(code, "stdin:1")}


def test_a_control_character_is_told_by_its_column() -> None:
    (fault,) = read('{"prompt": "a\tb"}\n').faults
    assert fault.what == "not valid JSON: a tab or another control character at column 14"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("{'prompt': 'x'}", "single quotes at column 2", "double quotes"),
        ("{\"prompt\": 'x'}", "single quotes at column 12", "double quotes"),
        ("{“prompt”: “x”}", "curly quotes at column 2", "straight double quotes"),
        ('{"prompt": "x”}', "curly quotes at column 12", "straight double quotes"),
        ('{"prompt": "x",}', "a comma before the end at column", "remove the comma before }"),
        ('{"images": ["a",]}', "a comma before the end at column", "remove the comma before ]"),
        ('{"prompt": "x"},', "a comma after the object at column 16", "remove the comma"),
        ('{"a": True}', "True at column 7", "write true"),
        ('{"a": None}', "None at column 7", "remove the field"),
        ('{"a": nan}', "nan at column 7", "remove the field"),
        ('{"a": .5}', ".5 at column 7", "0.5"),
        ('{"images": "C:\\Users\\x"}', "a backslash that is not an escape", "forward slashes"),
        ('{"images": "C:\\users"}', "a backslash that is not an escape", "forward slashes"),
        ('{"prompt": "say "hi""}', "h after a value at column 18", 'write \\" for a quote'),
        ('{prompt: "x"}', "p instead of a name at column 2", "names in double quotes"),
        ('{"prompt": x}', "x instead of a value at column 12", "texts in double quotes"),
        ('{"prompt" "x"}', "after a name at column 11", "colon"),
        ('{"prompt": "x', "a text without an end at column 12", "close it"),
        ('{"prompt": "x"', "the end of the line at column 15", "close it with }"),
        ('{"prompt": "x"} {"prompt": "y"}', "more after the object at column 17", "per line"),
        ("# a comment", "a comment at column 1", "no comments"),
        ('{"prompt": "x"} // later', "a comment at column 17", "no comments"),
        ('{"guidance_scale": 1,5}', "a decimal comma at column 22", "with a point"),
        ('{"seed": 01}', "a number that begins with 0 at column", "without the 0"),
        ('{"seed": NaN}', "NaN is not a JSON number", "remove the field"),
        ("a red cat", "no object at column 1", "named .txt"),
    ],
)
def test_faults_of_json_are_named(text: str, what: str, hint: str) -> None:
    (fault,) = read(text + "\n" + line()).faults
    assert (fault.code, fault.where) == ("manifest.bad-json", "stdin:1")
    assert what in fault.what
    assert hint in fault.hint


def test_an_object_that_no_line_closes_is_not_of_several_lines() -> None:
    (fault,) = read('{"prompt": "x"').faults
    assert "the end of the line at column 15" in fault.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"prompt": "x",\n "seed": 1}', "a JSON object spans several lines"),
        ('{\n"prompt": "x"\n}\n{\n"prompt": "y"\n}', "a JSON object spans several lines"),
        ('[{"prompt": "x"},\n{"prompt": "y"}]', "the lines are a JSON list"),
        ('[\n{"prompt": "x"}\n]', "the lines are a JSON list"),
    ],
)
def test_json_over_several_lines_is_a_fault_of_the_file(text: str, what: str) -> None:
    (fault,) = read(text).faults
    assert (fault.code, fault.where, fault.what) == ("manifest.not-json-lines", "stdin", what)


def test_a_line_that_is_cut_off_leaves_the_others() -> None:
    manifest = read('{"prompt": "x"\n{"prompt": "y"}')
    assert (len(manifest.lines), len(manifest.faults)) == (1, 1)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("cfg", 4, "guidance_scale"),
        ("CFG Scale", 4, "guidance_scale"),
        ("true_cfg_scale", 4, "guidance_scale"),
        ("aspect_ratio", "16:9", '"size": "16:9"'),
        ("aspectRatio", "wide", '"size": "W:H"'),
        ("num_images", 2, '"n"'),
        ("init_image", "a.png", '"images"'),
    ],
)
def test_names_of_other_tools_lead_to_the_field(name: str, value: object, hint: str) -> None:
    assert hint in only_fault(**{name: value}).hint


@pytest.mark.parametrize("value", [4.0, 2.0**53])
def test_whole_numbers_may_have_a_decimal_point(value: float) -> None:
    assert fields_of(seed=value)["seed"] == int(value)
    assert type(fields_of(seed=value)["seed"]) is int
    assert fields_of(seeds=[1.0, value])["seeds"] == (1, int(value))


@pytest.mark.parametrize("value", [2.5, 2.0**53 + 2, 1e300])
def test_other_numbers_are_not_rounded(value: float) -> None:
    assert only_fault(seed=value).where == "stdin:1: seed"


def test_byte_order_marks_of_joined_files_are_left_out() -> None:
    manifest = read("\ufeff" + line() + "\n\ufeff" + line() + "\n")
    assert len(manifest.lines) == 2


def test_a_surrogate_pair_spelled_in_escapes_is_one_character() -> None:
    (only,) = read('{"prompt": "\\ud83d\\ude00"}').lines
    assert only.fields["prompt"] == "\N{GRINNING FACE}"


def test_infinite_numbers_in_opaque_fields_are_refused() -> None:
    assert found(read('{"prompt": "a", "metadata": [1e999]}')) == {
        ("out-of-range", "stdin:1: metadata")
    }
    assert found(read('{"prompt": "a", "x_a": 1e999}')) == {("out-of-range", "stdin:1: x_a")}


def test_unknown_fields_come_with_the_nearest_name() -> None:
    assert 'did you mean "guidance_scale"?' in only_fault(guidence_scale=2).hint
    assert "x_" in only_fault(zzz=2).hint


def test_all_faults_at_once_and_the_good_lines_beside_them() -> None:
    text = line(custom_id="good") + line(sede=1, seed=True, prompt="") + "{\x00}\n" + line(n=0)
    manifest = read(text)
    assert found(manifest) == {
        ("unknown-field", "stdin:2: sede"),
        ("wrong-type", "stdin:2: seed"),
        ("empty-text", "stdin:2: prompt"),
        ("bad-json", "stdin:3"),
        ("out-of-range", "stdin:4: n"),
    }
    assert [one.fields["custom_id"] for one in manifest.lines] == ["good"]


def test_a_duplicate_id_names_the_first_line() -> None:
    manifest = read(line(custom_id="cat") + line() + line(custom_id="cat"))
    (fault,) = manifest.faults
    assert (fault.code, fault.where) == ("manifest.duplicate-id", "stdin:3")
    assert fault.what == '"cat" appears twice'
    assert "line 1" in fault.hint


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"custom_id": "cat", "n": 2}, {"custom_id": "cat-1"}),
        ({"custom_id": "cat-1"}, {"custom_id": "cat", "seeds": [7, 8]}),
        ({"custom_id": "cat", "n": 2}, {"custom_id": "cat"}),
        ({"custom_id": "Cat"}, {"custom_id": "cAT"}),
        ({"custom_id": "stdin-0002"}, {}),
    ],
)
def test_ids_clash_after_expansion_and_across_case(first: Any, second: Any) -> None:
    assert found(read(line(**first) + line(**second))) == {("duplicate-id", "stdin:2")}


def test_a_single_picture_has_no_children() -> None:
    assert not read(line(custom_id="cat", n=1) + line(custom_id="cat-0")).faults


def test_a_child_id_may_be_too_long() -> None:
    assert found(read(line(custom_id="x" * 127, n=2))) == {("bad-id", "stdin:1: custom_id")}


def test_bad_lines_are_recorded_under_an_id_that_is_no_other_jobs() -> None:
    text = line(custom_id="cat") + line(custom_id="cat") + line(custom_id="dog", seed=-1) + "{\n"
    manifest = read(text + line(custom_id="../x", sede=1) + line(custom_id="bat", sede=1, n=-1))
    by_id = failed_lines(manifest, manifest.faults)
    assert {name: len(some) for name, some in by_id.items()} == {
        "stdin-line-2": 1,
        "dog": 1,
        "stdin-0004": 1,
        "stdin-line-5": 2,
        "bat": 2,
    }


def test_an_id_made_up_for_a_bad_line_is_no_other_lines() -> None:
    taken = line(custom_id="stdin-line-1") + line(custom_id="Stdin-Line-1-Again")
    manifest = read(line(custom_id="/") + taken)
    assert manifest.bad_ids == {1: "stdin-line-1-again-again"}
    assert len(manifest.lines) == 2


def test_faults_come_in_the_order_of_the_lines() -> None:
    manifest = read(line(custom_id="a") + line(sede=1) + line(custom_id="b") + line(custom_id="a"))
    late = [UsageError("no", where="stdin:3: seed"), UsageError("no", where="flag: seed")]
    places = [one.where for one in in_line_order(manifest, [*manifest.faults, *late])]
    assert places == ["flag: seed", "stdin:2: sede", "stdin:3: seed", "stdin:4"]


def test_a_wrong_bot_task_is_told_of_image() -> None:
    assert '"image" means none' in only_fault(bot_task="imagine").hint


def test_only_thinking_can_be_dropped() -> None:
    for fields in ({"drop_think": False}, {"cot_text": "a"}, {"bot_task": "think"}):
        fields = {"bot_task": "recaption", "drop_think": True} | fields
        if "cot_text" in fields:
            del fields["bot_task"]
        assert fields_of(**fields)["drop_think"] == fields["drop_think"]


def test_faults_found_later_are_recorded_under_the_lines_own_id() -> None:
    manifest = read(line(custom_id="cat") + line(custom_id="dog"))
    late = UsageError("no", where="stdin:2: temperature")
    assert failed_lines(manifest, [late, UsageError("whole file", where="stdin")]) == {
        "dog": [late]
    }


@pytest.mark.parametrize("data", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_manifest_is_a_fault(data: bytes) -> None:
    assert found(read(data)) == {("empty", "stdin")}


def test_json_over_several_lines_is_one_fault() -> None:
    entries = [{"prompt": "a"}, {"prompt": "b"}]
    assert found(read(json.dumps(entries, indent=1))) == {("not-json-lines", "stdin")}
    assert found(read(json.dumps(entries[0], indent=1))) == {("not-json-lines", "stdin")}


def test_a_file_that_is_no_json_lines_is_read_no_further() -> None:
    """Each faulty line takes a thousand bytes, however short it is."""
    manifest = read(line() + "x\n" * 3000)
    assert (len(manifest.lines), len(manifest.faults)) == (1, 1001)
    assert ("not-json-lines", "stdin") in found(manifest)
    mixed = read(("x\n" * 900 + line()) * 2)
    assert (len(mixed.lines), len(mixed.faults)) == (2, 1800)


def test_a_line_of_many_bytes_is_not_parsed() -> None:
    assert found(read("[" + "1," * 5_000_000)) == {("too-long", "stdin:1")}
    assert not read(line(prompt="x" * 5_000_000)).faults


def test_byte_order_mark_carriage_returns_and_blank_lines_do_no_harm() -> None:
    manifest = read(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [(one.line_number, one.fields["prompt"]) for one in manifest.lines] == [
        (1, "a"),
        (3, "b"),
    ]
    assert not manifest.faults


def test_a_line_that_is_not_utf8_is_a_fault_of_its_own() -> None:
    assert found(read(b'{"prompt": "caf\xe9"}\n' + line().encode())) == {("not-utf8", "stdin:1")}


def test_text_manifests_have_a_prompt_per_line(write_manifest: WriteManifest) -> None:
    path = write_manifest("a cat", "", '{"prompt": "not JSON here"}', name="my jobs.txt")
    manifest = read_manifest(path)
    assert [one.fields["custom_id"] for one in manifest.lines] == ["my-jobs-0001", "my-jobs-0003"]
    assert manifest.lines[1].fields["prompt"] == '{"prompt": "not JSON here"}'
    assert manifest.lines[0].where == "my jobs.txt:1"
    assert not manifest.faults


def test_text_manifests_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_bytes(b"\xff\xfd\n[\n")
    manifest = read_manifest(path)
    assert [fault.code for fault in manifest.faults] == ["manifest.not-utf8"]
    assert [one.fields["prompt"] for one in manifest.lines] == ["["]


@pytest.mark.parametrize(
    "name", ["...jsonl", "ünïcode.jsonl", "x" * 200 + ".jsonl", "a b:c;.jsonl"]
)
def test_any_file_name_gives_fit_ids(write_manifest: WriteManifest, name: str) -> None:
    manifest = read_manifest(write_manifest({"prompt": "a", "n": 2}, name=name))
    assert not manifest.faults
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,100}", manifest.name)


def test_the_digest_is_of_the_bytes(write_manifest: WriteManifest) -> None:
    one = read_manifest(write_manifest({"prompt": "a"}, name="one.jsonl"))
    same = read_manifest(write_manifest({"prompt": "a"}, name="same.jsonl"))
    other = read_manifest(write_manifest({"prompt": "b"}, name="other.jsonl"))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("name", "code"), [("missing.jsonl", "missing"), ("", "is-a-folder"), ("a\0b", "unreadable")]
)
def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path, name: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_manifest(tmp_path / name)
    assert caught.value.code == f"manifest.{code}"


def test_standard_input_without_bytes_below() -> None:
    assert read_manifest("-", io.StringIO(line())).lines[0].fields["prompt"] == "a cat"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = st.sampled_from(
    ["custom_id", "prompt", "images", "seeds", "size", "n", "width", "x_a"]
)


@given(st.lists(st.dictionaries(FIELD_NAMES | st.text(), JSON_VALUES, max_size=5), max_size=4))
def test_no_json_raises_and_every_line_is_good_or_faulty(entries: list[dict[str, Any]]) -> None:
    manifest = read("\n".join(json.dumps(entry) for entry in entries))
    faulty = {int(f.where.split(":")[1]) for f in manifest.faults if ":" in f.where}
    good = {one.line_number for one in manifest.lines}
    if entries:
        assert good | faulty == set(range(1, len(entries) + 1))
    assert not good & faulty
    assert manifest.bad_ids.keys() == faulty
    names = [one.fields["custom_id"] for one in manifest.lines]
    assert len(set(names)) == len(names)


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    manifest = read(data)
    assert manifest.lines or manifest.faults
    assert all(str(fault).isprintable() for fault in manifest.faults)


def test_ten_thousand_lines_in_under_two_seconds(tmp_path: Path) -> None:
    """Imports, reading, resolving and planning, in seconds of a fresh process; about 0.5 here."""
    path = tmp_path / "jobs.jsonl"
    path.write_text(
        "".join(
            line(custom_id=f"cat-{i:05}", images=["in/cat.png"], seed=i, size="1024x768", steps=50)
            for i in range(10_000)
        )
    )
    program = """
import sys, time
start = time.process_time()
from pathlib import Path
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.settings.config import settle
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.spec.card import Bucket, ModelCard, SamplingDefaults
from hyimg_cli.spec.job import Size
defaults = SamplingDefaults(
    num_inference_steps=4, guidance_scale=5.0, flow_shift=3.0, bot_task="none", drop_think=False,
    use_system_prompt="None", temperature=0.6, top_k=1024, top_p=0.95, max_new_tokens=64,
)
buckets = tuple(Bucket(i, Size(512 + 16 * i, 1024)) for i in range(37))
card = ModelCard("m", "f", "n", True, False, buckets, 16, 1024, 1, 1, 1024, 328, defaults)
manifest = read_manifest(Path(sys.argv[1]))
jobs, faults = resolve_jobs(manifest, settle({}, {}, {}), lambda model: card)
plan = make_plan(jobs, lambda model: card)
assert len(plan.jobs) == 10_000 and not faults and not manifest.faults
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(time.process_time() - start)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 2.0


def test_a_conversation_is_told_apart_from_a_slip_of_the_pen() -> None:
    for name in ("messages", "history"):
        fault = only_fault(**{name: []})
        assert "jobs have no earlier turns" in fault.what
        assert "prompt and images" in fault.hint
