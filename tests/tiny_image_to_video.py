"""Checkpoints of image-to-video with small numbers: four of Wan, two of HunyuanVideo-1.5."""

from functools import partial
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan, HunyuanVideo15Transformer3DModel, WanTransformer3DModel
from tiny_checkpoints import hunyuan_video15, wan
from tiny_checkpoints.writing import bfloat16, write_json, write_weights
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

WEIGHTS = "diffusion_pytorch_model.safetensors"
# Shaped like the released ones: a class row, rows of patches; the last layer but one is read.
CLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": 16,
}
SIGLIP = CLIP | {"image_size": 48, "patch_size": 16}
CLIP_TOKENS = (32 // 16) ** 2 + 1
VAE_5B: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "_diffusers_version": wan.LIBRARY,
    "base_dim": 8,
    "decoder_base_dim": 8,
    "z_dim": 48,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "latents_mean": [index / 50 - 0.5 for index in range(48)],
    "latents_std": [0.5 + index / 60 for index in range(48)],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}


def write_wan(
    folder: Path,
    *,
    boundary_ratio: float | None = None,
    images: int = 0,
    is_5b: bool = False,
    seed: str = "tiny-wan-start-1",
) -> None:
    """`images`: whose tokens the transformer reads, as Wan 2.1 does."""
    wan.write(folder, boundary_ratio=boundary_ratio)
    index = wan.index_of(boundary_ratio) | {"expand_timesteps": is_5b}
    if not is_5b:
        index["_class_name"] = "WanImageToVideoPipeline"
        index |= {"image_encoder": [None, None], "image_processor": [None, None]}
    network = wan.TRANSFORMER | {"in_channels": 48 if is_5b else 36}
    if is_5b:
        network["out_channels"] = 48
        write_json(folder / "vae" / "config.json", VAE_5B)
        write_weights(
            folder / "vae" / WEIGHTS,
            lambda: AutoencoderKLWan(**hunyuan_video15.arguments(VAE_5B)),
            f"{seed}/vae",
            bfloat16,
        )
    if images:
        index["image_encoder"] = ["transformers", "CLIPVisionModel"]
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        network |= {"image_dim": CLIP["hidden_size"], "added_kv_proj_dim": 24}
        network["pos_embed_seq_len"] = images * CLIP_TOKENS if images > 1 else None
        _write_clip(folder, seed)
    for name in ("transformer", "transformer_2")[: 1 if boundary_ratio is None else 2]:
        write_json(folder / name / "config.json", network)
        write_weights(
            folder / name / WEIGHTS,
            lambda: WanTransformer3DModel(**hunyuan_video15.arguments(network)),
            f"{seed}/{name}",
            wan.kept_in_float32,
        )
    write_json(folder / "model_index.json", index)


def _write_clip(folder: Path, seed: str) -> None:
    write_json(
        folder / "image_encoder" / "config.json",
        {"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", **CLIP},
    )
    write_weights(
        folder / "image_encoder" / "model.safetensors",
        lambda: CLIPVisionModel(CLIPVisionConfig(**CLIP)),
        f"{seed}/image_encoder",
        bfloat16,
    )
    write_json(
        folder / "image_processor" / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28],
        },
    )


def write_hunyuan(folder: Path, *, is_distilled: bool = False) -> None:
    """`is_distilled`: to few steps, without guidance."""
    hunyuan_video15.write(folder)
    seed = "tiny-video-start-1"
    index = hunyuan_video15.MODEL_INDEX | {
        "_class_name": "HunyuanVideo15ImageToVideoPipeline",
        "image_encoder": ["transformers", "SiglipVisionModel"],
        "feature_extractor": ["transformers", "SiglipImageProcessor"],
    }
    write_json(folder / "model_index.json", index)
    network = hunyuan_video15.TRANSFORMER | {"task_type": "i2v", "use_meanflow": is_distilled}
    write_json(folder / "transformer" / "config.json", network)
    write_weights(
        folder / "transformer" / WEIGHTS,
        lambda: HunyuanVideo15Transformer3DModel(**hunyuan_video15.arguments(network)),
        f"{seed}/transformer",
        hunyuan_video15.transformer_dtype,
    )
    if is_distilled:
        guider = hunyuan_video15.GUIDER | {"guidance_scale": 1.0}
        write_json(folder / "guider" / "guider_config.json", guider)
        (folder / "card.json").unlink()
    write_json(
        folder / "image_encoder" / "config.json",
        {"architectures": ["SiglipVisionModel"], "model_type": "siglip_vision_model", **SIGLIP},
    )
    write_weights(
        folder / "image_encoder" / "model.safetensors",
        lambda: SiglipVisionModel(SiglipVisionConfig(**SIGLIP)),
        f"{seed}/image_encoder",
        bfloat16,
    )
    write_json(
        folder / "feature_extractor" / "preprocessor_config.json",
        {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 48, "width": 48},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )


KINDS = {
    "wan21": partial(write_wan, images=1),
    "flf": partial(write_wan, images=2),
    "a14b": partial(write_wan, boundary_ratio=0.9),
    "5b": partial(write_wan, is_5b=True),
    "hunyuan": write_hunyuan,
    "distilled": partial(write_hunyuan, is_distilled=True),
}
