"""Pipes, sockets and devices where a file is expected: each command says so, and none waits."""

import array
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from special import MAKE, NAMES, put, within

from hyimg_cli.errors import OutputFolderError, UsageError
from hyimg_cli.manifest import manifest as manifests
from hyimg_cli.measure.pairs import newest_bench
from hyimg_cli.measure.replay.run_folder import frames_digest, read_resolved, refuse_folder
from hyimg_cli.media.video import write_video
from hyimg_cli.models import registry
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint

Run = Callable[..., Any]
FRAMES = np.zeros((3, 32, 32, 3), dtype=np.uint8)
JOB = {"prompt": "a red circle", "num_inference_steps": 1, "bot_task": "none", "seed": 1}
LIMIT_S = 120
KINDS = sorted(MAKE)
# A command that is given such a file (BAD, with any suffix), and its exit code.
COMMANDS = {
    "generate BAD.jsonl": 2,
    "check BAD.jsonl": 2,
    "check BAD": 2,
    "plan BAD.txt": 2,
    "generate jobs.jsonl --recipe BAD.toml": 2,
    "check jobs.jsonl --recipe BAD.toml": 2,
    "plan jobs.jsonl --recipe BAD.toml": 2,
    "doctor --recipe BAD.toml": 2,
    "check edits.jsonl": 2,
    "info BAD.png": 2,
    "info BAD.mp4": 2,
    "info BAD.json": 2,
    "replay BAD.png": 2,
    "replay BAD.mp4": 2,
    "eval psnr BAD.png good.png": 2,
    "eval psnr film.mp4 BAD.mp4": 2,
    "eval psnr pictures bad-pictures": 2,
    "eval psnr pictures bad-pictures --as-video": 2,
    "eval psnr bad-run bad-run": 3,
    "eval lpips good.png good.png --weights BAD.pth": 2,
    "bench --compare BAD.toml": 2,
    "bench --compare kv-reuse --manifest BAD.jsonl": 2,
    "bench --compare kv-reuse --baseline BAD.json": 2,
}
SUFFIXES = ("", ".png", ".mp4", ".json", ".jsonl", ".toml", ".txt", ".pth")


@pytest.fixture
def run_cli(run_cli: Run) -> Run:
    """The same with a time limit."""

    def run(*arguments: object) -> Any:
        with within(LIMIT_S):
            return run_cli(*arguments)

    return run


