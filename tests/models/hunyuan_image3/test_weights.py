"""Strict loading: every key, safetensors only, nothing of the checkpoint's own code run."""

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from released import LEFTOVERS
from safetensors.torch import load_file, save_file

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models.hunyuan_image3.config import architecture, generation_config
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes, load
from hyimg_cli.spec.card import SamplingDefaults


@pytest.fixture
def checkpoint(small_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "checkpoint"))


def _rewrite(checkpoint: Path, change: Any) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def test_the_released_config_has_the_released_parameters(released_config: dict[str, Any]) -> None:
    """Facts, section b: 83.04e9 parameters with both distil embedders; shapes on the meta
    device.
    """
    shapes = expected_shapes(architecture(released_config | _DISTILLED))
    # As many names as the index of the released Instruct-Distil has.
    assert len(shapes) == 5169
    assert round(sum(map(math.prod, shapes.values())) / 1e9, 2) == 83.04
    for name, shape in _RELEASED_SHAPES.items():
        assert shapes[name] == shape, name
    parts = {
        "model.": 80.413,
        "lm_head.": 0.545,
        "vae.": 1.261,
        "vision_model.": 0.428,
        "patch_embed.": 0.227,
        "final_layer.": 0.060,
        "vision_aligner.": 0.0215,
        "guidance_emb.": 0.0178,
    }
    for prefix, billions in parts.items():
        count = sum(math.prod(s) for n, s in shapes.items() if n.startswith(prefix))
        assert count / 1e9 == pytest.approx(billions, rel=0.01), prefix


_DISTILLED = {"cfg_distilled": True, "use_meanflow": True}
_RELEASED_SHAPES = {
    "model.wte.weight": (133120, 4096),
    "model.layers.31.self_attn.qkv_proj.weight": (6144, 4096),
    "model.layers.0.self_attn.query_layernorm.weight": (128,),
    "model.layers.7.mlp.gate.wg.weight": (64, 4096),
    "model.layers.7.mlp.shared_mlp.gate_and_up_proj.weight": (6144, 4096),
    "model.layers.7.mlp.experts.63.down_proj.weight": (4096, 3072),
    "model.ln_f.weight": (4096,),
    "timestep_r_emb.mlp.0.weight": (4096, 256),
    "patch_embed.model.0.weight": (1024, 32, 3, 3),
    "patch_embed.model.1.emb_layers.1.weight": (8192, 4096),
    "patch_embed.model.1.out_layers.3.weight": (4096, 4096, 3, 3),
    "patch_embed.model.1.skip_connection.weight": (4096, 1024, 1, 1),
    "final_layer.model.0.out_layers.0.weight": (1024,),
    "final_layer.model.1.2.weight": (32, 1024, 3, 3),
    "vision_model.embeddings.patch_embedding.weight": (1152, 768),
    "vision_model.head.attention.in_proj_weight": (3456, 1152),
    "vision_aligner.layers.2.weight": (4096, 4096),
    "vae.encoder.down.0.downsample.conv.weight": (64, 128, 3, 3, 3),
    "vae.encoder.conv_out.weight": (64, 1024, 3, 3, 3),
    "vae.decoder.up.0.upsample.conv.weight": (8192, 1024, 3, 3, 3),
    "vae.decoder.conv_out.weight": (3, 128, 3, 3, 3),
}


def test_the_three_models_differ_by_the_distil_embedders(released_config: dict[str, Any]) -> None:
    instruct = set(expected_shapes(architecture(released_config)))
    distilled = set(expected_shapes(architecture(released_config | _DISTILLED)))
    extra = {n.split(".")[0] for n in distilled - instruct}
    assert extra == {"guidance_emb", "timestep_r_emb"}
    assert not instruct - distilled


