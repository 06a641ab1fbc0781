"""Untrusted files and names: the right message and exit code, and no raw control characters."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from PIL import Image, PngImagePlugin

import hyimg_cli
from hyimg_cli.cli.views import RichView
from hyimg_cli.engine.eta import Eta
from hyimg_cli.engine.run import RunPlanned
from hyimg_cli.engine.runner import Summary
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.loading import hub
from hyimg_cli.models import registry
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec.events import ModelLoaded, ModelLoading, Outcome
from hyimg_cli.spec.plan import Plan

Run = Callable[..., Any]
JOB = {"prompt": "a red circle", "num_inference_steps": 1, "bot_task": "none", "seed": 1}


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
    # Not caplog.text: a library that configures logging may put tabs between its columns.
    assert_plain(*map(logging.Formatter().format, caplog.records))


def test_a_live_view_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Rich takes for markup is text, and no text steers."""
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    monkeypatch.setenv("COLUMNS", "400")
    eta = Eta(Plan(()), RunConfig(OutputConfig(Path())))
    with RichView(RunPlanned(Plan(()), Summary(left=1), eta)) as view:
        view.show(ModelLoading(f"./{EVIL}", 1000))
        assert SHOWN in view.bars.tasks[-1].description
        view.show(ModelLoaded(f"./{EVIL}", 0.5, "cpu", "float32", 1000))
    assert SHOWN in stderr.getvalue().replace("\n", "")


def seconds_of(run_cli: Run, *words: object) -> tuple[Any, float]:
    began = time.process_time()
    return run_cli(*words), time.process_time() - began


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ('{"prompt": "x", ' + ", ".join(['"seed": 1'] * 200_000) + "}", '"seed" appears twice'),
        (
            json.dumps({"prompt": "x"} | {f"seed{n}": n for n in range(20_000)}),
            "19,980 more keys are not fields",
        ),
        ("custom_id,prompt," + ",".join(f"q{n}" for n in range(20_000)) + "\na,b\n",
         "19,980 more columns are not fields"),
        (json.dumps({"prompt": "x", "matrix": {f"seed{n}": [1] for n in range(20_000)}}),
         "the matrix is too large"),
        (json.dumps({"prompt": "x", "matrix": {"seed": [*range(200_000)]}}),
         "the matrix is too large"),
        (json.dumps(JOB).encode("utf-16"), "the file is UTF-16 or similar"),
        (json.dumps(JOB).encode("utf-16-le"), "the file is UTF-16 or similar"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "x", "seed": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        (json.dumps(JOB | {"images": ["file:///a.png"]}), "is not a path"),
        (json.dumps(JOB | {"images": ["HTTP://example.org/a.png"]}), "save pictures from the web"),
        (json.dumps(JOB | {"model": "m" * 256}), "checkpoint folder not found: mmm"),
        (json.dumps(JOB | {"model": "m/" * 3000}), "checkpoint folder not found: m/m"),
        (json.dumps(JOB | {"model": "~nouser/x"}), "checkpoint folder not found: ~nouser/x"),
        (json.dumps(JOB | {"images": ["p" * 5000]}), "File name too long"),
    ],
    ids=range(15),
)  # fmt: skip
def test_much_and_odd_of_a_line_is_told_shortly(
    run_cli: Run, tmp_path: Path, data: str | bytes, what: str
) -> None:
    suffix = "csv" if isinstance(data, str) and data.startswith("custom_id,") else "jsonl"
    path = tmp_path / f"jobs.{suffix}"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    ran, took_s = seconds_of(run_cli, "check", path)
    assert ran.code == 2, ran.err
    assert what in ran.err
    assert len(ran.err) < 8000
    assert took_s < 5  # 200,000 keys took half an hour


