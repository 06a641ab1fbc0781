"""Runs of a transformer in a GGUF file draw what a folder with its unpacked numbers draws."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import single_files
import tiny_editors
import torch
from conftest import thorough_but
from models.diffusers_image.classic import Line, line, pixels_of, results
from models.diffusers_image.test_file_kills import write_lora
from single_files import weights_of

from hyimg_cli.pipelines.failures import failed_job
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob

KINDS = ("klein", "klein-kv", "klein-base")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path, Path]]:
    """By kind: a GGUF file, the folder of its other parts, and one with its numbers."""
    root, made = tmp_path_factory.mktemp("gguf"), dict[str, tuple[str, Path, Path]]()
    for kind in KINDS:
        parts = tiny_editors.wide_parts("klein", with_encoder=False)
        folder = tiny_editors.write(root / kind, kind, **parts)
        packed, numbers = single_files.pack(weights_of(folder), "Q4_K", only="blocks")
        copy = single_files.with_weights(folder, root / f"{kind}-unpacked", numbers)
        file = single_files.write_gguf(root / f"{kind}.gguf", packed)
        made[kind] = str(file), folder, copy
    return made


def both(run_cli: Any, manifest: Path, pair: tuple[str, Path, Path], *flags: str) -> list[Any]:
    file, folder, copy = pair
    drawn = []
    for model, out in (((file, "--components", folder), "file"), ((copy,), "folder")):
        ran = run_cli("generate", manifest, "--model", *model, "-o", out, "--no-report", *flags)
        assert ran.code == 0, ran.err
        drawn.append(pixels_of(Path(out)))
    return drawn


@pytest.mark.parametrize("kind", thorough_but(["klein-kv"], KINDS))
def test_pixels_of_gguf_with_loras(
    kind: str, pairs: Any, run_cli: Any, write_manifest: Any, tmp_path: Path, sources: list[str]
) -> None:
    layer = "transformer_blocks.0.attn.to_out.0"
    style = write_lora(tmp_path / "ink.safetensors", layer, 1)
    lines: list[Line] = [
        line("plain", "red", sources[0], num_inference_steps=2),
        line("styled", "red", sources[0], num_inference_steps=2, lora=style),
        line("again", "red", sources[0], num_inference_steps=2),
    ]
    found, expected = both(run_cli, write_manifest(*lines), pairs[kind])
    assert found.keys() == expected.keys() == {"plain", "styled", "again"}
    assert all(np.array_equal(found[name], one) for name, one in expected.items())
    assert np.array_equal(found["plain"], found["again"])
    assert not np.array_equal(found["plain"], found["styled"])
    (note,) = [one for one in results(Path("file"))["plain"]["notes"] if "GGUF" in one]
    assert "Q4_K" in note


@pytest.mark.thorough
def test_the_step_cache_and_a_replay(
    pairs: Any, run_cli: Any, write_manifest: Any, sources: list[str]
) -> None:
    one = line(
        "a", "red", sources[0], num_inference_steps=12, step_cache="taylor:interval=2,first=2"
    )
    found, expected = both(run_cli, write_manifest(one), pairs["klein-base"])
    assert np.array_equal(found["a"], expected["a"])
    ran = run_cli("replay", "file/outputs/a.png")
    file, folder, _ = pairs["klein-base"]
    used = f"give them with --model FILE --components FOLDER_OR_ID; its run used {file} and "
    assert (ran.code, f"{used}{folder}" in ran.err.replace("\n", " ")) == (2, True), ran.err
    given = ("--model", file, "--components", folder)
    ran = run_cli("replay", "file/outputs/a.png", *given, "--expect-equal")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--quantization", "fp8"), "klein.gguf is GGUF, which is packed already"),
        (("--quantization", "nf4"), "klein.gguf is GGUF, which is packed already"),
        (("--compile-blocks",), "klein.gguf is GGUF, whose unpacking cannot be compiled"),
    ],
)
def test_what_a_packed_file_does_not_follow(
    flags: tuple[str, ...], said: str, pairs: Any, run_cli: Any, write_manifest: Any
) -> None:
    file, folder, _ = pairs["klein"]
    manifest = write_manifest(line("a", "red"))
    for command in ("check", "plan", "generate"):
        given = (manifest, "--model", file, "--components", folder, "-o", "out", *flags)
        ran = run_cli(command, *given)
        assert (ran.code, said in ran.err) == (2, True), ran.err


def test_a_packed_file_that_ran_out_of_memory_is_not_to_be_packed_again(
    pairs: Any, job: ImageJob, tmp_path: Path
) -> None:
    file, folder, copy = pairs["klein"]
    for model, forms in ((f"{file}+{folder}", ""), (str(copy), "--quantization fp8, ")):
        config = RunConfig(OutputConfig(tmp_path), model=ModelChoice(model, device="cpu"))
        full = torch.OutOfMemoryError("full")
        error = failed_job(replace(job, model=model), config, 1, full).error
        tiled = "--vae-use-tiling (changes pixels near tile borders), or a smaller size"
        assert error is not None
        assert error.hint == f"use --cpu-offload model, {forms}{tiled}"


def test_plan_counts_gguf_as_stored(pairs: Any, run_cli: Any, write_manifest: Any) -> None:
    file, folder, _ = pairs["klein"]
    given = ("--model", file, "--components", folder)
    plan = run_cli("plan", write_manifest(line("a", "red")), *given, "--json").json_lines[0]
    (counted,) = plan["weight_bytes"].values()
    assert counted["transformer"] == pytest.approx(Path(file).stat().st_size, rel=0.02)
