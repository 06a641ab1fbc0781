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
from settings.test_table import OFF_DEFAULT

from hyimg_cli.manifest.fields import FIELDS
from hyimg_cli.settings.table import SETTINGS

MODEL = "qwen-image-edit"
# What the model makes of a setting. Of these it says nothing, and does as they say:
FOLLOWED = set(
    """
    allow_model revision dtype device vae_use_tiling quantization cpu_offload enable_cpu_offload
    attention_backend compile_blocks deterministic size n vary num_inference_steps
    infer_align_image_size guidance_scale flow_shift step_cache seed negative_prompt
    keep_outside region kv_reuse
    prompt_cache prefix_cache_mb prefix_cache_host_mb prewarm
    memory_gb gpu_memory_utilization cache_dir disk_cache disk_cache_mb replicas ray_address
    output_dir format name metadata keep_gps checkpoint_every report fail_fast
    max_consecutive_errors max_retries skip_invalid decode_graphs
    background_pass tokens_between_steps
    """.split()  # noqa: SIM905
)
# Told that no job reads them, by a part of the sentence.
TOLD = {
    "videos only": """video_components decode_tiles num_frames fps fit scheduler guidance_scale_2
        clips_together vae_patch_parallel_size context_parallel_size frames""",
    "models that write text": """drop_think ar_seed temperature top_k top_p max_new_tokens
        batching_max_size batch_invariant""",
    "keep_outside only": """kept_source region_mode on_global max_outside_change max_edited_area
        max_spill""",
    "lossy WebP only": "quality",
    "WebP only": "lossless",
}
# Refused, by an error's code.
REFUSED = {
    "usage.not-followed": "vae_dtype keep_quantized require_kv_reuse",
    "usage.cpu-offload": "offload_experts",
    "usage.tensor-parallel": "cfg_parallel_size tensor_parallel_size",
    "manifest.not-followed": "bot_task use_system_prompt system_prompt",
    "manifest.unconsumed": """image_guidance_scale guidance_interval guidance_renorm
        guidance_renorm_min""",
    "manifest.lora": "lora",  # a file that is not here; others: `test_settings.py`
}
# Values that this machine can follow, and what else they need.
BESIDE: dict[str, dict[str, Any]] = {
    "quantization": {"quantization": "fp8"},
    "cpu_offload": {"device": "cuda"},
    "enable_cpu_offload": {"device": "cuda"},
    "gpu_memory_utilization": {"device": "cuda"},
}
# Fields of a line alone, and settings that a line refuses otherwise, with the fault's slug.
IN_LINE: dict[str, tuple[Any, str]] = {
    "custom_id": ("b", ""),
    "task": ("it2i", ""),
    "prompt": ("blue", ""),
    "images": (["s0.png"], ""),
    "seeds": ([1, 2], ""),
    "matrix": ({"guidance_scale": [1, 2]}, ""),
    "metadata": ({"a": 1}, ""),
    "cot_text": ("<think>x</think>", "not-followed"),
    "cot_token_ids": ([1], "out-of-range"),
    "ratio_index": (1, "unconsumed"),
    "written": ({"a": 1}, "written"),
    "camera": ("w-9", "foreign-field"),
    "vary": ("picture", "unconsumed"),
    "quality": (50, "unconsumed"),
    "lossless": (True, "unconsumed"),
}


def fate(table: dict[str, str]) -> dict[str, str]:
    return {name: said for said, names in table.items() for name in names.split()}


def test_the_table_has_every_setting_and_every_field() -> None:
    every = [*FOLLOWED, *fate(TOLD), *fate(REFUSED)]
    assert len(every) == len(set(every))
    # Candidates are the run's, whatever the model.
    settings = {name for name, row in SETTINGS.items() if row.table != "candidates"}
    assert {*every, "model", "video_model"} == settings
    apart = {"model", "width", "height", "seed"}  # other tests', or of another field
    apart |= {"candidate_of", "candidate", "draft_of"}  # written by hyimg
    assert {field.name for field in FIELDS} - SETTINGS.keys() <= IN_LINE.keys() | apart


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


@pytest.mark.parametrize("name", [*sorted(FOLLOWED), *fate(TOLD), *fate(REFUSED)])
def test_a_setting_is_followed_or_told_or_refused(
    checked: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for one, value in ({"device": "cpu", name: OFF_DEFAULT[name]} | BESIDE.get(name, {})).items():
        monkeypatch.setenv(SETTINGS[one].variable, str(value))
    kept = {"size": "128x64"} if name in ("keep_outside", "region") else {}
    ran = checked(kept)
    refusal, told = fate(REFUSED).get(name), fate(TOLD).get(name)
    assert (ran.code == 0) is (refusal is None), ran.err
    assert ("note: HYIMG_" in ran.err) is (told is not None), ran.err
    assert f"error[{refusal}]" in ran.err or refusal is None
    assert told is None or told in ran.err
    assert name in ran.err.lower().replace("-", "_") or not (refusal or told)


IN_LINES = [name for name, row in SETTINGS.items() if row.in_line and name != "lora"]


@pytest.mark.parametrize("name", dict.fromkeys([*IN_LINES, *IN_LINE]))
def test_a_field_is_followed_or_refused_at_its_line(checked: Any, name: str) -> None:
    """What a flag would be told of is a fault of a line."""
    value, slug = IN_LINE.get(name, (OFF_DEFAULT.get(name), ""))
    if name not in IN_LINE and name not in FOLLOWED:
        refusal = fate(REFUSED).get(name, "manifest.unconsumed")
        slug = "foreign-field" if SETTINGS[name].only == "videos" else refusal.split(".")[1]
    ran = checked({name: value})
    assert (ran.code == 0) is (not slug), ran.err
    assert not slug or f"error[manifest.{slug}]" in ran.err, ran.err
    assert not slug or f"jobs.jsonl:1: {name}" in ran.err, ran.err


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
