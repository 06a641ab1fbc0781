"""A tiny checkpoint, made by its recipe, through the commands: lines checked, clips made, resumed,
replayed; what cannot be run is refused with the reason.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from event_kinds import is_done, is_step
from PIL import Image
from tiny_checkpoints import lingbot_world

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import CheckpointError, UsageError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.available import AvailableMemory
from hyimg_cli.memory.fit import check_fit
from hyimg_cli.models import registry
from hyimg_cli.models.lingbot_world.denoising import ChunkDenoiser
from hyimg_cli.models.lingbot_world.model import LingBotWorld
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.work import video_work

from .conftest import JOB, NUMBERS, write_path

LINE = {"task": "i2v", "prompt": "a walk", "images": "start.png", "seed": 1, "size": "48x32"}
GB = 1_000_000_000


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lingbot") / "lingbot-world"
    lingbot_world.write(folder)
    return folder


@pytest.fixture
def flags(published: Path) -> tuple[str, ...]:
    return "--video-model", str(published), "--video-components", str(published / "components")


@pytest.fixture
def manifest(tmp_path: Path, write_manifest: Callable[..., Path]) -> Callable[..., str]:
    """Lines over `LINE`, beside a picture and a camera path of 24 poses."""
    colours = np.random.default_rng(1).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    Image.fromarray(colours).save(tmp_path / "start.png")
    write_path(tmp_path / "walk", NUMBERS["clip.poses"][:24], NUMBERS["clip.intrinsics"][:24])

    def write(*lines: dict[str, Any]) -> str:
        ids = ({"custom_id": f"job-{number}"} for number in range(len(lines)))
        return str(
            write_manifest(*({**own, **LINE, **line} for own, line in zip(ids, lines, strict=True)))
        )

    return write


def lines_of(out: Path) -> dict[str, Any]:
    found = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in found}


def test_a_line_is_checked_before_anything_is_loaded(
    run_cli: Any, manifest: Any, flags: Any, tmp_path: Path
) -> None:
    """One fault a line: of the camera its file, shape, numbers and length; what is not there."""
    poses = np.load(tmp_path / "walk" / "poses.npy")
    broken = {"flat": poses[:, :3], "nan": poses * np.nan, "skewed": poses * 2, "short": poses[:5]}
    for name, values in broken.items():
        shutil.copytree(tmp_path / "walk", tmp_path / name)
        np.save(tmp_path / name / "poses.npy", values)
    shutil.copytree(tmp_path / "walk", tmp_path / "bare")
    (tmp_path / "bare" / "intrinsics.npy").unlink()
    shutil.copytree(tmp_path / "walk", tmp_path / "sightless")
    np.save(tmp_path / "sightless" / "intrinsics.npy", np.zeros((1, 4)))
    faults = {
        "the line has no camera": {},
        "'w10' is not KEYS-FRAMES": {"camera": "w10"},
        "the camera path is too long (22 frames, the video has 21)": {"camera": "w-20,s-2"},
        "file not found": {"camera": "nowhere.npy"},
        "is [24, 3, 4]; expected [N, 4, 4]": {"camera": "flat"},
        "pose 0 is not finite": {"camera": "nan"},
        "pose 0 is not a rotation and translation": {"camera": "skewed/poses.npy"},
        "has too few poses (5 for 21 frames)": {"camera": "short"},
        "intrinsics.npy": {"camera": "bare"},
        "is invalid (0, 0, 0, 0)": {"camera": "sightless"},
        "25 frames do not fill chunks of 3 latent frames (12 * k + 9)": {
            "num_frames": 25,
            "camera": "w-3",
        },
        "the model runs 4 steps, not 8": {"steps": 8, "camera": "w-3"},
        "does not follow guidance_scale: it runs without guidance": {
            "guidance_scale": 5,
            "camera": "w-3",
        },
        "a start image as well as a prompt": {"task": "t2v", "images": None, "camera": "w-3"},
    }
    rows = [{k: v for k, v in row.items() if v is not None} for row in faults.values()]
    path = Path(manifest(*rows))
    text = path.read_text().splitlines()
    text[-1] = text[-1].replace('"images": "start.png", ', "")
    path.write_text("\n".join(text) + "\n")
    ran = run_cli("check", path, *flags, "--json")
    assert ran.code == 2
    told = {one["fault"]["where"]: one["fault"] for one in ran.json_lines if "fault" in one}
    for number, what in enumerate(faults, 1):
        own = [one["message"] for where, one in told.items() if f".jsonl:{number}: " in where]
        assert any(what in message for message in own), (what, own)
    other = run_cli("check", manifest({"camera": "w-3"}), "--json")
    assert "tiny-video does not follow camera" in other.out


def test_a_plan_counts_the_components_of_their_own_folder(
    run_cli: Any, manifest: Any, flags: Any, published: Path
) -> None:
    card = registry.video_card(str(published), None, str(published / "components"))
    sizes = card.loaded_bytes("bfloat16")
    assert max(sizes, key=sizes.__getitem__) == "vae", "not in the published folder"
    gpu = ("--device", "cuda", "--dtype", "bfloat16", "--cpu-offload", "model", "--json")
    plan = run_cli("plan", manifest({"camera": "w-5"}), *flags, *gpu).json_lines[0]
    assert plan["on_gpu_bytes"] == {str(published): sizes["vae"]}
    assert plan["groups"][0]["memory"]["decode"]["weights"] == sizes["vae"]


def test_clips_are_made_skipped_told_and_replayed(
    run_cli: Any, manifest: Any, flags: Any, tmp_path: Path
) -> None:
    jobs = manifest({"camera": "w-5,il-3", "size": "auto"}, {"camera": "walk", "num_frames": 9})
    plan = run_cli("plan", jobs, *flags, "--json").json_lines[0]
    assert [video["denoise_forwards"] for video in plan["groups"]] == [9, 4]
    out = tmp_path / "out"
    assert "2 done, 0 failed" in run_cli("generate", jobs, *flags, "-o", out).err
    lines = lines_of(out)
    assert [lines[name]["denoise_steps"] for name in ("job-0", "job-1")] == [9, 4]
    # One prompt, one picture in two lengths; the prewarmed stand-ins find them too.
    assert lines["job-1"]["cache"]["encoder_runs"] == {"text_encoder": 1, "vae": 2}
    resolved = (out / "manifest.resolved.jsonl").read_text().splitlines()
    first, second = map(json.loads, resolved)
    assert (first["camera"], first["size"], first["flow_shift"]) == ("w-5,il-3", "48x16", 10.0)
    assert (out / second["camera"]).samefile(tmp_path / "walk" / "poses.npy")
    # Another path of the same name is another clip; the other line is done.
    np.save(tmp_path / "walk" / "poses.npy", np.load(tmp_path / "walk" / "poses.npy")[::-1])
    assert run_cli("generate", jobs, *flags, "-o", out).code == 2
    again = run_cli("generate", jobs, *flags, "-o", out, "--force")
    assert "1 done, 0 failed, 1 skipped" in again.err
    assert lines_of(out)["job-1"]["outputs"] != lines["job-1"]["outputs"]
    film = out / "outputs" / "job-1.mp4"
    # The camera path lies in another folder than the picture.
    same = run_cli("replay", film, "--model", flags[1], *flags[2:], "-o", tmp_path / "again",
                   "--images-from", tmp_path, "--expect-equal")  # fmt: skip
    assert same.code == 0, same.err


def made(session: Session, job: VideoJob, out: Path, stop: int = 0) -> Outcome | None:
    """The job's line; None where the run ended behind a step, as a kill would end it."""
    with RunFolder(out) as folder:
        for event in session.run(make_plan([job], registry.model_card), folder):
            if is_step(event) and event.done == stop:
                return None
            if is_done(event):
                return event.outcome
    raise AssertionError("the job was made")


