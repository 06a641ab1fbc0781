"""Released video checkpoints by their public configurations: networks without numbers.

Tokenizers, schedulers and processors are those of small checkpoints in the same layout; the
classes' defaults are the released numbers where nothing is given.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fake_gpu.released_networks import write_hole, write_network
from tiny_checkpoints import hunyuan_video15
from tiny_video import write_start, write_wan

from hyimg_cli.models.common.weights import tensor_shapes
from hyimg_cli.models.lingbot_world.layout import network_shape, read_layout
from hyimg_cli.models.lingbot_world.network import LingBotNetwork

_GOLDEN = Path(__file__).parents[1] / "models" / "lingbot_world" / "golden" / "checkpoint"
Values = dict[str, Any]
# By component: a class and its configuration.
Parts = dict[str, tuple[str, Values]]
UMT5: Values = {
    "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
    "num_heads": 64, "is_encoder_decoder": False, "use_cache": False, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
WAN: Values = {
    "patch_size": [1, 2, 2], "num_attention_heads": 40, "attention_head_dim": 128,
    "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824,
    "num_layers": 40, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
    "rope_max_seq_len": 1024,
}  # fmt: skip
WAN_START = WAN | {"in_channels": 36}
WAN_5B = WAN | {
    "num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336,
    "num_layers": 30,
}  # fmt: skip
VAE_5B: Values = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48, "is_residual": True, "in_channels": 12,
    "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4,
}  # fmt: skip
CLIP_H: Values = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 14, "projection_dim": 1024,
}  # fmt: skip
HUNYUAN: Values = {
    "in_channels": 65, "out_channels": 32, "num_attention_heads": 16, "attention_head_dim": 128,
    "num_layers": 54, "num_refiner_layers": 2, "mlp_ratio": 4.0, "patch_size": 1, "patch_size_t": 1,
    "qk_norm": "rms_norm", "text_embed_dim": 3584, "text_embed_2_dim": 1472,
    "image_embed_dim": 1152, "rope_theta": 256.0, "rope_axes_dim": [16, 56, 56],
    "target_size": 640, "task_type": "t2v", "use_meanflow": False,
}  # fmt: skip
QWEN_7B: Values = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0,
                        "mrope_section": [16, 24, 24]},
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BYT5: Values = {
    "vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "use_cache": False,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SIGLIP: Values = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
}  # fmt: skip
LINGBOT = WAN | {"in_channels": 36, "text_len": 512, "num_frames_per_block": 3}
_WAN_PARTS: Parts = {"text_encoder": ("UMT5EncoderModel", UMT5), "vae": ("AutoencoderKLWan", {})}
_HUNYUAN_PARTS: Parts = {
    "text_encoder": ("Qwen2_5_VLTextModel", QWEN_7B),
    "text_encoder_2": ("T5EncoderModel", BYT5),
    "vae": ("AutoencoderKLHunyuanVideo15", {}),
}


def write_film(folder: Path, name: str) -> Path:
    """Write a released checkpoint by a name of `FILMS`."""
    FILMS[name](folder)
    (folder / "card.json").unlink(missing_ok=True)
    return folder


def _grow(folder: Path, parts: Parts) -> None:
    for name, (class_name, values) in parts.items():
        write_network(folder / name, class_name, values)


def _wan(folder: Path) -> None:
    write_wan(folder)
    _grow(folder, _WAN_PARTS | {"transformer": ("WanTransformer3DModel", WAN)})


def _wan_pair(folder: Path) -> None:
    write_wan(folder, boundary_ratio=0.875)
    network = ("WanTransformer3DModel", WAN)
    _grow(folder, _WAN_PARTS | {"transformer": network, "transformer_2": network})


def _wan_start(folder: Path) -> None:
    write_start(folder, "wan21")
    network = WAN_START | {"image_dim": 1280, "added_kv_proj_dim": 5120}
    encoder: Parts = {"image_encoder": ("CLIPVisionModel", CLIP_H)}
    _grow(folder, _WAN_PARTS | encoder | {"transformer": ("WanTransformer3DModel", network)})
    sizes = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    _change(folder / "image_processor" / "preprocessor_config.json", sizes)


def _wan_pair_start(folder: Path) -> None:
    write_start(folder, "a14b")
    network = ("WanTransformer3DModel", WAN_START)
    _grow(folder, _WAN_PARTS | {"transformer": network, "transformer_2": network})


def _wan_5b(folder: Path) -> None:
    write_start(folder, "5b")
    own: Parts = {
        "vae": ("AutoencoderKLWan", VAE_5B),
        "transformer": ("WanTransformer3DModel", WAN_5B),
    }
    _grow(folder, _WAN_PARTS | own)


def _hunyuan(folder: Path) -> None:
    hunyuan_video15.write(folder)
    _change(folder / "guider" / "guider_config.json", {"guidance_scale": 6.0})
    own: Parts = {"transformer": ("HunyuanVideo15Transformer3DModel", HUNYUAN)}
    _grow(folder, _HUNYUAN_PARTS | own)


def _hunyuan_start(folder: Path) -> None:
    write_start(folder, "hunyuan")
    _change(folder / "guider" / "guider_config.json", {"guidance_scale": 6.0})
    network = HUNYUAN | {"task_type": "i2v"}
    own: Parts = {"transformer": ("HunyuanVideo15Transformer3DModel", network)}
    _grow(folder, _HUNYUAN_PARTS | own | {"image_encoder": ("SiglipVisionModel", SIGLIP)})
    side = {"size": {"height": 384, "width": 384}}
    _change(folder / "feature_extractor" / "preprocessor_config.json", side)


def _lingbot(folder: Path) -> None:
    shutil.copytree(_GOLDEN, folder)
    _grow(folder, _WAN_PARTS)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    _change(folder / "transformer" / "config.json", LINGBOT)
    shape = network_shape(read_layout(folder))
    with torch.device("meta"):
        shapes = tensor_shapes(LingBotNetwork(shape))
    write_hole(folder / "transformer" / "diffusion_pytorch_model.safetensors", shapes)


def _change(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


FILMS = {
    "Wan2.1-T2V-14B": _wan,
    "Wan2.1-I2V-14B-480P": _wan_start,
    "Wan2.2-T2V-A14B": _wan_pair,
    "Wan2.2-I2V-A14B": _wan_pair_start,
    "Wan2.2-TI2V-5B": _wan_5b,
    "HunyuanVideo-1.5-480p-t2v": _hunyuan,
    "HunyuanVideo-1.5-480p-i2v": _hunyuan_start,
    "LingBot-World-fast": _lingbot,
}
