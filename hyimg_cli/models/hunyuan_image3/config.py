"""The checkpoint's `config.json` and `generation_config.json` as typed facts; no torch.

Keys that the released code never reads are ignored. A key whose other values exist only in
unreleased code is refused, so that a checkpoint we would compute wrongly does not load.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_origin, get_type_hints

from hyimg_cli.errors import CheckpointError
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.card import SamplingDefaults
from hyimg_cli.spec.job import BOT_TASKS

# What a part of a picture that the VAE has at work at once may take; see `row_chunks`.
VAE_CHUNK_BYTES = 1 << 29
# Of all layers: each has tensors with names of their own.
_MOST_EXPERTS = 100_000

Template = Literal["instruct", "pretrain"]
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Facts = TypeVar("Facts", bound="DataclassInstance")

# Options with a single released value; anything else is another network.
_ONLY_RELEASED: dict[str, Any] = {
    "norm_type": "rms",
    "hidden_act": "silu",
    "rope_type": "2d",
    "use_cla": False,
    "use_mla": False,
    "use_qk_norm": True,
    "norm_topk_prob": True,
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
# Which tokens of a source image see each other: separately, or all of its VAE's and its ViT's.
_SOURCE_SPANS = {"full": False, "joint_full": True}
# Options of transformers' generation that change which token is next, at the values that do not.
_NO_EFFECT: dict[str, Any] = {
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
# What is taken for a key that generation_config.json does not have.
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
# The same of config.json, where the key is not the name of a fact below.
_CONFIG_DEFAULTS = {
    "cond_token_attn_type": "full",
    "model_version": "HunyuanImage-3.0-Instruct",
    "num_shared_expert": 1,
}
# What null says of the sampling: that nothing is left out, or changed.
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class VaeArchitecture:
    """Widths and factors of the 3-D autoencoder; `scaling_factor` maps latents to unit variance.

    `sample_size`: side in pixels of a tile, where latents are decoded in tiles.
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
    downsample_match_channel: bool = True
    upsample_match_channel: bool = True


@dataclass(frozen=True)
class VisionArchitecture:
    """The Siglip2 tower, its patch limit, and the aligner behind it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    patch_size: int
    num_patches: int
    max_num_patches: int
    processor: tuple[tuple[str, Any], ...]
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True
    aligner_depth: int = 2


@dataclass(frozen=True)
class Architecture:
    """Everything about the network's shape. Per-layer values are tuples of `num_hidden_layers`."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    moe_topk: tuple[int, ...]
    num_shared_expert: tuple[int, ...]
    moe_intermediate_size: tuple[int, ...]
    max_position_embeddings: int
    vocab_size: int
    pad_token_id: int
    vae_downsample_factor: int
    has_joint_source_span: bool
    is_base: bool
    vae: VaeArchitecture
    vision: VisionArchitecture
    use_mixed_mlp_moe: bool = False
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


def architecture(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """The network that `config` describes. Raises CheckpointError for a key missing or
    unreleased.
    """
    try:
        _refuse_packed_otherwise(config, where)
        _refuse_unreleased(config, where)
        return _architecture(config)
    except KeyError as error:
        what = f"config key {error} is missing"
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        what = f"a config value is of the wrong kind: {error}"
    raise CheckpointError(what, where=where, code="checkpoint.config")


def generation_config(config: Mapping[str, Any]) -> GenerationConfig:
    """Sampling defaults; a key that the file omits takes the released Instruct value, but the
    template is upstream's own, "pretrain".

    Raises CheckpointError for a value of the wrong kind, and for what we would sample wrongly.
    """
    for key, neutral in _NO_EFFECT.items():
        if config.get(key) not in (None, neutral):
            raise CheckpointError(
                f"{key} is {config[key]!r}, which is not implemented",
                where="generation_config.json",
                hint="take the key out: no released checkpoint has it",
                code="checkpoint.config",
            )
    off = {key: value for key, value in _OFF.items() if config.get(key, value) is None}
    try:
        return _generation_config({k: v for k, v in config.items() if v is not None} | off)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"a value is of the wrong kind: {error}",
            where="generation_config.json",
            code="checkpoint.config",
        ) from None


def _generation_config(config: Mapping[str, Any]) -> GenerationConfig:
    told = {key: config.get(key, default) for key, default in _GENERATION_DEFAULTS.items()}
    template = told["sequence_template"]
    if template not in ("instruct", "pretrain"):
        raise ValueError(f"sequence_template {template!r} is not one of instruct, pretrain")
    return GenerationConfig(
        template=template,
        defaults=SamplingDefaults(
            num_inference_steps=_count("num_inference_steps", told["diff_infer_steps"]),
            guidance_scale=float(told["diff_guidance_scale"]),
            flow_shift=float(told["flow_shift"]),
            bot_task=_bot_task(told["bot_task"]),
            drop_think=bool(told["drop_think"]),
            use_system_prompt=str(told["use_system_prompt"]),
            temperature=float(told["temperature"]) if told["do_sample"] else 0.0,
            top_k=int(told["top_k"]),
            top_p=float(told["top_p"]),
            max_new_tokens=_count("max_new_tokens", told["max_new_tokens"]),
            repetition_penalty=_penalty(float(told["repetition_penalty"])),
        ),
    )


def _count(name: str, value: Any) -> int:
    """A default that a user could give as well. Raises ValueError for one out of that range."""
    count: int = SETTINGS[name].kind.read(int(value))
    return count


