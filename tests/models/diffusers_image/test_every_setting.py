"""Every setting and every field of a line on an editor: it is followed, reported, or refused by
name; none is ignored.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.diffusers_image.classic import Checkpoint, line
from safetensors.torch import save_file
from settings.examples import EXAMPLES

from hyimg_cli.manifest.fields import OF_MODELS
from hyimg_cli.models.registry import families, model_card
from hyimg_cli.settings.table import READERS, SETTINGS, TABLES
from hyimg_cli.spec.card import ModelCard

MODEL = "qwen-image-edit"
# What this machine cannot do with the model, by an error's code.
REFUSED = {
    "cfg_parallel_size": "usage.tensor-parallel",
    "tensor_parallel_size": "usage.tensor-parallel",
    "lora": "manifest.lora",  # a file that is not here
}
# What no job of the manifest does, by a part of the sentence.
TOLD = dict.fromkeys(TABLES["outside"], "keep_outside only")
TOLD |= {"quality": "lossy WebP only", "lossless": "WebP only"}
TOLD |= {"batching_max_size": "with --no-batch-invariant only"}
TOLD |= {"components": "models as one file"}
# A region turns keep_outside on.
del TOLD["region"], TOLD["keep_outside"]
# Values that this machine can follow, and what else they need.
BESIDE: dict[str, dict[str, Any]] = {
    "attention_backend": {"attention_backend": "_native_math"},
    "quantization": {"quantization": "fp8"},
    "cpu_offload": {"device": "cuda"},
    "enable_cpu_offload": {"device": "cuda"},
    "gpu_memory_utilization": {"device": "cuda"},
    "num_inference_steps": {"num_inference_steps": 7},
}
# Candidates are the run's, whatever the model; the models are given.
NAMES = [
    name
    for name, row in SETTINGS.items()
    if row.table != "candidates" and name not in ("model", "video_model")
]


def fate(name: str, card: ModelCard) -> tuple[str, str]:
    """The error's code, and else a part of the note, that a setting for the whole run meets."""
    row, of_models = SETTINGS[name], {field.name for field in OF_MODELS}
    is_for_some = row.only not in (None, "pictures", "videos")
    if name in of_models and name not in card.follows and row.concerns("pictures"):
        return ("", READERS[row.only].words) if is_for_some else ("manifest.not-followed", "")
    if row.only and not {row.only} & card.kinds and name not in card.follows:
        return "", READERS[row.only].words
    if name == "offload_experts":  # refused before, by the weights
        return "usage.cpu-offload", ""
    if OF_OTHERS & {name, f"{name}={EXAMPLES[name]}"}:
        return "usage.not-followed", ""
    return REFUSED.get(name, ""), TOLD.get(name, "")


OF_OTHERS = frozenset[str]().union(*(one.follows for one in families() if one.makes == "pictures"))


@pytest.fixture
def checked(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str]
) -> Callable[..., Any]:
    def check(fields: dict[str, Any]) -> Any:
        own = line("a", "red", "s0.png", num_inference_steps=20) | fields
        kept = {"keep_outside", "region", "infer_align_image_size"} & {*fields}
        if kept:
            del own["size"]
        if "seeds" in fields:
            del own["seed"]
        manifest = write_manifest(own)
        return run_cli("check", manifest, "--model", checkpoint(MODEL))

    return check


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_followed_or_told_or_refused(
    checked: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for one, value in ({"device": "cpu", name: EXAMPLES[name]} | BESIDE.get(name, {})).items():
        said = ",".join(value) if isinstance(value, tuple) else str(value)
        monkeypatch.setenv(SETTINGS[one].variable, said)
    kept = {"size": "128x64"} if name in ("keep_outside", "region") else {}
    ran, (refusal, told) = checked(kept), fate(name, model_card(str(checkpoint(MODEL))))
    assert (ran.code == 0) is (not refusal), ran.err
    assert ("note: HYIMG_" in ran.err) is bool(told), ran.err
    assert f"error[{refusal}]" in ran.err or not refusal
    assert told in ran.err
    assert name in ran.err.lower().replace("-", "_") or not (refusal or told)


@pytest.mark.parametrize(
    ("name", "value"), [("vae_dtype", "float32"), ("device", "balanced"), ("decode_graphs", "on")]
)
def test_values_of_other_models_are_refused(
    checked: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(SETTINGS[name].variable, value)
    assert f"does not follow {name} {value}" in checked({}).err


@pytest.mark.parametrize("kind", ["qwen-image", "longcat"])
def test_a_negative_prompt_without_guidance_is_refused(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, kind: str
) -> None:
    manifest = write_manifest(line("a", "red", guidance_scale=1, negative_prompt="blue"))
    unguided = run_cli("check", manifest, "--model", checkpoint(kind))
    assert "error[manifest.not-followed]" in unguided.err
    assert "jobs.jsonl:1: negative_prompt" in unguided.err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "num_inference_steps 4, guidance_scale 1, flow_shift 3; this job uses 20, 4, 1"),
        ({"num_inference_steps": 4, "guidance_scale": 1}, "flow_shift 3; this job uses 1"),
        ({"num_inference_steps": 4, "guidance_scale": 1, "flow_shift": 3}, ""),
    ],
)
def test_lightning_without_its_schedule_is_told(
    checked: Any, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    name = "Qwen-Image-Edit-2509-Lightning-4steps-V1.0-bf16.safetensors"
    save_file(
        {
            "transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(1, 48),
            "transformer.transformer_blocks.0.attn.to_q.lora_B.weight": torch.zeros(48, 1),
        },
        tmp_path / name,
    )
    ran = checked({"lora": name} | change)
    assert ran.code == 0, ran.err
    assert (f"note: {name} was trained for {told}\n" in ran.err) if told else "note" not in ran.err


def test_think_leaves_a_line_without_a_text_stage_as_it_is(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    texts, editor = tmp_path / "texts.jsonl", line("a", "red") | {"model": str(checkpoint("klein"))}
    ran = run_cli("think", write_manifest(editor), "-o", texts)
    assert (ran.code, "1 done" in ran.err) == (0, True), ran.err
    assert json.loads(texts.read_text())["prompt"] == "red"
    assert (ran := run_cli("check", texts)).code == 0, ran.err
