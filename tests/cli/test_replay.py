"""`hyimg replay`: what a batch made is made again alone, equal to the bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from hyimg_cli.cli import app
from hyimg_cli.media.images import pixel_digest, read_image

Run = Callable[..., Any]
STEPS = {"num_inference_steps": 3, "max_new_tokens": 24}
JOBS = [
    {"custom_id": "thought", "prompt": "a red circle", "seed": 1} | STEPS,
    {"custom_id": "edit", "prompt": "make it blue", "images": ["in/red.png"], "seed": 2} | STEPS,
    {"custom_id": "two", "prompt": "a blue square", "n": 2, "bot_task": "recaption"} | STEPS,
    {"custom_id": "told", "prompt": "a circle", "cot_text": "<think>A circle.</think>",
     "num_inference_steps": 3},
    {"custom_id": "greedy", "prompt": "a dog", "temperature": 0, "size": "1:1"} | STEPS,
]  # fmt: skip
FILM = {"custom_id": "film", "task": "t2v", "prompt": "a dog", "negative_prompt": "blur"}
FILM |= {"size": "64x64", "num_frames": 5, "num_inference_steps": 2}
# With files that are neither beside the result nor where its picture is.
STYLED = FILM | {"custom_id": "styled", "lora": "loras/far/style.safetensors@-0.5"}
KEPT = {"custom_id": "kept", "prompt": "make it blue", "images": ["in/red.png"], "seed": 2} | STEPS
KEPT |= {"keep_outside": True, "region": "masks/left.png"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is only read: `run/outputs`, its source picture in `in`."""
    home = tmp_path_factory.mktemp("made")
    (home / "in").mkdir()
    Image.new("RGB", (64, 48), (220, 30, 30)).save(home / "in" / "red.png")
    (home / "masks").mkdir()
    mask = Image.new("L", (64, 48), 0)
    mask.paste(255, (0, 0, 40, 48))
    mask.save(home / "masks" / "left.png")
    (home / "loras" / "far").mkdir(parents=True)
    layer, ones = "transformer.transformer_blocks.0.attn.to_q", torch.ones(2, 72)
    matrices = {f"{layer}.lora_A.weight": ones, f"{layer}.lora_B.weight": ones.T.contiguous()}
    save_file(matrices, home / "loras" / "far" / "style.safetensors")
    lines = "".join(json.dumps(job) + "\n" for job in (*JOBS, FILM, STYLED, KEPT))
    (home / "jobs.jsonl").write_text(lines)
    flags = ["--device", "cpu", "--no-prewarm", "--no-report", "-q", "--cache-dir", str(home / "c")]
    assert app.run(["generate", str(home / "jobs.jsonl"), "-o", str(home / "run"), *flags]) == 0
    return home / "run"