def test_a_fault_of_a_models_name_hides_no_other(
    run_cli: Run, write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest(JOB | {"model": "m" * 256}, JOB | {"seed": "one"}, JOB)
    ran = run_cli("check", manifest)
    assert ran.code == 2
    assert '"one" is not a whole number' in ran.err
    assert "1 job, 2 faults" in ran.err


DONE = {"custom_id": "jobs-0001", "status": "done", "key": "k", "attempt": 1, "denoise_steps": 1}
DONE |= {"timings_s": {"total": 1.0}, "outputs": [{"path": "outputs/jobs-0001.png"}]}
EDITS: tuple[dict[str, Any], ...] = (
    {"outputs": [5]},
    {"outputs": {"path": "a"}},
    {"outputs": [{}]},
    {"outputs": [{"path": "outputs/a\0b.png"}]},
    {"outputs": [{"path": "outputs/../../a.png"}]},
    {"outputs": [{"path": "outputs/a.mp4", "frames_path": "/home"}]},
    {"outputs": [{"path": "outputs/a.png", "sha256": 5}]},
    {"outputs": [{"path": "outputs/a.png", "width": "wide"}]},
    {"outputs": [{"path": "outputs/a.mp4", "num_frames": None}]},
    {"timings_s": {"total": "long"}},
    {"timings_s": [1]},
    {"timings_s": {"total": 10**400}},
    {"share_s": {"total": True}},
    {"status": 3},
    {"status": "well"},
    {"key": ["k"]},
    {"attempt": "two"},
    {"attempt": 1.5},
    {"error": "failed"},
    {"error": {"message": 3}},
    {"kv_reuse": "hit"},
    {"kv_reuse": {"status": 7}},
    {"warnings": "none"},
    {"warnings": [1]},
    {"cot_text": 5},
    {"cot_token_ids": ["a"]},
    {"think_truncated": "no"},
    {"denoise_steps": "ten"},
    {"parallel": {"decode": {"ranks": [3]}}},
    {"replica": "first"},
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: json.dumps(edit)[:40])
def test_a_journal_edited_by_hand_is_told_of(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, edit: dict[str, Any]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "kept.png").touch()
    journal = tmp_path / "out" / "results.jsonl"
    journal.write_text(json.dumps(DONE) + "\n" + json.dumps(DONE | edit) + "\n")
    manifest = write_manifest(JOB)
    for words in (
        ("plan", manifest, "-o", "out", "--force"),
        ("report", "out"),
        ("eval", "psnr", "out", "out"),
    ):
        ran = run_cli(*words)
        assert ran.code == 2, ran.err
        assert "error[output.damaged-journal]: this line is not a job's result" in ran.err
        assert "--> out/results.jsonl:2" in ran.err


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"manifest": 3, "hardware": [], "flags": {"a": 1}, "versions": [1]}', "[1]",
     '{"manifest": {"name": [1]}, "hardware": {"gpus": 5}, "models": {"a": []}, "flags": 7}'],
    ids=range(4),
)  # fmt: skip
def test_a_run_json_of_anybody(run_cli: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").write_text(json.dumps(DONE) + "\n")
    (tmp_path / "out" / "run.json").write_text(text)
    ran = run_cli("report", "out")
    assert ran.code == 0, ran.err
    (tmp_path / "out" / "manifest.resolved.jsonl").write_text(text)
    assert run_cli("report", "out").code in (0, 2)
    (tmp_path / "out" / "manifest.resolved.jsonl").write_text('{"custom_id": "a", "images": 5}')
    ran = run_cli("report", "out")
    assert (ran.code, "manifest.resolved.jsonl cannot be read: 5 is not a path" in ran.err) == (
        2,
        True,
    ), ran.err


def test_only_listed_models_are_taken_from_lines(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.symlink_to(registry.resolve_model("tiny-image"))
    manifest = write_manifest(JOB | {"model": "./mine"}, JOB, JOB | {"model": "tiny-image"})
    assert run_cli("check", manifest).code == 0
    ran = run_cli("check", manifest, "--allow-model", "a/b, c/d")
    assert ran.code == 2
    assert 'lines may not use the model "./mine"' in ran.err
    assert "hint: --allow-model allows: a/b, c/d" in ran.err
    assert "2 jobs, 1 fault" in ran.err  # what --model names, a line may name
    assert run_cli("check", manifest, "--allow-model", "./mine").code == 0
    (tmp_path / "recipe.toml").write_text("[model]\nallow_model = []\n")
    ran = run_cli("plan", manifest, "--recipe", "recipe.toml")
    assert (ran.code, "allow_model of the recipe allows: none" in ran.err) == (2, True), ran.err


def test_a_folder_in_the_way_fails_its_job_alone(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    lines = [JOB | {"custom_id": f"j{n}", "size": "1:1"} for n in (1, 2, 3)]
    precious = tmp_path / "out" / "outputs" / "j2.png" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    words = ("generate", write_manifest(*lines), "-o", "out", "--device", "cpu", "--no-prewarm")
    ran = run_cli(*words, "--no-report")
    assert ran.code == 1, ran.err
    assert "j2: failed[job.folder-in-the-way]: outputs/j2.png: a folder has the name" in ran.err
    assert "2 done, 1 failed" in ran.err
    assert precious.exists()


@pytest.mark.parametrize("task", ["t2i", "t2v"])
def test_a_fault_that_all_jobs_share_ends_the_run(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, task: str
) -> None:
    film = {"num_frames": 5, "size": "48x32"} if task == "t2v" else {"size": "1:1"}
    shared = {"task": task, "prompt": "a dog", "num_inference_steps": 1, "n": 4} | film
    manifest = write_manifest(shared | {"custom_id": "j"})
    places = [tmp_path / "out" / "outputs" / f"j-{n}.{'mp4' if film.keys() > {'size'} else 'png'}"
              for n in range(4)]  # fmt: skip
    for place in places:
        place.mkdir(parents=True)
    flags = ("-o", "out", "--device", "cpu", "--no-prewarm", "--no-report", "--bot-task", "none")
    words = ("generate", manifest, *flags, "--batching-max-size", "1")
    ran = run_cli(*words, "--max-consecutive-errors", "2")
    assert ran.code == 1, ran.err
    assert "0 done, 2 failed, 0 skipped, 2 left" in ran.err
    assert "error[run.consecutive-errors]: 2 errors in a row, all of them " in ran.err
    assert "job.folder-in-the-way: outputs/j-" in ran.err
    assert "to resume: hyimg generate" in ran.err
    for place in places:
        place.rmdir()
    ran = run_cli(*words)
    assert (ran.code, "2 done, 2 failed, 0 skipped" in ran.err) == (1, True), ran.err
    ran = run_cli(*words, "--retry-failed")
    assert (ran.code, "2 done, 0 failed, 2 skipped" in ran.err) == (0, True), ran.err


def a_copy_of(model: str, folder: Path) -> Path:
    return Path(shutil.copytree(registry.resolve_model(model), folder))


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def overlap(header: dict[str, Any]) -> None:
    """Two tensors of one length share their bytes; the last one's end stays that of the file."""
    by_size: dict[int, str] = {}
    for name, entry in header.items():
        begin, end = entry.get("data_offsets", (0, 0)) if name != "__metadata__" else (0, 0)
        if end and (twin := by_size.setdefault(end - begin, name)) != name:
            entry["data_offsets"] = header[twin]["data_offsets"]
            return


def negative(header: dict[str, Any]) -> None:
    entry = next(one for name, one in header.items() if name != "__metadata__")
    entry["shape"] = [-n for n in entry["shape"]]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "deep": (lambda p: (p / "config.json").write_text("[" * 100_000), "nested too deeply"),
    "wide": (lambda p: rewritten(p / "config.json", hidden_size=10**12), "hidden_size is 10000"),
    "minus": (lambda p: rewritten(p / "config.json", hidden_size=-1), "hidden_size is -1"),
    "experts": (lambda p: rewritten(p / "config.json", num_experts=10**7), "num_experts is 1000"),
    "some": (lambda p: rewritten(p / "config.json", num_experts=9999, num_hidden_layers=9999),
             "num_experts is 9999; expected less than or equal to 10"),
    "layers": (lambda p: rewritten(p / "config.json", num_hidden_layers=10**9), "_layers is 100"),
    "heads": (lambda p: rewritten(p / "config.json", num_attention_heads=0),
              "num_attention_heads is 0"),
    "vae": (lambda p: rewritten(p / "config.json", vae="none"), "vae is 'none'"),
    "infinite": (lambda p: (p / "generation_config.json").write_text('{"top_k": Infinity}'),
                 "top_k: Infinity is not a whole number"),
    "texts": (lambda p: rewritten(p / "generation_config.json", max_new_tokens=10**30),
              "is out of range"),
    "card": (lambda p: rewritten(p / "card.json", ratio_indices=7),
             "ratio_indices is 7; expected a valid list"),
    "overlap": (lambda p: with_header(p / "model.safetensors", overlap), "invalid offset"),
    "negative": (lambda p: with_header(p / "model.safetensors", negative), "invalid value"),
    "cut": (lambda p: os.truncate(p / "model.safetensors", 10_000), "is damaged"),
    "tokenizer": (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_told_of(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    damage, what = DAMAGES[name]
    damage(a_copy_of("tiny-image", tmp_path / "model"))
    for command in ("check", "plan"):
        ran, took_s = seconds_of(
            run_cli, command, write_manifest(JOB), "--model", tmp_path / "model"
        )
        assert took_s < 5
        # What is only in the files of weights a plan need not read.
        is_found = ran.code == 3 and what in ran.err
        assert is_found or (command == "check" and name in WEIGHTS and ran.code == 0), ran.err
    ran = run_cli("generate", write_manifest(JOB), "--model", tmp_path / "model", "-o", "out")
    assert (ran.code, what in ran.err) == (3, True), ran.err
    assert not (tmp_path / "out" / "results.jsonl").exists()


WEIGHTS = ("overlap", "negative", "cut")
FILM = {"task": "t2v", "prompt": "a dog", "num_frames": 5, "num_inference_steps": 1}
NETWORK = "transformer/diffusion_pytorch_model.safetensors"
VIDEO_DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda p: os.truncate(p / NETWORK, 5000), "is damaged"),
    "overlap": (lambda p: with_header(p / NETWORK, overlap), "invalid offset"),
    "gone": (lambda p: (p / NETWORK).unlink(), "diffusion_pytorch_model.safetensors"),
    "no config": (lambda p: (p / "vae" / "config.json").unlink(), "vae/config.json is missing"),
    "no folder": (lambda p: shutil.rmtree(p / "text_encoder"), "text_encoder/ is missing"),
    "deep": (lambda p: (p / "model_index.json").write_text("[" * 100_000), "nested too deeply"),
    "list": (lambda p: (p / "transformer" / "config.json").write_text("[1]"), "not a JSON object"),
    "layers": (lambda p: rewritten(p / "transformer" / "config.json", num_layers=10**7),
               "num_layers is 10000000"),
    "text": (lambda p: rewritten(p / "vae" / "config.json", latent_channels="many"),
             "latent_channels is 'many'"),
    "shift": (lambda p: rewritten(p / "scheduler" / "scheduler_config.json", shift=[1]),
              "shift is [1]; expected a valid number"),
    "tokenizer": (lambda p: (p / "tokenizer" / "tokenizer.json").write_text("{}"),
                  "tokenizer.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", VIDEO_DAMAGES)
def test_a_damaged_video_checkpoint_is_told_of(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    damage, what = VIDEO_DAMAGES[name]
    damage(a_copy_of("tiny-video", tmp_path / "model"))
    for command in ("generate",) if name == "gone" else ("plan", "generate"):
        words = ("--video-model", tmp_path / "model", "--device", "cpu", "-o", "out")
        ran = run_cli(command, write_manifest(FILM), *words)
        assert (ran.code, what in ran.err) == (3, True), ran.err


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """A sidecar whose record has these fields of a job."""

    def write(path: Path = tmp_path / "film.json", **job: Any) -> Path:
        fields = JOB | {"custom_id": "a", "model": "tiny-image"} | job
        path.write_text(json.dumps({"format": 2, "model_fingerprint": "f", "job": fields}))
        return path

    return write


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ({"model": "m" * 5000}, "only the name of the model's folder is recorded"),
        ({"model": "a/" + "m" * 5000}, "is not on this machine"),
        ({"images": ["p" * 5000]}, "not found in"),
    ],
    ids=range(3),
)
def test_a_record_of_anybody_is_refused_shortly(
    run_cli: Run, record: Callable[..., Path], job: dict[str, Any], what: str
) -> None:
    ran = run_cli("replay", record(**job), "--allow-changed")
    assert (ran.code, what in ran.err) == (2, True), ran.err
    assert len(ran.err) < 5000


def test_a_file_chooses_no_folder_even_where_its_run_says_one(
    run_cli: Run, record: Callable[..., Path], tmp_path: Path
) -> None:
    a_copy_of("tiny-image", tmp_path / "model")
    (tmp_path / "run" / "outputs").mkdir(parents=True)
    line = JOB | {"custom_id": "a", "model": "../model"}
    (tmp_path / "run" / "manifest.resolved.jsonl").write_text(json.dumps(line))
    file = record(tmp_path / "run" / "outputs" / "a.json", model="model")
    ran = run_cli("replay", file, "--allow-changed")
    assert ran.code == 2
    assert "error[replay.model]: only the name of the model's folder is recorded" in ran.err
    assert "hint: give the folder with --model; its run used " in ran.err


def test_a_file_has_no_model_fetched(
    run_cli: Run,
    fake_session: Any,
    record: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hub id is taken as the cache has it; nobody is asked, and the next file says the id."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "listed", lambda *_, **__: pytest.fail("it was fetched"))
    file = record(model="acme/tiny")
    ran = run_cli("replay", file, "--allow-changed")
    assert ran.code == 2
    assert "error[replay.model]: the model acme/tiny is not on this machine" in ran.err
    assert "hint: to download it, add --model acme/tiny" in ran.err
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    ran = run_cli("replay", file, "--allow-changed")
    says = "acme/tiny is a folder here; a picture's record cannot choose a folder"
    assert f"error[replay.model]: {says}" in ran.err
    assert "hint: to use the folder, add --model acme/tiny" in ran.err
    kept = tmp_path / "hub" / "models--acme--tiny"
    a_copy_of("tiny-image", kept / "snapshots" / ("c" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("c" * 40)
    ran = run_cli("replay", file, "--allow-changed", "-o", "out")
    assert fake_session.ran == ["a"], ran.err


def test_one_folder_two_processes(
    run_cli: Run, fake_session: Any, write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    """The second is refused as long as the first lives; a kill leaves nothing in the way."""
    code = (
        "import sys; from pathlib import Path; from hyimg_cli.journal.journal import RunFolder\n"
        "with RunFolder(Path('out')): print('in', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    path = {"PYTHONPATH": str(Path(hyimg_cli.__file__).parents[1])}
    first = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=pipe, stdout=pipe, env=os.environ | path
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"in\n"
        words = ("generate", write_manifest(JOB), "-o", "out")
        ran = run_cli(*words)
        assert ran.code == 2
        assert f"another run is writing to this folder: process {first.pid} on" in ran.err
        assert fake_session.ran == []
    finally:
        first.kill()
        first.communicate()
    assert run_cli(*words).code == 0
    assert fake_session.ran == ["jobs-0001"]


def test_the_clock_set_back_and_the_cache_removed_while_a_run_goes(
    run_cli: Run,
    write_manifest: Callable[..., Path],
    write_picture: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_lines: Callable[[Path], list[dict[str, Any]]],
) -> None:
    cache, append, clock = tmp_path / "cache", RunFolder.append, time.time_ns

    def append_and_disturb(folder: RunFolder, outcome: Outcome) -> Outcome:
        appended = append(folder, outcome)
        shutil.rmtree(cache, ignore_errors=True)
        monkeypatch.setattr(time, "time_ns", lambda: clock() - 10**9 * 86_400)
        monkeypatch.setattr(time, "time", lambda: clock() / 1e9 - 86_400)
        return appended

    lines = [JOB | {"images": [write_picture(f"{n}.png").name], "custom_id": f"j{n}"}
             for n in (1, 2)]  # fmt: skip
    words = ("generate", write_manifest(*lines), "--device", "cpu", "--no-prewarm")
    words = (*words, "--cache-dir", cache, "--batching-max-size", "1")
    assert run_cli(*words, "-o", "plain").code == 0
    shutil.rmtree(cache)
    monkeypatch.setattr(RunFolder, "append", append_and_disturb)
    ran = run_cli(*words, "-o", "out")
    assert ran.code == 0, ran.err
    assert "2 done, 0 failed" in ran.err
    found = [
        [
            line["outputs"][0]["pixel_sha256"]
            for line in read_lines(tmp_path / out / "results.jsonl")
        ]
        for out in ("plain", "out")
    ]
    assert found[0] == found[1]
    times = [s for line in read_lines(tmp_path / "out" / "results.jsonl")
             for s in line["timings_s"].values()]  # fmt: skip
    assert min(times) >= 0
    assert max(times) < 600


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "a = " + "1" * 5000], ids=["deep", "long"])
def test_a_recipe_of_anybody(
    run_cli: Run, write_manifest: Callable[..., Path], tmp_path: Path, text: str
) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    ran = run_cli("check", write_manifest(JOB), "--recipe", "recipe.toml")
    assert (ran.code, "error[recipe.not-toml]" in ran.err) == (2, True), ran.err
    ran = run_cli("bench", "--compare", "recipe.toml")
    assert (ran.code, "Traceback" in ran.err) == (2, False), ran.err
