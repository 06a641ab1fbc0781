"""The checkpoint's `config.json` and `generation_config.json` as typed facts; no torch.

Keys that the released code never reads are ignored. A key whose other values exist only in
unreleased code is refused, so that a checkpoint we would compute wrongly does not load.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models.common.config import Config, VitShape, refuse_unreleased
from hyimg_cli.spec.card import SamplingDefaults
from hyimg_cli.spec.options import BOT_TASKS

# Maximum bytes of the part of a picture that the VAE works on at a time; see `row_chunks`.
VAE_CHUNK_BYTES = 1 << 29
# Maximum number of experts in all layers: each has its own tensors.
_MOST_EXPERTS = 100_000

Template = Literal["instruct", "pretrain"]

# Options with a single released value; anything else is another network.
_ONLY_RELEASED: dict[str, Any] = {
    "norm_type": "rms",
    "hidden_act": "silu",
    "rope_type": "2d",
    "use_cla": False,
    "use_mla": False,
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "use_mixed_mlp_moe": True,
    "routed_scaling_factor": False,
    "group_limited_greedy": False,
    "moe_layer_num_skipped": 0,
    "add_classification_head": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "patch_size": 1,
    "img_proj_type": "unet",
    "cond_image_type": "vae_vit",
    "use_rotary_pos_emb": True,
    "vit_type": "siglip2-so400m-patch16-naflex",
}
# Which tokens of a source image attend to each other: separately, or all of its VAE and ViT tokens.
_SOURCE_SPANS = {"full": False, "joint_full": True}
# Defaults for keys that generation_config.json lacks.
_GENERATION_DEFAULTS: dict[str, Any] = {
    "sequence_template": "pretrain",
    "diff_infer_steps": 50,
    "diff_guidance_scale": 2.5,
    "flow_shift": 3.0,
    "bot_task": "think_recaption",
    "drop_think": False,
    "use_system_prompt": "None",
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 1024,
    "top_p": 0.95,
    "max_new_tokens": 2048,
    "repetition_penalty": 1.0,
}
# Its keys that do not change the choice of the next token.
_IDLE = {"bos_token_id", "eos_token_id", "pad_token_id", "max_length"}
# Defaults for keys that config.json lacks, if the key is not the name of a fact below.
_CONFIG_DEFAULTS: dict[str, Any] = {
    "cond_token_attn_type": "full",
    "model_version": "HunyuanImage-3.0-Instruct",
}
# The sampling values that null stands for: nothing is excluded or changed.
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class VaeArchitecture:
    """Widths and factors of the 3-D autoencoder; `scaling_factor` gives unit variance.

    `sample_size`: side in pixels of a tile of tiled decoding.
    """

    block_out_channels: tuple[int, ...]
    in_channels: int
    out_channels: int
    latent_channels: int
    layers_per_block: int
    ffactor_spatial: int
    ffactor_temporal: int
    sample_size: int
    scaling_factor: float
    shift_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class VisionArchitecture(VitShape):
    """The Siglip2 tower, its patch limit, and the aligner after it."""

    num_channels: int
    num_patches: int
    max_num_patches: int
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    vision_use_head: bool = True


@dataclass(frozen=True)
class Architecture:
    """Everything about the network's shape; all layers are equal."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    moe_topk: int
    moe_intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    pad_token_id: int
    has_joint_source_span: bool
    is_base: bool
    vae: VaeArchitecture
    vision: VisionArchitecture
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    patch_embed_hidden_dim: int = 1024
    image_base_size: int = 1024
    cfg_distilled: bool = False
    use_meanflow: bool = False

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class GenerationConfig:
    """`generation_config.json`: sampling defaults and the sequence template."""

    template: Template
    defaults: SamplingDefaults


