"""Sessions of image-to-video: encoded once by content, bad pictures alone fail, kept latents and
LoRAs are a job's own.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_video_tiny import pixels, run, runs_of, tiny_job
from PIL import Image
from safetensors.torch import save_file
from tiny_video import write_start

from hyimg_cli.engine.sources import probe_sources
from hyimg_cli.journal import keys
from hyimg_cli.models.diffusers_video.wan import Wan
from hyimg_cli.settings.run import CacheConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import Lora


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint, two pictures, a broken one, and a LoRA of one layer."""
    top = tmp_path_factory.mktemp("start")
    write_start(top / "wan", "wan21")
    dice = np.random.default_rng(1)
    for name in ("one", "two"):
        Image.fromarray(dice.integers(0, 256, (30, 50, 3), dtype=np.uint8)).save(
            top / f"{name}.png"
        )
    (top / "broken.png").write_bytes((top / "one.png").read_bytes()[:-900])
    save_file(
        {
            "transformer.blocks.0.attn1.to_v.lora_A.weight": torch.randn(2, 24),
            "transformer.blocks.0.attn1.to_v.lora_B.weight": torch.randn(24, 2),
        },
        top / "style.safetensors",
    )
    return top


def job(top: Path, custom_id: str, image: str = "one.png", **changes: Any) -> VideoJob:
    facts: dict[str, Any] = {"size": Size(32, 32), "num_inference_steps": 1, "guidance_scale": 1.0}
    facts["model"] = str(top / "wan")
    return tiny_job(
        custom_id,
        task="i2v",
        images=(str(top / image),),
        fit="stretch",
        **(facts | changes),
    )


@pytest.fixture(scope="module")
def jobs(top: Path) -> list[VideoJob]:
    """Two pictures, two sizes, two lengths; a LoRA between two jobs without."""
    shutil.copy(top / "one.png", top / "again.png")
    lora = (Lora(str(top / "style.safetensors")),)
    return [
        job(top, "plain"),
        job(top, "styled", lora=lora),
        job(top, "wide", size=Size(32, 64), image="again.png"),
        job(top, "long", num_frames=9),
        job(top, "broken", image="broken.png"),
        job(top, "other", image="two.png"),
    ]


@pytest.fixture(scope="module")
def first(jobs: list[VideoJob], top: Path) -> dict[str, Outcome]:
    return run(jobs, top / "first", cache=CacheConfig(top / "kept"))


def test_each_picture_is_encoded_once_by_its_content(first: dict[str, Outcome]) -> None:
    """Of three pictures' worth of files two differ; the VAE sees one at each size and length."""
    assert runs_of(first) == {"text_encoder": 1, "image_encoder": 2, "vae": 4}
    assert first["plain"].outputs[0].pixel_sha256 != first["other"].outputs[0].pixel_sha256


def test_a_broken_picture_fails_its_own_job(first: dict[str, Outcome]) -> None:
    failed = [name for name, one in first.items() if one.status == "failed"]
    error = first["broken"].error
    assert error is not None
    assert (failed, error.code) == (["broken"], "source.truncated")


def test_a_broken_picture_is_found_before_a_model_loads(jobs: list[VideoJob], top: Path) -> None:
    (error,) = probe_sources(jobs).errors.values()
    assert (error.code, error.where) == ("source.truncated", str(top / "broken.png"))


def test_a_second_run_encodes_nothing(
    first: dict[str, Outcome], jobs: list[VideoJob], top: Path, tmp_path: Path
) -> None:
    """In another order, with the LoRA's job first: the same pixels."""
    whole = [one for one in jobs if one.custom_id != "broken"][::-1]
    second = run(whole, tmp_path, cache=CacheConfig(top / "kept"))
    assert runs_of(second) == {}
    assert pixels(second) == pixels(first)
    assert first["styled"].outputs[0].pixel_sha256 != first["plain"].outputs[0].pixel_sha256


def test_a_failure_in_the_middle_leaves_no_trace(
    first: dict[str, Outcome], jobs: list[VideoJob], top: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a job with a LoRA on: those behind it are as they were."""
    guide_of = Wan.guide

    def faulty(self: Any, job: VideoJob, *more: Any) -> Any:
        guide = guide_of(self, job, *more)
        if job.custom_id != "styled":
            return guide

        def fails(index: int, velocities: Any) -> torch.Tensor:
            guide(index, velocities)
            raise RuntimeError("a kernel failed")

        return fails

    monkeypatch.setattr(Wan, "guide", faulty)
    three = [jobs[1], jobs[0], jobs[5]]
    found = run(three, tmp_path, cache=CacheConfig(top / "kept"))
    assert found["styled"].status == "failed"
    assert pixels(found) == {name: pixels(first)[name] for name in ("plain", "other")}


def test_a_failing_low_network_and_latents_that_are_not_numbers_hurt_no_other_job(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Wan 2.2's pair, with LoRAs on both."""
    write_start(top / "pair", "a14b")
    pair = tuple(Lora(str(top / "style.safetensors"), 1.0, on) for on in ("high", "low"))
    two = {"num_inference_steps": 2, "guidance_scale": 2.0, "model": str(top / "pair")}
    clean = [job(top, name, seed=seed, **two) for seed, name in enumerate(("plain", "other"))]
    bad = [job(top, name, lora=pair, **two) for name in ("raises", "nan")]
    inner, at_work, hooked = Wan.new_branch, [""], list[Any]()

    def faulty(self: Wan, inputs: Any) -> Any:
        def hook(_module: Any, _inputs: Any, made: Any) -> Any:
            if at_work[0] == "raises":
                raise RuntimeError("a kernel failed")
            return (made[0] * float("nan"),) if at_work[0] == "nan" else None

        at_work[0] = inputs.job.custom_id
        if not hooked:
            hooked.append(self.networks[1].register_forward_hook(hook))
        return inner(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(Wan, "new_branch", faulty)
        found = run([bad[0], clean[0], bad[1], clean[1]], tmp_path / "faulty")
    assert [found[name].status for name in ("raises", "nan")] == ["failed", "failed"]
    error = found["nan"].error
    assert error is not None
    assert (error.code, hooked != []) == ("output-video.not-finite", True)
    expected = run(clean, tmp_path / "clean")
    assert pixels(found) == pixels(expected)


def test_the_resume_key_is_of_bytes_and_not_of_paths(top: Path, tmp_path: Path) -> None:
    config = RunConfig(output=OutputConfig(tmp_path))
    own = job(top, "a", lora=(Lora(str(top / "style.safetensors")),))

    def key(one: VideoJob) -> str:
        return keys.job_keys([one], config)[one.custom_id]

    copies = {name: tmp_path / name for name in ("one.png", "style.safetensors")}
    for name, copy in copies.items():
        shutil.copy(top / name, copy)
    moved = replace(
        own,
        images=(str(copies["one.png"]),),
        lora=(Lora(str(copies["style.safetensors"])),),
    )
    assert key(moved) == key(own)
    Image.open(top / "one.png").rotate(180).save(copies["one.png"])
    changed = [key(moved)]
    changed += [
        key(replace(own, fit="crop")),
        key(replace(own, lora=())),
        key(job(top, "a", "two.png")),
    ]
    changed += [key(replace(own, scheduler="euler"))]
    changed += [key(replace(own, lora=(Lora(own.lora[0].file, 0.5),)))]
    assert len({key(own), *changed}) == 7
