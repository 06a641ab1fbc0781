"""Finished denoising is never lost: after a failed decode or write, the next attempt only
decodes, and its frames are those of an undisturbed run.
"""

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from event_kinds import is_embedded, is_step

from hyimg_cli.engine.session import Session
from hyimg_cli.media.video import VideoWriter
from hyimg_cli.models.diffusers_video import encoders, weights
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.pipelines import latents_checkpoint
from hyimg_cli.spec.events import Progress

LINE = {
    "custom_id": "film", "task": "t2v", "prompt": "a dog", "seed": 1, "steps": 5,
    "size": "48x32", "num_frames": 5,
}  # fmt: skip
PLAIN = ("--no-report", "--no-disk-cache", "--json")
Generate = Callable[..., Any]


@pytest.fixture
def generate(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path], tmp_path: Path
) -> Generate:
    manifest = write_manifest(LINE)

    def run(out: str, *flags: str) -> Any:
        return run_cli("generate", manifest, "-o", out, *PLAIN, *flags)

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file of a run that nothing happened to."""
    from hyimg_cli.cli import app

    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "jobs.jsonl").write_text(json.dumps(LINE))
    command = ["generate", str(folder / "jobs.jsonl"), "-o", str(folder / "out"), "--no-report"]
    assert app.run(command) == 0
    file: dict[str, Any] = json.loads((folder / "out/results.jsonl").read_text())["outputs"][0]
    return file


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The denoise steps that sessions tell."""
    told: list[int] = []
    inner = Session.run

    def run(self: Session, *arguments: Any) -> Iterator[Any]:
        for event in inner(self, *arguments):
            if is_step(event):
                told.append(event.done)
            yield event

    monkeypatch.setattr(Session, "run", run)
    return told


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the networks whose weights are read."""
    names: list[str] = []
    for module in (weights, encoders):
        inner = module.load_weights

        def load(component: Any, place: Any, inner: Any = inner) -> Any:
            names.append(component.name)
            return inner(component, place)

        monkeypatch.setattr(module, "load_weights", load)
    return names


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, times: int = 1
) -> None:
    """The first calls of a method raise."""
    inner, calls = getattr(owner, name), []

    def method(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) <= times:
            raise error
        return inner(*arguments)

    monkeypatch.setattr(owner, name, method)


def decoded_only(line: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """A done line without a denoise step of its own, and its file as it always is."""
    assert (line["status"], line["denoise_steps"]) == ("done", 0)
    assert line["outputs"] == [undisturbed]
    assert "all 5 steps were denoised before; decoded from saved latents" in line["notes"]
    times = line["timings_s"]
    assert times["denoise_first"] == times["denoise_rest"] == 0 < times["read"]


@pytest.mark.parametrize("every", ["0", "2"])
def test_behind_a_failed_decode_the_next_attempt_only_decodes(
    generate: Generate,
    undisturbed: dict[str, Any],
    steps: list[int],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    every: str,
) -> None:
    flags = ("--checkpoint-every", every, "--no-prewarm")
    fail_once(monkeypatch, DiffusersVideo, "decode_latents", RuntimeError("out of memory"))
    failed = generate("out", *flags)
    (line, _) = failed.json_lines
    assert (failed.code, line["status"], steps) == (1, "failed", [1, 2, 3, 4, 5])
    kept = "its denoised latents are saved, so the next attempt only decodes them"
    assert (line["warnings"], line["notes"]) == ([], [kept])
    assert kept in failed.err
    # Failed jobs are left alone, and so is what is kept of them.
    assert generate("out", *flags).code == 1
    steps.clear()
    read.clear()
    again = generate("out", *flags, "--retry-failed")
    assert again.code == 0, again.err
    decoded_only(again.json_lines[0], undisturbed)
    assert (steps, read) == ([], ["vae"]), "neither encoders nor transformer are needed"
    assert not (tmp_path / "out/latents").exists()


@pytest.mark.parametrize("every", ["0", "2"])
def test_behind_a_full_disk_the_same_command_only_decodes(
    generate: Generate,
    undisturbed: dict[str, Any],
    steps: list[int],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    every: str,
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    fail_once(monkeypatch, VideoWriter, "_end_stream", full)
    failed = generate("out", "--checkpoint-every", every)
    assert (failed.code, "the disk is full" in failed.err, len(steps)) == (3, True, 5)
    steps.clear()
    read.clear()
    again = generate("out", "--checkpoint-every", every)
    assert again.code == 0, again.err
    decoded_only(again.json_lines[0], undisturbed)
    assert (steps, read) == ([], ["vae"])


def test_a_film_that_cannot_be_encoded_is_told_to_be_denoised(
    generate: Generate, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, VideoWriter, "_end_stream", ValueError("no such colour"))
    failed = generate("out")
    (line, _) = failed.json_lines
    assert (failed.code, line["error"]["code"]) == (1, "job.internal")
    assert "the next attempt only decodes" in line["notes"][0]
    decoded_only(generate("out", "--retry-failed").json_lines[0], undisturbed)


def test_an_attempt_in_the_same_run_only_decodes(
    generate: Generate,
    undisturbed: dict[str, Any],
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = torch.OutOfMemoryError("too much")
    # Twice: once more is a part of the first attempt.
    fail_once(monkeypatch, DiffusersVideo, "decode_latents", short, times=2)
    ran = generate("out", "--max-retries", "1", "--no-prewarm")
    (line, _) = ran.json_lines
    assert (ran.code, line["attempt"], steps) == (0, 2, [1, 2, 3, 4, 5])
    decoded_only(line, undisturbed)


def test_a_film_in_smaller_tiles_is_replayed_in_them(
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line tells them, the record too; a recipe may ask for them from the start."""
    manifest = write_manifest(LINE | {"size": "160x48", "num_frames": 1, "steps": 1})
    short = torch.OutOfMemoryError("too much")
    fail_once(monkeypatch, DiffusersVideo, "decode_latents", short, times=2)
    (line, _) = run_cli("generate", manifest, "-o", "out", *PLAIN, "--no-prewarm").json_lines
    assert "tiles of 128 pixels" in line["warnings"][1]
    record = json.loads(Path("out/outputs/film.json").read_text())
    assert record["settings"]["decode"] == "half"
    again = run_cli("replay", "out/outputs/film.mp4", "-o", "again", "--expect-equal")
    assert again.code == 0, again.err
    Path("half.toml").write_text('[model]\ndecode_tiles = "half"\n')
    (asked, _) = run_cli(
        "generate", manifest, "-o", "asked", "--recipe", "half.toml", *PLAIN, "--no-prewarm"
    ).json_lines
    assert asked["outputs"][0]["pixel_sha256"] == line["outputs"][0]["pixel_sha256"]
    assert asked["warnings"] == []
    assert asked["key"] != line["key"]