def test_loads_in_bfloat16_with_router_and_vae_in_float32(small_folder: Path) -> None:
    network = load(small_folder, dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in network.named_parameters()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {n for n in dtypes if ".gate.wg." in n or n.startswith("vae.")}


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    _rewrite(
        checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.down_proj.weight")
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.2\.down_proj"):
        load(checkpoint, dtype=torch.float32)


def test_an_unexpected_tensor_is_named(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight"):
        load(checkpoint, dtype=torch.float32)


def test_a_wrong_shape_is_named(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 63)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(checkpoint, dtype=torch.float32)


class _Trace:
    """Unpickling this creates a file: proof that a pickle was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_and_auto_map_are_never_executed(checkpoint: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for name in ("pytorch_model.bin", "model.pt", "extra.pkl"):
        (checkpoint / name).write_bytes(pickle.dumps(_Trace(trace)))
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
    (checkpoint / "hunyuan.py").write_text(code + "class Config: pass\nclass Net: pass\n")
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "hunyuan.Config", "AutoModelForCausalLM": "hunyuan.Net"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    load(checkpoint, dtype=torch.float32)
    assert not trace.exists()
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickle"):
        load(checkpoint, dtype=torch.float32)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_mla", True),
        ("norm_type", "layer"),
        ("patch_size", 2),
        ("use_rotary_pos_emb", False),
        ("vit_type", "siglip-so400m"),
        ("cond_token_attn_type", "causal"),
        ("cond_token_attn_type", "full_causal"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "yarn"}),
    ],
)
def test_unreleased_options_are_refused(
    small_config: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=key):
        architecture(small_config | {key: value})


@pytest.mark.parametrize("method", ["gptq", "quanto", "fp8", "torchao", "sdnq"])
def test_a_format_that_is_not_read_is_named(small_config: dict[str, Any], method: str) -> None:
    packed = small_config | {"quantization_config": {"quant_method": method}}
    with pytest.raises(CheckpointError, match=f"quantized with '{method}'") as caught:
        architecture(packed)
    assert "bitsandbytes" in caught.value.hint
    theirs = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert architecture(small_config | {"quantization_config": theirs}) == architecture(
        small_config
    )


def test_an_option_of_another_kind_is_a_fault_of_the_checkpoint(
    small_config: dict[str, Any],
) -> None:
    with pytest.raises(
        CheckpointError, match="rope_scaling is 'custom'; expected a valid dictionary"
    ):
        architecture(small_config | {"rope_scaling": "custom"})


def test_what_no_code_reads_changes_nothing(released_config: dict[str, Any]) -> None:
    """Every key that the released files have is read, refused, or one of these."""
    read = {key: value for key, value in released_config.items() if key not in LEFTOVERS}
    assert len(read) < len(released_config)
    assert architecture(read) == architecture(released_config)
    for kind, joint in (("full", False), ("joint_full", True)):
        found = architecture(released_config | {"cond_token_attn_type": kind})
        assert found.has_joint_source_span == joint


_RELEASED_GENERATION = {
    "bot_task": "image",
    "diff_guidance_scale": 5.0,
    "diff_infer_steps": 50,
    "disable_compile": True,
    "do_sample": True,
    "drop_think": False,
    "eos_token_id": [127957],
    "flow_shift": 3.0,
    "max_length": 12800,
    "moe_impl": "eager",
    "pad_token_id": 128009,
    "sequence_template": "pretrain",
    "temperature": 0.6,
    "top_k": 1024,
    "top_p": 0.95,
    "use_system_prompt": "None",
}


def test_the_released_defaults_are_read() -> None:
    """The base checkpoint's file, key by key."""
    found = generation_config(_RELEASED_GENERATION)
    assert found.template == "pretrain"
    assert found.defaults == SamplingDefaults(
        num_inference_steps=50,
        guidance_scale=5.0,
        flow_shift=3.0,
        bot_task="none",
        drop_think=False,
        use_system_prompt="None",
        temperature=0.6,
        top_k=1024,
        top_p=0.95,
        max_new_tokens=2048,
    )


def test_a_template_is_one_that_we_know() -> None:
    """Upstream's default is the base model's; a sequence of another kind would be well-formed."""
    without = {k: v for k, v in _RELEASED_GENERATION.items() if k != "sequence_template"}
    assert generation_config(without).template == "pretrain"
    assert generation_config(without | {"sequence_template": "instruct"}).template == "instruct"
    with pytest.raises(CheckpointError, match="sequence_template is 'chat'"):
        generation_config(without | {"sequence_template": "chat"})


def test_null_leaves_nothing_of_the_sampling() -> None:
    nothing = dict.fromkeys(("temperature", "top_k", "top_p"))
    found = generation_config(_RELEASED_GENERATION | nothing).defaults
    assert (found.temperature, found.top_k, found.top_p) == (1.0, 0, 1.0)
    assert generation_config(_RELEASED_GENERATION | {"do_sample": False}).defaults.temperature == 0


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [("encoder_repetition_penalty", 1.1, 1.0), ("min_p", 0.05, None), ("num_beams", 4, 1)],
)
def test_sampling_that_we_would_leave_out_is_refused(key: str, value: Any, neutral: Any) -> None:
    assert generation_config(_RELEASED_GENERATION | {key: neutral})
    with pytest.raises(CheckpointError, match=key):
        generation_config(_RELEASED_GENERATION | {key: value})


def test_capacity_dropping_is_ignored(small_config: dict[str, Any]) -> None:
    """The launch script's `moe_drop_tokens` would make a token depend on its neighbours."""
    assert architecture(small_config | {"moe_drop_tokens": True}) == architecture(small_config)
