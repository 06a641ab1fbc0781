"""Tokens of Wan's forwards over ranks: within rounding the latents of one process, also with two
transformers, a LoRA on the layer that gathers, a step cache, a timestep for each token; and what
cannot be split is refused before anything loads.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from models.diffusers_video.conftest import Draw
from models.diffusers_video.test_lora import in_librarys_names, matrices, write
from tiny_video import TINY_VIDEO, write_start
from torch import Tensor

from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.settings.run import CONTEXT_BACKENDS, ModelChoice, ParallelConfig
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import Lora
from hyimg_cli.spec.step_cache import StepCache

Run = Callable[..., Any]
FLAG = "--context-parallel-size"


@contextmanager
def shared(folder: Path, device: str = "cpu") -> Iterator[tuple[DiffusersVideo, VideoRanks]]:
    """A model whose tokens two ranks share."""
    choice = ModelChoice(str(folder), dtype="float32", device=device)
    model = registry.load_video(choice)
    ranks = VideoRanks(model, choice, ParallelConfig(context_ranks=2))
    ranks.load()
    try:
        yield model, ranks
    finally:
        ranks.stop()


def is_rounding(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-4)


def test_two_ranks_make_the_latents_of_one_process(
    models: dict[str, DiffusersVideo],
    folders: dict[str, Path],
    draw: Draw,
    job: VideoJob,
    tmp_path: Path,
) -> None:
    alone = models["wan22"]
    layers = ["proj_out", "blocks.0.attn1.to_q", "blocks.1.ffn.net.0.proj"]
    pairs = in_librarys_names(matrices(alone.networks[0], layers))
    file = str(write(tmp_path / "head.safetensors", pairs))
    short = replace(job, size=Size(32, 48), num_frames=5, flow_shift=2.0, guidance_scale_2=3.0)
    jobs = {
        "plain": short,
        "LoRA": replace(short, lora=(Lora(file, 1.0, "high"), Lora("", 0.0, "low"))),
        "no LoRA": replace(short, seed=4),
        "step cache": replace(short, num_inference_steps=12, step_cache=StepCache()),
    }
    seen: list[tuple[int, ...]] = []
    expected = {name: draw(alone, one) for name, one in jobs.items()}
    assert not is_rounding(expected["LoRA"], expected["plain"])
    with shared(folders["wan22"]) as (model, ranks):
        last: Any = model.networks[0].blocks[-1]
        last.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
        for name, one in jobs.items():
            assert is_rounding(draw(model, one), expected[name]), name
        report = ranks.report()
    assert (report.context_ranks, report.branch_ranks, report.decode) == (2, 1, None)
    # This rank's blocks had half of 2 x 2 x 3 tokens.
    assert {shape[1] for shape in seen} == {6}


@pytest.mark.thorough
def test_a_timestep_for_each_token_is_split_too_and_ranks_that_ended_are_replaced(
    draw: Draw, job: VideoJob, tmp_path: Path
) -> None:
    folder = write_start(tmp_path / "5b", "5b")
    job = replace(job, size=Size(64, 96), num_frames=5)
    alone = registry.load_video(ModelChoice(str(folder), dtype="float32", device="cpu"))
    expected = draw(alone, job)
    with shared(folder) as (model, ranks):
        found = draw(model, job)
        assert is_rounding(found, expected)
        (member,) = ranks._pool._members
        member.child.process.kill()
        member.child.process.wait()
        ranks.revive()
        assert torch.equal(draw(model, job), found)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs share the tokens")
def test_two_gpus_make_the_latents_of_one(
    folders: dict[str, Path], draw: Draw, job: VideoJob
) -> None:
    choice = ModelChoice(str(folders["wan22"]), dtype="float32", device="cuda:0")
    expected = draw(registry.load_video(choice), job)
    with shared(folders["wan22"], "cuda:0") as (model, _):
        found = draw(model, job)
    assert (found - expected).abs().max() < 1e-2 * expected.abs().max()


def test_what_cannot_be_split_is_refused_before_anything_loads(
    run_cli: Run, write_manifest: Callable[..., Path], folders: dict[str, Path]
) -> None:
    line = {"task": "t2v", "prompt": "a dog", "size": "48x32", "num_frames": 5, "custom_id": "dog"}
    path = write_manifest(line)

    def said(*flags: str, model: Path = folders["wan"]) -> str:
        for command in ("check", "plan", "generate"):
            ran = run_cli(command, path, "--video-model", str(model), *flags)
            assert (ran.code, ran.out) == (2, ""), ran.err
        return str(ran.err)

    assert "diffusers has no plan for its transformer" in said(FLAG, "2", model=TINY_VIDEO)
    assert "the 2 attention heads of tiny-wan cannot be divided by 3" in said(FLAG, "3")
    assert "remove --cfg-parallel-size" in said(FLAG, "2", "--cfg-parallel-size", "2")
    assert "3 processes decode, but only 2 denoise" in said(
        FLAG, "2", "--vae-patch-parallel-size", "3"
    )
    recipe = path.with_name("r.toml")
    recipe.write_text('[model]\nattention_backend = "xformers"\n')
    assert "xformers cannot be split" in said(FLAG, "2", "--recipe", str(recipe))
    recipe.write_text('[model]\ncpu_offload = "group"\n')
    assert "--cpu-offload model" in said(FLAG, "2", "--recipe", str(recipe))
    odd = write_manifest(line | {"size": "48x48", "num_frames": 1})
    ran = run_cli("check", odd, "--video-model", str(folders["wan"]), FLAG, "2")
    assert (ran.code, "dog has 9 tokens (48x48, 1 frames), not a multiple of 2" in ran.err) == (
        2,
        True,
    )
    assert "another size, or number of frames" in ran.err


def test_the_plan_says_what_each_rank_holds(
    run_cli: Run, write_manifest: Callable[..., Path], folders: dict[str, Path]
) -> None:
    path = write_manifest({"task": "t2v", "prompt": "a dog", "size": "48x32", "num_frames": 5})
    asked = ("plan", path, "--video-model", str(folders["wan"]))
    text = run_cli(*asked, FLAG, "2").out
    assert "tokens: 12 per forward on 2 ranks, 6 and 1 of 2 attention heads each" in text
    one, two = (
        json.loads(run_cli(*asked, *flags, "--json").out)["groups"][0]
        for flags in ((), (FLAG, "2"))
    )
    assert (one["context_ranks"], two["context_ranks"]) == (1, 2)
    denoise = [group["memory"]["denoise"]["work"] for group in (one, two)]
    assert denoise[0] == 2 * denoise[1]


def test_the_kernels_that_can_be_split_are_the_librarys() -> None:
    found = _AttentionBackendRegistry._supports_context_parallel - {"_native_npu"}
    assert set(CONTEXT_BACKENDS) == found