@pytest.fixture
def original(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a picture beside nothing, with changed pixels or record."""

    def copy(name: str, *, brighter: int = 0, **changed: Any) -> Path:
        with Image.open(made / "outputs" / f"{name}.png") as image:
            texts, pixels = dict(image.text), np.array(image)
        record = json.loads(texts["hyimg"])
        for key, value in changed.items():
            record[key] = record[key] | value if isinstance(value, dict) else value
        chunks = PngImagePlugin.PngInfo()
        chunks.add_text("hyimg", json.dumps(record))
        pixels[0, 0] = pixels[0, 0].astype(int) + brighter if brighter else pixels[0, 0]
        Image.fromarray(pixels).save(tmp_path / f"{name}.png", pnginfo=chunks)
        return tmp_path / f"{name}.png"

    return copy


def digest_of(path: Path) -> str:
    return pixel_digest(read_image(path).pixels)


def verdict_of(ran: Any) -> dict[str, Any]:
    found: dict[str, Any] = ran.json_lines[-1]["replay"]
    return found


@pytest.mark.parametrize("name", ["thought", "edit", "two-1", "told"])
def test_a_picture_of_a_batch_comes_out_equal_alone(
    run_cli: Run, made: Path, tmp_path: Path, name: str
) -> None:
    file = made / "outputs" / f"{name}.png"
    ran = run_cli("replay", file, "--expect-equal", "--json")
    assert ran.code == 0, ran.err
    assert verdict_of(ran)["equal"]
    assert verdict_of(ran)["compared"] == "pixels"
    again = tmp_path / "runs" / f"replay-{name}" / "outputs" / f"{name}.png"
    assert digest_of(again) == digest_of(file)
    assert "equal: the pixels of" in ran.err
    assert "apply to" not in ran.err  # settings of the record are not flags that somebody typed
    assert not (tmp_path / "runs" / f"replay-{name}" / "report.html").exists()


def test_outcomes_agree_beyond_pixels(
    run_cli: Run, made: Path, read_lines: Callable[..., Any]
) -> None:
    """Text and key too: a replay is the same job to the journal."""
    ran = run_cli("replay", made / "outputs" / "thought.png", "--json")
    outcome = ran.json_lines[0]
    (line,) = [one for one in read_lines(made / "results.jsonl") if one["custom_id"] == "thought"]
    for name in ("key", "cot_token_ids", "cot_text", "ratio_index"):
        assert outcome[name] == line[name], name
    assert line["batch"]["denoise"] > 1
    assert outcome["batch"]["denoise"] == 1


def test_settings_of_a_default_elsewhere_do_not_reach_a_replay(
    run_cli: Run, original: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"NUM_INFERENCE_STEPS": "9", "SEED": "9", "SIZE": "1:2", "SYSTEM_PROMPT": "x"}
    settings |= {"DTYPE": "bfloat16", "QUANTIZATION": "nf4", "METADATA": "0"}
    settings |= {"REPLICAS": "2", "TENSOR_PARALLEL_SIZE": "2", "OUTPUT_DIR": "elsewhere"}
    for name, value in settings.items():
        monkeypatch.setenv("HYIMG_" + name, value)
    ran = run_cli("replay", original("thought"), "--expect-equal", "--json")
    assert ran.code == 0, ran.err
    outcome = ran.json_lines[0]
    assert (outcome["replica"], outcome["parallel"]) == (None, None)
    assert not Path("elsewhere").exists()


def test_a_difference_is_measured_and_explained(
    run_cli: Run, original: Callable[..., Path]
) -> None:
    file = original("thought", brighter=-7, packages={"torch": "2.11.0"}, settings={"threads": "7"})
    ran = run_cli("replay", file, "--json")
    found = verdict_of(ran)
    assert ran.code == 0
    assert not found["equal"]
    assert 0 < found["max_abs"] <= 255
    assert 20 < found["psnr"] < 80
    reasons = " ".join(found["reasons"])
    assert "torch 2.11.0, now" in reasons
    assert "threads 7, now" in reasons
    assert "not equal: the pixels of" in ran.err
    assert run_cli("replay", file, "--expect-equal", "-q").code == 1


def test_a_flag_wins_over_the_record_and_is_told(
    run_cli: Run, original: Callable[..., Path]
) -> None:
    ran = run_cli("replay", original("thought"), "--quantization", "nf4", "--json")
    found = verdict_of(ran)
    assert (ran.code, found["equal"]) == (0, False)
    assert "experts by default, now nf4" in found["reasons"]


def test_another_size_is_told_without_a_distance(
    run_cli: Run, original: Callable[..., Path]
) -> None:
    file = original("greedy")
    with Image.open(file) as image:
        chunks = PngImagePlugin.PngInfo()
        chunks.add_text("hyimg", image.text["hyimg"])  # type: ignore[attr-defined]
        image.resize((32, 32)).save(file, pnginfo=chunks)
    found = verdict_of(run_cli("replay", file, "--json"))
    assert (found["equal"], found["psnr"]) == (False, None)
    assert "size" in found["not_measured"]


def test_a_moved_picture_asks_for_its_sources(
    run_cli: Run, made: Path, original: Callable[..., Path], tmp_path: Path
) -> None:
    file = original("edit")
    ran = run_cli("replay", file)
    assert ran.code == 2
    assert 'error[replay.missing-image]: source image "red.png" not found in' in ran.err
    assert "--images-from" in ran.err
    there = tmp_path / "elsewhere"
    shutil.copytree(made.parent / "in", there)
    ran = run_cli("replay", file, "--images-from", there, "--expect-equal")
    assert ran.code == 0, ran.err
    Image.new("RGB", (64, 48), (30, 220, 30)).save(there / "red.png")
    ran = run_cli("replay", file, "--images-from", there)
    assert ran.code == 2
    assert "error[replay.changed-image]" in ran.err
    ran = run_cli("replay", file, "--images-from", there, "--allow-changed", "--json")
    assert ran.code == 0
    assert "note: red.png is not the recorded source image" in ran.err
    assert "a source image is different" in verdict_of(ran)["reasons"]


def test_a_film_comes_out_equal_before_compression(
    run_cli: Run, made: Path, tmp_path: Path
) -> None:
    ran = run_cli("replay", made / "outputs" / "film.mp4", "--expect-equal", "--json")
    assert ran.code == 0, ran.err
    assert verdict_of(ran)["compared"] == "frames before compression"
    moved = tmp_path / "moved"
    moved.mkdir()
    for suffix in (".mp4", ".json"):
        shutil.copy(made / "outputs" / f"film{suffix}", moved)
    ran = run_cli("replay", moved / "film.json", "--expect-equal", "--json")
    assert ran.code == 0, ran.err
    assert verdict_of(ran)["compared"] == "frames as decoded"
    (moved / "film.mp4").unlink()
    ran = run_cli("replay", moved / "film.json")
    assert ran.code == 0
    assert "no video next to film.json to compare with" in ran.err


@pytest.mark.parametrize("file", ["styled.mp4", "kept.png"])
def test_a_job_with_files_elsewhere_comes_out_equal(
    run_cli: Run, made: Path, tmp_path: Path, file: str
) -> None:
    """A LoRA, and a region's mask: from the run's folder, and from one that was joined."""
    again = ("--expect-equal", "-q", "-o", tmp_path / "again")
    ran = run_cli("replay", made / "outputs" / file, *again)
    assert ran.code == 0, ran.err
    joined = tmp_path / "far" / "er" / "all"
    assert run_cli("merge", made, "-o", joined).code == 0
    assert run_cli("check", joined / "manifest.resolved.jsonl").code == 0
    ran = run_cli("replay", joined / "outputs" / file, *again)
    assert ran.code == 0, ran.err


def test_nothing_of_a_run_is_written_over(run_cli: Run, made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    file = run / "outputs" / "thought.png"
    assert "error[replay.itself]" in run_cli("replay", file, "-o", run).err
    other = tmp_path / "other"
    shutil.copytree(made, other)
    (other / "outputs" / "thought.png").unlink()
    ran = run_cli("replay", file, "-o", other)
    assert ran.code == 2
    assert "error[output.other-run]" in ran.err
    assert not (other / "outputs" / "thought.png").exists()
    assert {path: path.read_bytes() for path in before} == before


def test_a_replay_is_made_anew_each_time(
    run_cli: Run, original: Callable[..., Path], fake_session: Any
) -> None:
    fake_session.ran = []
    file = original("greedy", job={"prompt": "fail"})
    for _ in range(2):
        ran = run_cli("replay", file, "-o", "out")
        assert ran.code == 1
        assert "greedy: failed[job.fake]" in ran.err
        assert f"to run the failed jobs again: hyimg replay {file} -o out\n" in ran.err
    assert fake_session.ran == ["greedy", "greedy"]


@pytest.mark.usefixtures("fake_session")
def test_an_interrupted_replay_says_how_to_go_on(
    run_cli: Run, original: Callable[..., Path]
) -> None:
    ran = run_cli("replay", original("greedy", job={"prompt": "SIGINT"}))
    assert ran.code == 130
    assert "to resume: hyimg replay" in ran.err


def test_a_folder_of_replays_is_used_again(
    run_cli: Run, original: Callable[..., Path], fake_session: Any
) -> None:
    """Under another name of the file too; not for another job."""
    file = original("greedy", job={"prompt": "fail"})
    assert run_cli("replay", file, "-o", "out").code == 1
    assert run_cli("replay", file.rename("renamed.png"), "-o", "out").code == 1
    other = original("thought", job={"prompt": "fail"})
    assert "error[output.other-run]" in run_cli("replay", other, "-o", "out").err


def test_files_without_a_job_exit_2(run_cli: Run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert "error[metadata.none]" in run_cli("replay", "a.png").err
    ran = run_cli("replay", "gone.png")
    assert (ran.code, ran.out) == (2, "")
    assert not (tmp_path / "runs").exists()
