"""`hyimg think`, then `hyimg generate`: the same pictures as in one run, and edited texts."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from held import Held

Run = Callable[..., Any]
Write = Callable[..., Path]
STEPS = ["--num-inference-steps", "3"]


@pytest.fixture
def jobs(write_manifest: Write, write_picture: Write) -> Path:
    """Shared and single texts, a short one that is cut, an edit, a given text, none, a video."""
    write_picture("in.png")
    red = {"prompt": "a red circle on a blue background", "seed": 3}
    return write_manifest(
        {"custom_id": "four", **red, "n": 4, "vary": "picture", "metadata": {"sku": "A17"}},
        {"custom_id": "dropped", **red, "drop_think": True, "x_shelf": 4},
        {"custom_id": "short", **red, "max_new_tokens": 6, "guidance_scale": 1.0},
        {
            "custom_id": "hot",
            "prompt": "a green square",
            "temperature": 3.0,
            "top_p": 1.0,
            "seed": 5,
            "max_new_tokens": 40,
        },
        {
            "custom_id": "greedy",
            "prompt": "make it green",
            "images": ["in.png"],
            "temperature": 0,
            "bot_task": "recaption",
            "seeds": [1, 2],
            "size": "64x64",
        },
        {"custom_id": "given", "prompt": "a cat", "cot_text": "<recaption>A cat.</recaption>"},
        {"custom_id": "plain", "prompt": "a cat", "bot_task": "none"},
    )


def texts_of(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    return texts_of(folder / "results.jsonl")


def pixels(folder: Path) -> dict[str, str]:
    return {
        name: line["outputs"][0]["pixel_sha256"]
        for name, line in results_of(folder).items()
        if line["status"] == "done"
    }


def test_unedited_texts_give_the_pixels_of_one_go(run_cli: Run, jobs: Path, tmp_path: Path) -> None:
    assert run_cli("generate", jobs, "-o", "one", *STEPS, "--no-report").code == 0
    one = results_of(tmp_path / "one")
    assert len(one) == 11
    assert one["short"]["think_truncated"]
    for think, draw in ((1, 16), (16, 1)):
        texts, two = f"texts/{think}.jsonl", f"two-{think}"
        ran = run_cli("think", jobs, "-o", texts, *STEPS, "--batching-max-size", think)
        assert ran.code == 0, ran.err
        ran = run_cli("generate", texts, "-o", two, "--no-report", "--batching-max-size", draw)
        assert ran.code == 0, ran.err
        assert pixels(tmp_path / two) == pixels(tmp_path / "one"), (think, draw)
        for name, line in results_of(tmp_path / two).items():
            for field in (
                "cot_text",
                "cot_token_ids",
                "ratio_index",
                "think_truncated",
                "metadata",
            ):
                assert line[field] == one[name][field], (name, field)
            assert line.get("x_shelf") == one[name].get("x_shelf")
            if one[name]["cot_token_ids"]:
                assert line["kv_reuse"]["status"] == one[name]["kv_reuse"]["status"]
                assert line["kv_reuse"]["ar_decode_tokens"] == 0


def test_lines_are_for_people_and_texts_are_written_once(
    run_cli: Run, jobs: Path, tmp_path: Path
) -> None:
    ran = run_cli("think", jobs, "-o", "t.jsonl", *STEPS, "--json")
    outcomes = {line["custom_id"]: line for line in ran.json_lines if "custom_id" in line}
    decoded = [name for name, line in outcomes.items() if line["kv_reuse"]["ar_decode_tokens"]]
    assert len(decoded) == 4  # `dropped` shares its text with `four`
    lines = texts_of(tmp_path / "t.jsonl")
    assert len(lines) == 11
    four = lines["four-2"]
    assert list(four)[:4] == ["custom_id", "prompt", "cot_text", "ratio_index"]
    assert four["cot_text"].startswith("<think>")
    assert (four["size"], four["metadata"]) == ("auto", {"sku": "A17"})
    assert "ratio_index" not in lines["greedy-0"]
    assert lines["greedy-0"]["images"] == ["in.png"]
    assert "written" not in lines["plain"]
    assert run_cli("check", "t.jsonl").code == 0
    assert not list(tmp_path.glob("**/*.png"))[1:], "nothing was drawn"


def test_edits_are_drawn_and_slips_are_named(run_cli: Run, jobs: Path, tmp_path: Path) -> None:
    run_cli("think", jobs, "-o", "t.jsonl", *STEPS, "--select", "four-[01]")
    path = tmp_path / "t.jsonl"
    path.write_text(path.read_text().replace("circle", "square"))
    ran = run_cli("generate", path, "-o", "edited", "--no-report")
    assert ran.code == 0, ran.err
    line = results_of(tmp_path / "edited")["four-0"]
    assert "square" in line["cot_text"]
    assert line["cot_token_ids"] is None
    first, second = texts_of(path).values()
    first["cot_text"] = first["cot_text"].replace("</recaption>", "")
    second["ratio_index"] = 99
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    ran = run_cli("check", path, "--json")
    assert ran.code == 2
    faults = [line["fault"] for line in ran.json_lines if "fault" in line]
    assert [(fault["where"], fault["message"]) for fault in faults] == [
        ("t.jsonl:1: cot_text", "edited: </recaption> is missing"),
        ("t.jsonl:2: ratio_index", "the model has no ratio 99"),
    ]


def test_a_second_run_writes_what_is_missing_and_leaves_edits_alone(
    run_cli: Run, jobs: Path, tmp_path: Path
) -> None:
    run_cli("think", jobs, "-o", "t.jsonl", *STEPS, "--limit", "3")
    path = tmp_path / "t.jsonl"
    edited = path.read_text().replace("circle", "square")
    path.write_text(edited.rstrip("\n") + '\n{"custom_id": "dropped", "prompt": "a r')
    ran = run_cli("think", jobs, "-o", "t.jsonl", *STEPS)
    assert ran.code == 0, ran.err
    assert "3 skipped" in ran.err
    assert path.read_text().startswith(edited)
    assert len(texts_of(path)) == 11
    assert run_cli("think", jobs, "-o", "t.jsonl", *STEPS).err.startswith("0 done, 0 failed, 11 sk")


def test_another_job_of_that_name_needs_force(run_cli: Run, jobs: Path, tmp_path: Path) -> None:
    run_cli("think", jobs, "-o", "t.jsonl", *STEPS, "--limit", "1")
    before = (tmp_path / "t.jsonl").read_text()
    ran = run_cli("think", jobs, "-o", "t.jsonl", *STEPS, "--limit", "1", "--temperature", "0.9")
    assert ran.code == 2
    assert "error[output.other-job]" in ran.err
    assert (tmp_path / "t.jsonl").read_text() == before
    again = ["--limit", "1", "--temperature", "0.9", "--force"]
    assert run_cli("think", jobs, "-o", "t.jsonl", *STEPS, *again).code == 0
    assert texts_of(tmp_path / "t.jsonl")["four-0"]["written"]["temperature"] == 0.9


def test_a_job_that_fails_has_no_line_and_ends_nothing(
    run_cli: Run, write_manifest: Write, write_picture: Write, tmp_path: Path
) -> None:
    edit = {"prompt": "make it red", "max_new_tokens": 4}
    manifest = write_manifest(
        {"custom_id": "gone", **edit, "images": ["gone.png"]},
        {"custom_id": "there", **edit, "images": ["in.png"]},
    )
    write_picture("in.png")
    ran = run_cli("think", manifest, "-o", "t.jsonl")
    assert ran.code == 1
    assert "gone: failed[source.missing]" in ran.err
    assert list(texts_of(tmp_path / "t.jsonl")) == ["there"]
    write_picture("gone.png")
    assert run_cli("think", manifest, "-o", "t.jsonl").code == 0
    assert list(texts_of(tmp_path / "t.jsonl")) == ["there", "gone"]


@pytest.mark.parametrize("text", ["a shopping list", "[1]\n[2]\n", '{"custom_id": "a"}\nno\n'])
def test_a_file_of_something_else_is_left_as_it_is(
    run_cli: Run, jobs: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    ran = run_cli("think", jobs, "-o", "t.jsonl")
    assert ran.code == 2
    assert "error[output.damaged-texts]" in ran.err
    assert (tmp_path / "t.jsonl").read_text() == text
    assert run_cli("think", jobs, "-o", jobs).code == 2


def test_a_killed_run_goes_on_and_writes_no_text_again(
    run_cli: Run, write_manifest: Write, tmp_path: Path
) -> None:
    short = {"prompt": "a red circle", "max_new_tokens": 16}
    lines = [short | {"custom_id": f"j{n}", "seed": n} for n in range(6)]
    manifest, path = write_manifest(*lines), tmp_path / "t.jsonl"
    process = Held(tmp_path, "think", str(manifest), "-o", str(path), "--batching-max-size", "1",
                   results=3)  # fmt: skip
    process.wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") == 3)
    os.kill(process.pid, signal.SIGKILL)
    process.ended()
    whole = path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1]
    done = whole.count(b"\n")
    assert done == 3
    ran = run_cli("think", manifest, "-o", path, "--json")
    assert ran.code == 0
    again = [line["custom_id"] for line in ran.json_lines if "custom_id" in line]
    assert len(again) == 6 - done
    assert path.read_bytes().startswith(whole)
    assert len(texts_of(path)) == 6


@pytest.mark.thorough
def test_two_replicas_write_the_texts_of_one_process(
    run_cli: Run, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_cli("think", jobs, "-o", "one.jsonl", *STEPS).code == 0
    ran = run_cli("think", jobs, "-o", "two.jsonl", *STEPS, "--replicas", "2")
    assert ran.code == 0, ran.err
    assert texts_of(tmp_path / "two.jsonl") == texts_of(tmp_path / "one.jsonl")
    for folder, more in (("g1", []), ("g2", ["--replicas", "2"])):
        made = run_cli("generate", jobs, "-o", folder, *STEPS, "--no-report", "--no-prewarm", *more)
        assert made.code == 0, made.err
    assert pixels(tmp_path / "g2") == pixels(tmp_path / "g1")
    for folder in ("g1", "g2"):
        lines = results_of(tmp_path / folder)
        wrote = [name for name in lines if (lines[name]["kv_reuse"] or {})["ar_decode_tokens"]]
        assert len(wrote) == 4, "jobs of one text are dealt together"
        assert {lines[f"four-{n}"]["cot_from"] for n in range(4)} == {None, "four-0"}
