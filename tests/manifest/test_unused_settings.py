"""Settings that no job of the manifest uses are reported by the name that the user wrote."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.manifest.unused_settings import without_effect
from hyimg_cli.models.registry import model_card, video_card
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.card import Networks
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest, VideoJob
from hyimg_cli.spec.options import KeepOutside

FILM: dict[str, Any] = {"task": "t2v", "prompt": "a dog"}


@pytest.mark.parametrize(("only", "job"), [("pictures", VideoJob), ("videos", ImageJob)])
def test_what_the_other_kind_of_job_holds_is_not_its_alone(only: str, job: type) -> None:
    theirs = {row.name for row in SETTINGS.values() if row.only == only} - {"model"}
    assert theirs
    assert not theirs & {field.name for field in fields(job)}


def test_each_setting_is_named_as_it_was_given(make_job: Any) -> None:
    environ = {"HYIMG_PROMPT_CACHE": "0"}
    settings = settle(
        {"vae_patch_parallel_size": 2, "quantization": "fp8"}, environ, {"frames": "png"}
    )
    names = "--vae-patch-parallel-size, frames of the recipe"
    both = [f"{names} apply to videos only; this manifest has none"]
    of_latents = "videos and diffusers image models only; this manifest has none"
    other = f"HYIMG_PROMPT_CACHE applies to {of_latents}"
    assert [*without_effect(settings, [make_job()], model_card, video_card)] == [*both, other]
    card = replace(model_card("tiny-image"), networks=Networks(component_bytes=()))
    assert [*without_effect(settings, [make_job()], lambda model: card, video_card)] == both
    assert [*without_effect(settings, [], model_card, video_card)] == []


@pytest.mark.parametrize("command", ["check", "plan"])
def test_commands_tell_it_on_stderr(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path], command: str
) -> None:
    off = ["--no-kv-reuse", "--prefix-cache-mb", "9"]
    films, both = write_manifest(FILM, name="films.jsonl"), write_manifest(FILM, {"prompt": "x"})
    ran = run_cli(command, films, *off)
    names = "--no-kv-reuse, --prefix-cache-mb"
    assert f"note: {names} apply to pictures only; this manifest has none\n" in ran.err
    assert "appl" not in ran.out
    alone = run_cli(command, films, "--no-kv-reuse").err
    assert "note: --no-kv-reuse applies to pictures only; this manifest has none\n" in alone
    assert "appl" not in run_cli(command, films, *off, "-q").err
    assert "appl" not in run_cli(command, both, *off, "--frames", "png").err
    assert "appl" not in run_cli(command, films).err


def test_what_only_models_with_a_camera_read_is_told_of_other_videos() -> None:
    settings = settle({"clips_together": 2}, {}, {})
    told = ["--clips-together applies to models that follow a camera only; this manifest has none"]
    film = VideoJob(
        custom_id="film",
        **FILM,
        negative_prompt="",
        model="tiny-video",
        seed=1,
        size=Size(48, 32),
        num_frames=5,
        fps=8,
        num_inference_steps=2,
        guidance_scale=1.0,
        flow_shift=5.0,
    )
    plain = video_card("tiny-video")
    moving = replace(plain, follows=plain.follows | {"camera"})
    assert [*without_effect(settings, [film], model_card, lambda model: plain)] == told
    assert [*without_effect(settings, [film], model_card, lambda model: moving)] == []
    assert [*without_effect(settle({}, {}, {}), [film], model_card, video_card)] == []


def test_generate_tells_it_too(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path]
) -> None:
    ran = run_cli("generate", write_manifest({"prompt": "x"}), "--dry-run", "--frames", "png")
    assert "note: --frames applies to videos only" in ran.err


def test_sizes_that_a_model_does_not_make_are_named(make_job: Any) -> None:
    card = replace(
        model_card("tiny-image"),
        name="editor",
        networks=Networks(component_bytes=()),
        size_multiple=16,
        buckets=(),
    )
    asked = [
        SizeRequest(512, 504),
        SizeRequest(512, 504),
        SizeRequest(152, 72),
        SizeRequest(64, 96),
    ]
    jobs = [make_job(size=size) for size in (*asked, SizeRequest())]
    kept = make_job(size=SizeRequest(50, 50), images=("a.png",), outside=KeepOutside())
    aligned = make_job(size=SizeRequest(50, 50), images=("a.png",), infer_align_image_size=True)
    every = [*jobs, kept, aligned]
    found = [*without_effect(settle({}, {}, {}), every, lambda model: card, video_card)]
    assert found == [
        "editor does not make the size of 3 jobs: 504x512 is fitted to 496x512, "
        "72x152 is fitted to 64x144"
    ]