def architecture(config: Mapping[str, Any], *, where: Path | str = "config.json") -> Architecture:
    """Return the network that `config` describes.

    Raises CheckpointError for a missing key, an unreleased value, or an impossible one.
    """
    own = Config(config, where)
    # Weights as released, or packed by bitsandbytes, whose format is known. Other packed formats
    # cannot be read.
    method = own.table("quantization_config", {}).text("quant_method", "bitsandbytes")
    if method != "bitsandbytes":
        raise CheckpointError(
            f"the weights are quantized with {method!r}, which is not supported",
            where=own.where,
            hint="use the original checkpoint with --quantization fp8 or nf4, or one "
            "saved by transformers with bitsandbytes (NF4, INT8)",
            code="checkpoint.quantized",
        )
    refuse_unreleased(own, _ONLY_RELEASED)
    scaling = own.table("rope_scaling", {})
    kind = scaling.text("type", scaling.text("rope_type", "custom"))
    refuse_unreleased(replace(scaling, values={"type": kind}), {"type": "custom"})
    layers = own.count("num_hidden_layers")
    heads = own.count("num_attention_heads")
    experts = own.count("num_experts", most=max(1, _MOST_EXPERTS // layers))
    head_dim = own.count("head_dim", own.count("hidden_size") // heads)
    _of_layers(own, "num_shared_expert", layers, 1, most=1)
    spans = own.text("cond_token_attn_type", _CONFIG_DEFAULTS["cond_token_attn_type"])
    if spans not in _SOURCE_SPANS:
        raise own.fault("cond_token_attn_type", spans, f"one of {', '.join(_SOURCE_SPANS)}")
    inner = "moe_intermediate_size" if own.has("moe_intermediate_size") else "intermediate_size"
    vae = own.table("vae")
    of_vae = ("downsample_match_channel", "upsample_match_channel")
    refuse_unreleased(vae, dict.fromkeys(of_vae, True))
    autoencoder = vae.facts(VaeArchitecture)
    levels = len(autoencoder.block_out_channels)
    if math.log2(autoencoder.ffactor_spatial) != levels - 1:
        expected = f"a factor of 2 between each two of {levels} levels"
        raise vae.fault("ffactor_spatial", autoencoder.ffactor_spatial, expected)
    down = own.counts("vae_downsample_factor", length=2)
    if set(down) != {autoencoder.ffactor_spatial}:
        raise own.fault("vae_downsample_factor", down, "the VAE's ffactor_spatial, twice")
    version = own.text("model_version", _CONFIG_DEFAULTS["model_version"])
    return own.facts(
        Architecture,
        num_hidden_layers=layers,
        num_key_value_heads=own.count("num_key_value_heads", heads),
        head_dim=own.count("attention_head_dim", head_dim),
        moe_topk=_of_layers(own, "moe_topk", layers, most=experts),
        moe_intermediate_size=_of_layers(own, inner, layers),
        pad_token_id=own.count("pad_token_id", own.count("pad_id", 0, least=0), least=0),
        has_joint_source_span=_SOURCE_SPANS[spans],
        # Sizes differ in steps of a sixteenth of it.
        image_base_size=own.count("image_base_size", Architecture.image_base_size, least=16),
        is_base=version == "HunyuanImage-3.0",
        vae=autoencoder,
        vision=_vision(own),
    )


def generation_config(
    config: Mapping[str, Any], *, where: Path | str = "generation_config.json"
) -> GenerationConfig:
    """Return sampling defaults; missing keys take the released Instruct values.

    Except the template, which is upstream's "pretrain". Raises CheckpointError for a wrong value,
    and for options that would be sampled wrongly.
    """
    # transformers' other generation options have no effect if they are null, 0, 1 or texts.
    known = _GENERATION_DEFAULTS.keys() | _IDLE
    for key, value in config.items():
        if key not in known and value not in (None, 0, 1) and not isinstance(value, str):
            raise CheckpointError(
                f"{key} = {value!r} is not supported",
                where=where,
                hint="remove the key: no released checkpoint has it",
                code="checkpoint.config",
            )
    off = {key: value for key, value in _OFF.items() if config.get(key, value) is None}
    told = {key: value for key, value in config.items() if value is not None}
    own = Config(_GENERATION_DEFAULTS | told | off, where)
    template = own.text("sequence_template")
    if template not in get_args(Template):
        raise own.fault("sequence_template", template, "instruct or pretrain")
    bot_task = own.text("bot_task")
    if bot_task in ("image", "auto", "img_ratio"):
        bot_task = "none"
    if bot_task not in BOT_TASKS:
        raise own.fault("bot_task", bot_task, f"one of {', '.join(BOT_TASKS)}")
    return GenerationConfig(
        template=cast(Template, template),
        defaults=SamplingDefaults(
            num_inference_steps=own.setting("num_inference_steps", "diff_infer_steps"),
            guidance_scale=own.setting("guidance_scale", "diff_guidance_scale"),
            flow_shift=own.setting("flow_shift"),
            bot_task=bot_task,
            drop_think=own.setting("drop_think"),
            use_system_prompt=own.setting("use_system_prompt"),
            temperature=own.setting("temperature") if own.flag("do_sample") else 0.0,
            top_k=own.setting("top_k"),
            top_p=own.setting("top_p"),
            max_new_tokens=own.setting("max_new_tokens"),
            repetition_penalty=own.number("repetition_penalty", above=0),
        ),
    )


def defaulted(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys that neither file has, with their defaults."""
    parts = [(Architecture, config), (VaeArchitecture, config.get("vae", {}))]
    parts += [(VisionArchitecture, config.get("vit", {}))]
    absent = {
        field.name: field.default
        for cls, values in parts
        for field in fields(cls)
        if field.default not in (MISSING, None) and field.name not in values
    }
    absent |= {key: value for key, value in _CONFIG_DEFAULTS.items() if key not in config}
    return absent | {k: v for k, v in _GENERATION_DEFAULTS.items() if k not in generation}


def _of_layers(
    own: Config, name: str, layers: int, default: int | None = None, **bounds: int
) -> int:
    """Return a number of all layers, given once or per layer; all releases have equal layers."""
    if not isinstance(own.values.get(name), list):
        return own.count(name, default, **bounds)
    every = own.counts(name, None, layers, **bounds)
    if len(set(every)) > 1:
        raise own.fault(name, [*every], "the same number for every layer")
    return every[0]


def _vision(own: Config) -> VisionArchitecture:
    processor, aligner = own.table("vit_processor"), own.table("vit_aligner")
    refuse_unreleased(aligner, {"projector_type": "mlp_gelu", "depth": 2})
    refuse_unreleased(own.table("vit"), {"hidden_act": "gelu_pytorch_tanh"})
    # Pillow's number for bilinear.
    known = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 2}
    refuse_unreleased(processor, known)
    return own.table("vit").facts(
        VisionArchitecture,
        max_num_patches=processor.count("max_num_patches"),
        rescale_factor=processor.number("rescale_factor", 1 / 255, above=0),
        image_mean=processor.numbers("image_mean", (0.5, 0.5, 0.5)),
        image_std=processor.numbers("image_std", (0.5, 0.5, 0.5)),
    )