def test_a_killed_clip_goes_on_behind_its_last_chunk(
    published: Path, manifest: Any, tmp_path: Path
) -> None:
    """Killed in its first chunk, between two, inside the second: pixels and counts are those of a
    run that nobody disturbed.
    """
    manifest()
    job = replace(
        JOB,
        model=str(published),
        prompt="a walk",
        images=(str(tmp_path / "start.png"),),
        num_frames=21,
    )
    model = ModelChoice(video_components=str(published / "components"), device="cpu")
    cold = BatchConfig(prewarm=False)
    with Session(RunConfig(OutputConfig(tmp_path), model=model, batch=cold)) as session:
        whole = made(session, job, tmp_path / "whole")
        assert whole is not None
        assert whole.denoise_steps == 9
        for stop, kept in ((2, 0), (5, 5), (7, 5)):
            out = tmp_path / f"stopped-{stop}"
            assert made(session, job, out, stop) is None
            again = made(session, job, out)
            assert again is not None
            assert again.denoise_steps == 9 - kept
            assert again.outputs[0].pixel_sha256 == whole.outputs[0].pixel_sha256
            went_on = any(f"after denoise step {kept}" in note for note in again.notes)
            assert went_on == bool(kept)


def test_clips_together_are_asked_for_and_told(
    run_cli: Any, manifest: Any, flags: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three, of which those of one prompt stand side by side; the third is alone. What fails
    together goes on in halves, and says so.
    """
    base = {"num_frames": 9, "camera": "w-5"}
    jobs, out = manifest(base, base | {"prompt": "a lake"}, base | {"seed": 3}), tmp_path / "out"
    more = ("--no-prewarm", "--clips-together", 2)
    assert "3 done, 0 failed" in run_cli("generate", jobs, *flags, "-o", out, *more).err
    lines = lines_of(out)
    assert [lines[f"job-{number}"]["batch"]["denoise"] for number in range(3)] == [2, 1, 2]
    assert len({line["outputs"][0]["pixel_sha256"] for line in lines.values()}) == 3
    plain = ChunkDenoiser.step

    def step(self: ChunkDenoiser, index: int, latents: Any) -> Any:
        if len(latents) > 1 and index == 2:
            raise torch.OutOfMemoryError("too many")
        return plain(self, index, latents)

    monkeypatch.setattr(ChunkDenoiser, "step", step)
    again = run_cli("generate", jobs, *flags, "-o", tmp_path / "alone", *more)
    assert "3 done, 0 failed" in again.err
    alone = lines_of(tmp_path / "alone")
    assert {line["batch"]["denoise"] for line in alone.values()} == {1}
    notes = [" ".join(alone[f"job-{number}"]["warnings"]) for number in range(3)]
    assert ["out of memory" in note for note in notes] == [True, False, True]


def test_both_layouts_are_the_same_model(published: Path, tmp_path: Path) -> None:
    converted = tmp_path / "converted"
    lingbot_world.write(converted, converted=True)
    components = str(published / "components")
    loaded = [
        registry.load_video(ModelChoice(str(folder), device="cpu", video_components=parts))
        for folder, parts in ((published, components), (converted, None))
    ]
    states = []
    for model in loaded:
        assert isinstance(model, LingBotWorld)
        states.append(model.networks[0].state_dict() | model.vae.module.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(values, states[1][name]) for name, values in states[0].items())
    assert loaded[0].prompts.key("a walk") == loaded[1].prompts.key("a walk")
    assert loaded[0].parameter_count == loaded[1].parameter_count


def test_what_is_not_run_is_refused_with_the_reason(
    run_cli: Any, manifest: Any, flags: Any, published: Path, tmp_path: Path
) -> None:
    jobs = manifest({"camera": "w-5"})
    lone = run_cli("check", jobs, *flags[:2])
    assert lone.code == 3
    assert "--video-components" in lone.err
    shared = run_cli("generate", jobs, *flags, "-o", tmp_path / "r", "--cfg-parallel-size", "2")
    assert "neither tiles nor guidance branches" in shared.err
    others: tuple[dict[str, Any], ...] = (
        {"quantization": "fp8"},
        {"compile_blocks": True},
        {"cpu_offload": "group"},
    )
    for settings in others:
        unfollowed = ModelChoice(
            str(published), device="cpu", video_components=flags[3], **settings
        )
        with pytest.raises(UsageError, match="tiny-lingbot-world does not follow"):
            registry.load_video(unfollowed)
    changes = {
        "v2": {"local_attn_size": 18, "sink_size": 6},
        "act": {"control_type": "act"},
        "t2v": {"model_type": "t2v"},
    }
    for name, change in changes.items():
        folder = tmp_path / name / "lingbot_world_fast"
        folder.mkdir(parents=True)
        config = json.dumps(lingbot_world.ORIGINAL | change)
        (folder / "config.json").write_text(config)
        with pytest.raises(CheckpointError) as refused:
            registry.video_card(str(folder.parent))
        assert refused.value.code == "checkpoint.family"
        assert "CC BY-NC-SA" in refused.value.hint
    base = tmp_path / "base" / "high_noise_model"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(lingbot_world.ORIGINAL))
    with pytest.raises(CheckpointError, match="two experts"):
        registry.video_card(str(base.parent))
    # A tensor too many, or one too few.
    for lacks in (True, False):
        copy = tmp_path / f"lacks-{lacks}"
        shutil.copytree(published, copy)
        config = lingbot_world.ORIGINAL | {"num_layers": 1 + 2 * lacks}
        (copy / "lingbot_world_fast" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="missing" if lacks else "unexpected"):
            registry.load_video(ModelChoice(str(copy), video_components=flags[3]))


def test_a_clip_that_does_not_fit_is_refused_with_the_number(tmp_path: Path) -> None:
    """At the released size: K/V of 819,200 bytes a token, 26.8 GB of a portrait clip of 81."""
    folder = tmp_path / "real" / "lingbot_world_fast"
    folder.mkdir(parents=True)
    numbers = {"dim": 5120, "num_heads": 40, "num_layers": 40, "ffn_dim": 13824}
    config = {k: v for k, v in lingbot_world.ORIGINAL.items() if k not in ("text_dim", "text_len")}
    (folder / "config.json").write_text(json.dumps(config | {"freq_dim": 256} | numbers))
    index = {"metadata": {"total_size": 37_100_000_000}, "weight_map": {"a": "b.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    card = registry.video_card(str(folder.parent))
    job = replace(JOB, model=str(folder.parent), size=Size(832, 480), num_frames=81)
    assert card.chunks is not None
    assert card.chunks.kv_bytes == 819_200
    work = video_work(job, card)
    assert (work.tokens, work.steps) == (32_760, 34)
    assert work.tokens * card.chunks.kv_bytes == pytest.approx(26.8 * GB, rel=2e-3)
    config_of = RunConfig(OutputConfig(tmp_path), model=ModelChoice(dtype="bfloat16", device="cpu"))
    found = check_fit(job.model, [job], config_of, AvailableMemory(48 * GB))
    assert not found.is_enough
    refusal = str(found.refusal())
    assert "one job another 32.3 GB" in refusal
    assert "fewer frames or a smaller size" in refusal
    assert check_fit(job.model, [job], config_of, AvailableMemory(80 * GB)).is_enough


@pytest.mark.parametrize("command", ["check", "plan", "generate"])
def test_a_setting_that_the_family_does_not_follow_is_refused_before_loading(
    run_cli: Any, manifest: Any, flags: Any, command: str
) -> None:
    line = manifest({"camera": "w-3"})
    ran = run_cli(command, line, *flags, "--quantization", "fp8")
    assert (ran.code, ran.err.count("does not follow quantization fp8")) == (2, 1), ran.err
