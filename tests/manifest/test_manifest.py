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


def test_width_and_height_become_size() -> None:
    fields = fields_of(width=640, height=480)
    assert fields["size"] == SizeRequest(height=480, width=640)
    assert not {"width", "height"} & fields.keys()


@pytest.mark.parametrize(
    "custom_id", ["a", "x" * 128, "-", "_a.B-9", "0", "a..b", "a/b", "-/_/c.d"]
)
def test_good_ids(custom_id: str) -> None:
    assert fields_of(custom_id=custom_id)["custom_id"] == custom_id


@pytest.mark.parametrize("value", [4.0, 2.0**53])
def test_whole_numbers_may_have_a_decimal_point(value: float) -> None:
    assert fields_of(seed=value)["seed"] == int(value)
    assert type(fields_of(seed=value)["seed"]) is int
    assert fields_of(seeds=[1.0, value])["seeds"] == (1, int(value))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
        line(guidance_scale=10**400),
        line(custom_id="x" * 300),
    ],
    ids=["deep", "seed", "scale", "id"],
)
def test_much_of_anything_is_one_short_fault(text: str) -> None:
    (fault,) = read(text).faults
    assert fault.where.startswith("stdin:1")
    assert fault.hint
    assert len(str(fault)) < 1000


def test_byte_order_marks_of_joined_files_are_left_out() -> None:
    manifest = read("\ufeff" + line() + "\n\ufeff" + line() + "\n")
    assert len(manifest.lines) == 2


def test_a_surrogate_pair_spelled_in_escapes_is_one_character() -> None:
    (only,) = read('{"prompt": "\\ud83d\\ude00"}').lines
    assert only.fields["prompt"] == "\N{GRINNING FACE}"


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


def test_a_single_picture_has_no_children() -> None:
    assert not read(line(custom_id="cat", n=1) + line(custom_id="cat-0")).faults


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


def test_text_manifests_have_a_prompt_per_line(write_manifest: WriteManifest) -> None:
    path = write_manifest("a cat", "", '{"prompt": "not JSON here"}', name="my jobs.txt")
    manifest = read_manifest(path)
    assert [one.fields["custom_id"] for one in manifest.lines] == ["my-jobs-0001", "my-jobs-0003"]
    assert manifest.lines[1].fields["prompt"] == '{"prompt": "not JSON here"}'
    assert manifest.lines[0].where == "my jobs.txt:1"
    assert not manifest.faults


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
facts = ("m", "f", "n", True, False, buckets, 16, 1024, 1, 1, 1024, 328, defaults)
card = ModelCard(*facts, frozenset({"num_inference_steps", "seed"}))
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