def defaulted(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that neither file has, and what is taken for them."""
    parts = [(Architecture, config), (VaeArchitecture, config.get("vae", {}))]
    parts += [(VisionArchitecture, {**config.get("vit", {}), "aligner_depth": None})]
    absent = {
        field.name: field.default
        for cls, values in parts
        for field in fields(cls)
        if field.default not in (MISSING, None) and field.name not in values
    }
    absent |= {key: value for key, value in _CONFIG_DEFAULTS.items() if key not in config}
    return absent | {k: v for k, v in _GENERATION_DEFAULTS.items() if k not in generation}


def _penalty(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"repetition_penalty {value} is not above 0")
    return value


def _bot_task(name: str) -> str:
    if name in BOT_TASKS:
        return name
    if name in ("image", "auto", "img_ratio"):
        return "none"
    raise ValueError(f"bot_task {name!r} is not one of {', '.join(BOT_TASKS)}")


def _refuse_packed_otherwise(config: Mapping[str, Any], where: str) -> None:
    """Passes weights as they were released, and those that bitsandbytes has packed: their parts
    are known. Others' mean nothing without the program that made them.
    """
    found = config.get("quantization_config") or {}
    method = found.get("quant_method") or "bitsandbytes"
    if method != "bitsandbytes":
        raise CheckpointError(
            f"its weights are quantised by {method!r}, which is not read",
            where=where,
            hint="use the checkpoint as it was released, with --quantization fp8 or nf4, or one "
            "that transformers has saved with bitsandbytes (NF4, INT8)",
            code="checkpoint.quantized",
        )


def _refuse_unreleased(config: Mapping[str, Any], where: str) -> None:
    scaling = config.get("rope_scaling") or {}
    flat = {**config, "rope_scaling type": scaling.get("type", scaling.get("rope_type"))}
    for key, released in (*_ONLY_RELEASED.items(), ("rope_scaling type", "custom")):
        value = flat.get(key, released)
        if value is not None and value != released:
            raise CheckpointError(
                f"{key} is {value!r}; only {released!r} exists in released checkpoints",
                where=where,
                code="checkpoint.config",
            )


def _has_joint_source_span(kind: Any) -> bool:
    if kind not in _SOURCE_SPANS:
        known = ", ".join(_SOURCE_SPANS)
        raise ValueError(f"cond_token_attn_type {kind!r} is not one of {known}")
    return _SOURCE_SPANS[kind]


def _architecture(config: Mapping[str, Any]) -> Architecture:
    told = {**_CONFIG_DEFAULTS, **config}
    layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    experts = int(config["num_experts"])
    if not 0 < layers * experts <= _MOST_EXPERTS:
        raise ValueError(f"{layers} layers of {experts} experts")
    if heads < 1:
        raise ValueError(f"{heads} attention heads")
    chosen = _per_layer(config["moe_topk"], layers)
    if not all(0 < k <= experts for k in chosen):
        raise ValueError(f"{max(chosen)} of {experts} experts for a token")
    head_dim = config.get("attention_head_dim") or config.get("head_dim")
    down = config["vae_downsample_factor"]
    if down[0] != down[1]:
        raise CheckpointError(
            f"vae_downsample_factor {down} is not square", code="checkpoint.config"
        )
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    return _typed(
        Architecture,
        config,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim or config["hidden_size"] // heads),
        moe_topk=chosen,
        num_shared_expert=_per_layer(told["num_shared_expert"], layers),
        moe_intermediate_size=_per_layer(inner, layers),
        pad_token_id=int(config.get("pad_token_id", config.get("pad_id", 0))),
        vae_downsample_factor=int(down[0]),
        has_joint_source_span=_has_joint_source_span(told["cond_token_attn_type"]),
        is_base=told["model_version"] == "HunyuanImage-3.0",
        vae=_typed(VaeArchitecture, config["vae"]),
        vision=_vision(config["vit"], config["vit_processor"], config["vit_aligner"]),
    )


def _typed(cls: type[Facts], values: Mapping[str, Any], **known: Any) -> Facts:
    """A dataclass of facts: those `known`, and the others from `values`, by name and as their type.

    Raises KeyError for one without a default that is not there, TypeError or ValueError for a value
    of another kind.
    """
    kinds = get_type_hints(cls)
    read = {
        field.name: _of_kind(kinds[field.name], values[field.name])
        for field in fields(cls)
        if field.name not in known and (field.name in values or field.default is MISSING)
    }
    return cls(**read, **known)


def _of_kind(kind: Any, value: Any) -> Any:
    if kind == float | None:
        return None if value is None else float(value)
    return tuple(value) if get_origin(kind) is tuple else kind(value)


def _per_layer(value: int | Sequence[int], layers: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * layers
    if len(value) != layers:
        raise CheckpointError(
            f"a per-layer list has {len(value)} entries for {layers} layers",
            code="checkpoint.config",
        )
    return tuple(int(v) for v in value)


def _vision(
    vit: Mapping[str, Any], processor: Mapping[str, Any], aligner: Mapping[str, Any]
) -> VisionArchitecture:
    if aligner.get("projector_type", "mlp_gelu") != "mlp_gelu":
        raise CheckpointError(
            f"vit_aligner projector_type {aligner['projector_type']!r} is not released",
            code="checkpoint.config",
        )
    return _typed(
        VisionArchitecture,
        vit,
        max_num_patches=int(processor["max_num_patches"]),
        aligner_depth=int(aligner.get("depth", 2)),
        processor=tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in sorted(processor.items())
            if key != "image_processor_type"
        ),
    )