def test_latents_that_the_disk_refuses_fail_nothing(
    generate: Generate,
    undisturbed: dict[str, Any],
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(latents_checkpoint, "replace_file", full)
        done = generate("whole").json_lines[0]
        fail_once(patch, DiffusersVideo, "decode_latents", RuntimeError("out of memory"))
        failed = generate("out", "--no-prewarm").json_lines[0]
    assert (done["status"], done["outputs"]) == ("done", [undisturbed])
    assert [one.message for one in caplog.records if one.name == latents_checkpoint.__name__] == [
        "film: the latents were not saved: the disk is full"
    ] * 2
    # Nothing is promised of what is not there.
    assert (
        failed["warnings"] == done["warnings"] == ["the latents were not saved: the disk is full"]
    )
    steps.clear()
    again = generate("out", "--retry-failed").json_lines[0]
    assert (again["denoise_steps"], len(steps), again["warnings"]) == (5, 5, [])
    assert again["outputs"] == [undisturbed]


@pytest.mark.parametrize("damage", ["cut", "another job's"])
def test_last_latents_that_are_not_the_jobs_are_left_aside_with_a_word(
    generate: Generate,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    damage: str,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(DiffusersVideo, "decode_latents", fails)
        other = () if damage == "cut" else ("--guidance-scale", "3")
        assert generate("out", "--no-prewarm", *other).code == 1
    kept = tmp_path / "out/latents/film.safetensors"
    if damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-1])
    line = generate("out", "--retry-failed").json_lines[0]
    assert (line["denoise_steps"], line["outputs"]) == (5, [undisturbed])
    word = "ignored damaged latents" if damage == "cut" else "ignored saved latents of another job"
    said = line["warnings" if damage == "cut" else "notes"]
    assert [note for note in said if note.startswith(word)]
    assert not kept.exists()


def test_what_is_left_to_denoise_beside_a_denoised_job_is_embedded_and_denoised(
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Path],
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = LINE | {"custom_id": "other", "prompt": "clouds", "seed": 2}
    command = ("generate", write_manifest(LINE, other), "-o", "out", *PLAIN, "--no-prewarm")
    fail_once(monkeypatch, DiffusersVideo, "decode_latents", RuntimeError("out of memory"))
    assert run_cli(*command, "--limit", "1").code == 1
    embedded: list[Progress] = []
    inner = Session.run

    def run(self: Session, *arguments: Any) -> Iterator[Any]:
        for event in inner(self, *arguments):
            if is_embedded(event):
                embedded.append(event)
            yield event

    monkeypatch.setattr(Session, "run", run)
    *lines, _ = run_cli(*command, "--retry-failed").json_lines
    assert [line["denoise_steps"] for line in lines] == [0, 5]
    decoded_only(lines[0], undisturbed)
    assert len(embedded) == 2, "the other's prompt, and the negative one"