def write_jobs(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A kind, and a folder with files of that kind beside good ones."""
    from PIL import Image

    kind, home = request.param, tmp_path_factory.mktemp(request.param)
    for suffix in SUFFIXES:
        put(home / f"BAD{suffix}", kind)
    picture = Image.new("RGB", (64, 48), (220, 30, 30))
    for folder in ("pictures", "bad-pictures", "bad-run/outputs"):
        (home / folder).mkdir(parents=True)
        picture.save(home / folder / "a.png")
    picture.save(home / "good.png")
    picture.save(home / "pictures" / "b.png")
    put(home / "bad-pictures" / "b.png", kind)
    put(home / "bad-run" / "results.jsonl", kind)
    write_video(home / "film.mp4", [FRAMES], fps=8)
    write_jobs(home / "jobs.jsonl", JOB)
    write_jobs(home / "edits.jsonl", JOB | {"images": ["good.png", "BAD.png"]})
    return kind, home


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_it_and_ends(
    run_cli: Run, world: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    kind, home = world
    monkeypatch.chdir(home)
    ran = run_cli(*command.split())
    assert ran.code == COMMANDS[command], ran.err
    assert f"this is {NAMES[kind]}, not a regular file" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "card.json", "model.safetensors"],
)
def test_a_file_of_a_checkpoint(
    run_cli: Run, tmp_path: Path, write_manifest: Callable[..., Path], kind: str, name: str
) -> None:
    put(a_copy_of("tiny-image", tmp_path / "model") / name, kind)
    for command in ("check", "plan", "generate"):
        ran = run_cli(command, write_manifest(JOB), "--model", "./model", "--device", "cpu")
        assert ran.code == 3, ran.err
        assert f"{name} cannot be read: this is {NAMES[kind]}" in ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_of_a_checkpoint(
    run_cli: Run, tmp_path: Path, write_manifest: Callable[..., Path], kind: str
) -> None:
    model = a_copy_of("tiny-image", tmp_path / "model")
    put(model / "system_prompt.py", kind)
    job = JOB | {"use_system_prompt": "en_vanilla"}
    ran = run_cli("check", write_manifest(job), "--model", "./model")
    assert (ran.code, NAMES[kind] in ran.err) == (2, True)
    put(model / "notes.json", kind)
    ran = run_cli("generate", write_manifest(JOB), "--model", "./model")
    assert (ran.code, f"notes.json cannot be read: this is {NAMES[kind]}" in ran.err) == (3, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "card.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/notes.json",
        "tokenizer/tokenizer.json",
        "tokenizer/chat_template.jinja",
    ],
)
def test_a_file_of_a_video_checkpoint(
    run_cli: Run, tmp_path: Path, write_manifest: Callable[..., Path], kind: str, name: str
) -> None:
    put(a_copy_of("tiny-video", tmp_path / "model") / name, kind)
    manifest = write_manifest({"task": "t2v", "prompt": "a dog", "num_inference_steps": 1})
    ran = run_cli("generate", manifest, "--video-model", "./model", "--device", "cpu")
    assert ran.code == 3, ran.err
    assert f"this is {NAMES[kind]}, not a regular file" in ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_doctor_says_it_of_a_checkpoint(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from hyimg_cli.doctor import checks

    cheap = ("checkpoint", "memory", "output folder")
    chosen = tuple(pair for pair in checks.CHECKS if pair[0] in cheap)
    monkeypatch.setattr("hyimg_cli.cli.doctor.CHECKS", chosen)
    put(a_copy_of("tiny-image", tmp_path / "model") / "config.json", kind)
    ran = run_cli("doctor", "--model", "./model", "--device", "cpu")
    assert ran.code == 3
    assert f"config.json cannot be read: this is {NAMES[kind]}" in ran.out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".lock", "results.jsonl"])
def test_a_file_of_the_output_folder_that_must_be_read(
    run_cli: Run,
    fake_session: Any,
    write_manifest: Callable[..., Path],
    tmp_path: Path,
    kind: str,
    name: str,
) -> None:
    put(tmp_path / "out" / name, kind)
    manifest = write_manifest(JOB)
    for command in ("generate", *(["plan"] if name == "results.jsonl" else [])):
        ran = run_cli(command, manifest, "-o", "out")
        assert ran.code == 3, ran.err
        assert f"error[storage.not-a-file]: this is {NAMES[kind]}" in ran.err
        assert f"--> out/{name}" in ran.err
    assert fake_session.ran == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_replaces_may_have_been_anything(
    run_cli: Run,
    fake_session: Any,
    write_manifest: Callable[..., Path],
    tmp_path: Path,
    kind: str,
) -> None:
    out, manifest = tmp_path / "out", write_manifest(JOB)
    replaced = ("run.json", "manifest.resolved.jsonl", "report.html", "outputs/jobs-0001.png")
    for name in replaced:
        put(out / name, kind)
    assert run_cli("generate", manifest, "-o", "out").code == 0
    assert all((out / name).is_file() and not (out / name).is_symlink() for name in replaced)
    # A page and a picture that are no files any more are made again.
    put(out / "report.html", kind)
    put(out / "outputs" / "jobs-0001.png", kind)
    assert run_cli("generate", manifest, "-o", "out").code == 0
    assert fake_session.ran == ["jobs-0001", "jobs-0001"]
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_only_looked_for_is_not_there(tmp_path: Path, kind: str) -> None:
    """A bench, the run that a file is of, latents of a stopped run: all of these may be missing."""
    for variant in ("A", "B"):
        (tmp_path / "bench" / variant).mkdir(parents=True)
    put(tmp_path / "bench" / "bench.json", kind)
    with within(LIMIT_S):
        assert newest_bench(tmp_path, "kv-reuse") is None

    out = tmp_path / "run"
    for name in ("results.jsonl", "manifest.resolved.jsonl", "run.json"):
        put(out / name, kind)
    film = out / "outputs" / "film.mp4"
    film.parent.mkdir()
    film.write_bytes(b"film")
    with within(LIMIT_S):
        assert (read_resolved(film, "film"), frames_digest(film)) == ({}, "")
    (out / "results.jsonl").unlink()
    write_jobs(out / "results.jsonl", {"custom_id": "film", "status": "failed"})
    with within(LIMIT_S), pytest.raises(OutputFolderError):
        refuse_folder(out, out / "film.mp4", "film")

    kept = LatentsCheckpoint(put(tmp_path / "latents" / "film.safetensors", kind), "key", every=2)
    with within(LIMIT_S):
        assert kept.found() is None
    assert kept.warnings == [
        f"the saved latents cannot be read: this is {NAMES[kind]}, not a regular file",
    ]


def test_a_manifest_and_a_recipe_may_come_through_a_pipe(
    run_cli: Run, write_manifest: Callable[..., Path]
) -> None:
    """As a shell's `<(…)` gives them."""

    def piped(text: str) -> str:
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        descriptors.append(reading)
        return f"/dev/fd/{reading}"

    descriptors: list[int] = []
    ran = run_cli("check", piped(json.dumps(JOB)), "--json")
    assert (ran.code, ran.json_lines[-1]["summary"]["jobs"]) == (0, 1), ran.err
    ran = run_cli("plan", write_manifest(JOB), "--recipe", piped('[sampling]\nsize = "nothing"\n'))
    assert (ran.code, "sampling.size" in ran.err) == (2, True), ran.err
    for descriptor in descriptors:
        os.close(descriptor)


def test_standard_input_without_end_is_refused(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr(manifests, "MANIFEST_BYTES", 1000)
    endless = io.TextIOWrapper(io.BytesIO(b" " * 2000))
    with pytest.raises(
        UsageError, match="the file is too large \\(limit 1,000 bytes\\)"
    ) as refused:
        manifests.read_manifest("-", endless)
    assert (refused.value.code, refused.value.where) == ("manifest.unreadable", "stdin")


def test_such_a_source_fails_its_own_job_alone(tmp_path: Path) -> None:
    """As a process with a time limit: the pictures are read in a thread of their own there."""
    from PIL import Image

    Image.new("RGB", (64, 48), (220, 30, 30)).save(tmp_path / "good.png")
    make: dict[str, Callable[[Path], Any]] = MAKE | {
        "zero": lambda path: path.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
        "dangling": lambda path: path.symlink_to("nowhere"),
        "loop": lambda path: path.symlink_to(path.name),
        "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        "good-link": lambda path: path.symlink_to("good.png"),
        "missing": lambda path: None,
    }
    for name, place in make.items():
        place(tmp_path / f"{name}.png")
    jobs = [JOB | {"custom_id": name, "images": [f"{name}.png"]} for name in (*make, "good")]
    manifest = write_jobs(tmp_path / "jobs.jsonl", *jobs)
    words = ["generate", str(manifest), "-o", "out", "--device", "cpu", "--no-prewarm"]

    done = subprocess.run(hyimg(*words), cwd=tmp_path, capture_output=True, text=True,
                          check=False, timeout=LIMIT_S)  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    found = {line["custom_id"]: line for line in map(json.loads, lines)}
    assert found.keys() == {job["custom_id"] for job in jobs}
    codes = {name: (line["error"] or {}).get("code") for name, line in found.items()}
    assert codes == {
        "pipe": "source.not-an-image",
        "socket": "source.not-an-image",
        "device": "source.not-an-image",
        "zero": "source.not-an-image",
        "folder": "source.is-a-folder",
        "dangling": "source.missing",
        "loop": "source.unreadable",
        "huge": "source.too-large",
        "missing": "source.missing",
        "good-link": None,
        "good": None,
    }
    told = found["pipe"]["error"]["message"]
    assert told.endswith("pipe.png: this is a named pipe, not a regular file")
    # What cannot be read has one digest, and so jobs that are equal otherwise have one key.
    assert {found[name]["key"] for name, code in codes.items() if code} == {found["missing"]["key"]}
    assert len(found["missing"]["key"]) == 64

    # Nothing is left to do; the keys are made again from the sources to know that.
    again = subprocess.run(hyimg(*words, "-q"), cwd=tmp_path, capture_output=True, text=True,
                           check=False, timeout=LIMIT_S)  # fmt: skip
    assert again.returncode == 1
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_signal_ends_what_waits_for_standard_input(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(hyimg(command, "-"), cwd=tmp_path, stdin=pipe, stdout=pipe,
                               stderr=pipe)  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(b"{}")
        process.stdin.flush()
        while unread(process.stdin.fileno()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        code = process.wait(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert code in (128 + number, -number)


def unread(descriptor: int) -> int:
    """Bytes that wait in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


def hyimg(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hyimg_cli", *arguments]


def a_copy_of(model: str, folder: Path) -> Path:
    """A checkpoint of links to the embedded one's files, each its own to replace."""
    source = registry.resolve_model(model)
    for path in source.rglob("*"):
        place = folder / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
    return folder
