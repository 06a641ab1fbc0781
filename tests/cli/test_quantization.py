"""`--quantization` from the command line to `run.json`, and what a second run makes of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hyimg_cli.quality.metrics import psnr

JOB = {"custom_id": "a", "prompt": "a red circle", "bot_task": "none", "num_inference_steps": 3}


def test_another_quantization_is_another_run(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    manifest = write_manifest(JOB)
    quiet = ("--no-prewarm", "-q", "--device", "cpu")
    ran = run_cli("generate", manifest, "-o", "out", "--quantization", "fp8", *quiet)
    assert ran.code == 0, ran.err
    told = json.loads((tmp_path / "out" / "run.json").read_text())
    assert told["flags"]["quantization"] == {"value": "fp8", "origin": "flag"}
    again = run_cli("generate", manifest, "-o", "out", "--quantization", "fp8", *quiet, "--json")
    assert again.code == 0
    other = run_cli("generate", manifest, "-o", "out", *quiet)
    assert other.code == 2
    assert "--force" in other.err
    assert run_cli("generate", manifest, "-o", "plain", *quiet).code == 0
    pixels = [
        np.asarray(Image.open(tmp_path / folder / "outputs" / "a.png"))
        for folder in ("out", "plain")
    ]
    assert 25 < psnr(*pixels) < 80


def test_the_plan_says_what_quantization_saves(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest(JOB)
    memory = {
        form: run_cli("plan", manifest, "--quantization", form, "--json").json_lines[0]["memory"]
        for form in ("none", "fp8", "nf4")
    }
    weights = {form: one["tiny-image"]["weights"] for form, one in memory.items()}
    assert weights["nf4"] < weights["fp8"] < weights["none"]
    one = memory["fp8"]["tiny-image"]
    assert one["total"] == one["weights"] + one["kv"] + one["activations"]
    plain = run_cli("plan", manifest, "--device", "cpu").out
    assert re.search(r"weights of tiny-image: .*, in float32\n", plain)
    halved = run_cli("plan", manifest, "--device", "cpu", "--dtype", "bfloat16").out
    assert re.search(r"weights of tiny-image: .*, in bfloat16\n", halved)


def test_the_plan_says_how_many_think_and_draw(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    manifest = write_manifest(*({**JOB, "custom_id": f"{n}"} for n in range(6)))
    device = ("--device", "cpu", "--batching-max-size", "4")
    free = run_cli("plan", manifest, *device, "--json").json_lines[0]["memory"]["tiny-image"]
    assert (free["thinking"], free["drawing"]) == (4, 4)
    assert "4 texts and 4 pictures at once" in run_cli("plan", manifest, *device).out
    recipe = tmp_path / "small.toml"
    for memory_gb in (1, 1.5):
        recipe.write_text(f"[batch]\nmemory_gb = {memory_gb}\n")
        whole = run_cli("plan", manifest, *device, "--recipe", recipe, "--json").json_lines[0]
        assert whole["memory"]["tiny-image"]["total"] <= memory_gb * 10**9
    refused = run_cli("plan", manifest, *device, "--recipe", write_bad(recipe))
    assert refused.code == 2


def write_bad(recipe: Path) -> Path:
    bad = recipe.with_name("bad.toml")
    bad.write_text('[batch]\nmemory_gb = "many"\n')
    return bad


def test_an_unknown_quantization_is_refused(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Path]
) -> None:
    ran = run_cli("plan", write_manifest(JOB), "--quantization", "int3")
    assert ran.code == 2
    assert "none, fp8, nf4" in ran.err
