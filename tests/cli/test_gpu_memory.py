"""--gpu-memory-utilization and --enable-cpu-offload through the commands: reported, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import with_gpus

from hyimg_cli.memory.fit import GPU_SIZES

Run = Callable[..., Any]
Write = Callable[..., Path]
PICTURE = {"custom_id": "p", "prompt": "a red circle"}
VIDEO = {"custom_id": "v", "task": "t2v", "prompt": "a dog", "num_frames": 1}
RANKS = ("--vae-patch-parallel-size", "2", "--cfg-parallel-size", "2")
PART, OFFLOAD = "--gpu-memory-utilization", "--enable-cpu-offload"
GROUPS = ("--cpu-offload", "group")


def flat(text: str) -> str:
    """A message may be wrapped."""
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["check", "plan", "generate"])
@pytest.mark.parametrize(
    ("lines", "flags", "what", "hint"),
    [
        ((PICTURE,), (PART, "0.8", "--device", "cpu"), "is on the CPU", "[batch] memory_gb"),
        ((PICTURE,), (PART, "1.2"), "out of range", "above 0 to 1"),
        ((PICTURE,), (PART, "0"), "out of range", "above 0 to 1"),
        ((PICTURE,), (OFFLOAD,), "this model uses one network", "--quantization nf4"),
        (
            (PICTURE, VIDEO),
            (OFFLOAD, "--device", "cuda"),
            "this model uses one network",
            "videos separately",
        ),
        ((VIDEO,), (OFFLOAD, "--device", "cpu"), "already in main memory", "--device cuda"),
        ((VIDEO,), (*GROUPS, "--device", "cpu"), "already in main memory", "--device cuda"),
        (
            (VIDEO,),
            ("--quantization", "nf4", "--device", "cpu"),
            "need bitsandbytes and a GPU, but this run is on the CPU",
            "--quantization fp8",
        ),
        (
            (VIDEO,),
            ("--no-vae-use-tiling", "--vae-patch-parallel-size", "2"),
            "and --no-vae-use-tiling cannot be used together: it shares tiles",
            "remove one of the two",
        ),
        (
            (VIDEO,),
            (OFFLOAD, "--device", "cuda", *RANKS),
            "a process holds a VAE in addition to its transformer",
            "remove one of the two",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_every_command(
    run_cli: Run,
    write_manifest: Write,
    command: str,
    lines: tuple[dict[str, Any], ...],
    flags: tuple[str, ...],
    what: str,
    hint: str,
) -> None:
    ran = run_cli(command, write_manifest(*lines), *flags)
    assert (ran.code, ran.out) == (2, "")
    assert what in flat(ran.err)
    assert hint in flat(ran.err)


def test_environment_and_recipe_are_followed_too(
    run_cli: Run, write_manifest: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "part.toml"
    recipe.write_text("[batch]\ngpu_memory_utilization = 0.5\n")
    said = run_cli("plan", write_manifest(VIDEO), "--device", "cuda", "--recipe", recipe).out
    assert "refuses a model" in said
    assert "batches smaller" not in said
    manifest = write_manifest(PICTURE)
    said = run_cli("plan", manifest, "--device", "cuda", "--recipe", recipe).out
    assert "the limit of 0.5 of the GPU's memory is not checked here" in said
    assert "makes batches smaller" in said
    monkeypatch.setenv("HYIMG_GPU_MEMORY_UTILIZATION", "0.25")
    assert "0.25 of the GPU's" in run_cli("plan", manifest, "--device", "cuda").out
    assert run_cli("plan", manifest, "--device", "cpu").code == 2
    assert "0.75 of the GPU's" in run_cli("plan", manifest, "--device", "cuda", PART, "0.75").out


def test_the_plan_says_what_is_on_the_gpu_at_a_time(run_cli: Run, write_manifest: Write) -> None:
    manifest = write_manifest(VIDEO)
    (plan,) = run_cli("plan", manifest, "--device", "cuda", OFFLOAD, "--json").json_lines
    sizes = plan["weight_bytes"]["tiny-video"]
    assert plan["on_gpu_bytes"] == {"tiny-video": max(sizes.values())}
    assert "one network at a time" in run_cli("plan", manifest, "--device", "cuda", OFFLOAD).out
    (groups,) = run_cli("plan", manifest, "--device", "cuda", *GROUPS, "--json").json_lines
    assert groups["on_gpu_bytes"]["tiny-video"] <= max(sizes.values())
    (plain,) = run_cli("plan", manifest, "--device", "cuda", "--json").json_lines
    assert plain["groups"][0]["cards"] == dict.fromkeys(GPU_SIZES, "")
    assert plain["groups"][0]["memory"]["decode"]["work"] > 0
    assert "on_gpu_bytes" not in plain


def test_the_plan_names_the_flag_that_makes_it_fit(
    run_cli: Run, write_manifest: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyimg_cli.settings.run import BatchConfig

    recipe = tmp_path / "small.toml"
    recipe.write_text("[batch]\nmemory_gb = 1\n")
    flags = ("--device", "cpu", "--recipe", recipe)
    manifest = write_manifest(PICTURE)
    facts = run_cli("plan", manifest, *flags, "--json").json_lines[0]["memory"]["tiny-image"]
    ran = run_cli("plan", manifest, *flags)
    assert (ran.code, "does not fit" in ran.out) == (0, False)
    for room, device, said in (
        (facts["least"] - 1, "cpu", "--quantization fp8 would fit with"),
        (10**6, "cpu", "free some memory, or use a machine with"),
        (10**6, "cuda", "split it over more GPUs with --tensor-parallel-size"),
    ):
        monkeypatch.setattr(BatchConfig, "memory_bytes", property(lambda _self, room=room: room))
        words = (manifest, "--recipe", recipe, "--device", device)
        for command in (("plan",), ("generate", "--dry-run")):
            ran = run_cli(*command, *words)
            assert (ran.code, said in flat(ran.out)) == (3, True)
        ran = run_cli("plan", *words, "--json")
        assert (ran.code, said in ran.json_lines[0]["too_large"]["tiny-image"]) == (3, True)


@pytest.mark.parametrize(
    ("device", "free", "what"),
    [
        ("cuda", (), "torch finds no GPU"),
        ("cuda:7", (1e9, 1e9), "torch finds 2 GPUs, counted from 0"),
        ("balanced", (), "torch finds no GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(
    run_cli: Run,
    write_manifest: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    free: tuple[float, ...],
    what: str,
) -> None:
    with_gpus(monkeypatch, free)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
    ran = run_cli("generate", write_manifest(PICTURE), "--device", device, "-o", tmp_path / "out")
    assert (ran.code, ran.out) == (3, "")
    assert what in flat(ran.err)
    assert "loading" not in ran.err
    assert not (tmp_path / "out").exists()
