"""Files and names of others: a true message, an exit code of its own, and nothing raw."""

import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from hyimg_cli.cli.views import RichView
from hyimg_cli.spec.events import ModelLoaded, ModelLoading

Run = Callable[..., Any]
JOB = {"prompt": "a red circle", "num_inference_steps": 1, "bot_task": "none", "seed": 1}


@pytest.mark.parametrize(
    "words",
    [
        "generate jobs.jsonl -o s3://bucket/run",
        "plan jobs.jsonl -o S3://bucket/run",
        "check jobs.jsonl -o gs://bucket",
        "generate jobs.jsonl --cache-dir file:///tmp/cache",
        "think jobs.jsonl -o s3://bucket/texts.jsonl",
        "replay a.png -o s3://bucket",
        "bench --compare kv-reuse -o hf://bucket",
        "report . --single-file -o s3://bucket/page.html",
    ],
)
def test_an_address_that_nobody_serves_makes_no_folder(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, words: str
) -> None:
    write_manifest(JOB)
    ran = run_cli(*words.split())
    assert (ran.code, "is not a place on this machine" in ran.err) == (2, True), ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]


def test_a_recipe_names_no_address_either(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text('[output]\noutput_dir = "s3://bucket/run"\n')
    ran = run_cli("plan", write_manifest(JOB), "--recipe", "recipe.toml")
    assert (ran.code, "error[recipe.not-served]" in ran.err) == (2, True), ran.err


def test_a_folder_may_be_called_like_one(run_cli: Run, write_manifest: Callable[..., Path]) -> None:
    assert run_cli("plan", write_manifest(JOB), "-o", "./s3://bucket").code == 0


# A line end that forges an error, an escape sequence, C1 controls, writing that runs backwards, a
# line separator, half a surrogate pair (a name that is not UTF-8), what Rich takes for markup.
EVIL = "a\nerror[x]: y\r\x1b]0;t\x07\x1b[2J\x9b1m\x85\u202eb\u2066\u2028\udcff[red]:cat:[red]"
SHOWN = (
    r"a\nerror[x]: y\r\u001b]0;t\u0007\u001b[2J\u009b1m\u0085\u202eb\u2066\u2028\udcff"
    "[red]:cat:[red]"
)


def assert_plain(*texts: str) -> None:
    for text in texts:
        raw = {c for c in text if not (c.isprintable() or c == "\n")}
        assert not raw, (raw, text)
        assert not [one for one in text.split("\n") if one.startswith("error[x]")]


@pytest.mark.parametrize(
    "words",
    [
        ["check", "jobs.jsonl"],
        ["check", "jobs.jsonl", "--json"],
        ["plan", "jobs.jsonl"],
        ["plan", "jobs.jsonl", "--json"],
        ["plan", "good.jsonl", "--model", f"./{EVIL}"],
        ["plan", "good.jsonl", "-o", EVIL],
        ["check", f"{EVIL}.jsonl"],
        ["info", f"{EVIL}.png"],
        ["info", f"{EVIL}.png", "--json"],
        ["replay", f"{EVIL}.png"],
        ["report", EVIL],
        ["eval", "psnr", f"{EVIL}.png", "b.png"],
        ["eval", "psnr", f"{EVIL}.png", f"{EVIL}.png"],
        ["check", EVIL, "--prompt", EVIL[:-20]],
        ["manifest", f"{EVIL}.png", "--prompt", "x"],
        ["check", "good.jsonl", "--recipe", f"{EVIL}.toml"],
        ["check", "good.jsonl", f"--{EVIL}"],
        [EVIL],
        ["cache", "clear", "--kind", EVIL],
        ["schema", EVIL],
        ["bench", "--compare", EVIL],
        ["generate", "good.jsonl", "--progress", EVIL],
    ],
    ids=lambda words: " ".join(word if word.isascii() else "EVIL" for word in words),
)
def test_nothing_of_others_reaches_the_terminal_raw(
    run_cli: Run,
    write_manifest: Callable[..., Path],
    write_picture: Callable[..., Path],
    tmp_path: Path,
    words: list[str],
) -> None:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", EVIL.replace("\udcff", "") + "\nSteps: 1\x9b")
    record = {"format": 1, "job": {"prompt": EVIL, "custom_id": "a"}, "version": EVIL}
    chunks.add_text("hyimg", json.dumps(record))
    write_picture("b.png")
    (tmp_path / EVIL).mkdir()
    Image.new("RGB", (64, 48)).save(tmp_path / f"{EVIL}.png", pnginfo=chunks)
    faulty = [
        {"custom_id": EVIL, "prompt": "x"},
        {"prompt": "x", EVIL: 1},
        {"prompt": "x", "images": [EVIL]},
        {"prompt": "x", "model": EVIL},
        {"prompt": "x", "bot_task": EVIL},
        {"prompt": "x", "images": ["c\nerror[x]: y\x9b.png"]},
    ]
    lines = [json.dumps(line, ensure_ascii=False).encode(errors="replace") for line in faulty]
    (tmp_path / "jobs.jsonl").write_bytes(b"\n".join(lines))
    write_manifest(JOB, name="good.jsonl")
    ran = run_cli(*words)
    assert ran.code in (0, 1, 2, 3), ran.err
    assert ran.out or ran.err
    assert_plain(ran.out, ran.err)


def test_json_says_it_whole(run_cli: Run, tmp_path: Path) -> None:
    record = {"format": 1, "job": {"prompt": EVIL, "custom_id": "a"}, "version": "\ud83d"}
    (tmp_path / "film.json").write_text(json.dumps(record))
    ran = run_cli("info", "film.json", "--json")
    assert ran.code == 0, ran.err
    assert_plain(ran.out)
    assert ran.json_lines[0]["record"] == record
    ran = run_cli("info", "film.json")
    assert f"  prompt: {SHOWN}\n" in ran.out


def test_other_encodings_take_what_they_can(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "ein Kürbis 🎃 南瓜"
    record = {"format": 1, "job": {"prompt": prompt, "custom_id": "a"}}
    (tmp_path / "film.json").write_text(json.dumps(record))
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run_cli("info", "film.json", "--json").code == 0
    stdout.flush()
    text = written.getvalue().decode("latin-1")
    assert "Kürbis" in text
    assert json.loads(text)["record"] == record


def test_logs_of_any_library_are_plain(run_cli: Run, caplog: pytest.LogCaptureFixture) -> None:
    run_cli("schema", "line")
    logging.getLogger("other").warning("name: %s", EVIL)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("other").exception("failed")
    assert_plain(caplog.text)


def test_a_live_view_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Rich takes for markup is text, and no text steers."""
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    monkeypatch.setenv("COLUMNS", "400")
    with RichView(1) as view:
        view.show(ModelLoading(f"./{EVIL}", 1000))
        assert SHOWN in view.bars[-1]
        view.show(ModelLoaded(f"./{EVIL}", 0.5, "cpu", "float32", 1000))
    assert SHOWN in stderr.getvalue().replace("\n", "")
