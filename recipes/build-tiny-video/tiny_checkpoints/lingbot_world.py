"""LingBot-World fast with small numbers, in its published layout or as converted for diffusers.

OUT/lingbot_world_fast/    the transformer; text encoder and VAE are in OUT/components, a Wan
OUT/transformer/ ...       converted: one folder in diffusers' layout, the same weights
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hyimg_cli.models.lingbot_world.layout import NetworkShape
from hyimg_cli.models.lingbot_world.network import LingBotNetwork
from hyimg_cli.models.lingbot_world.weights import original_name
from tiny_checkpoints import wan
from tiny_checkpoints.writing import drawn, write_json

SEED = "tiny-lingbot-world-1"
SHAPE = NetworkShape(
    num_attention_heads=3,
    attention_head_dim=12,
    num_layers=2,
    ffn_dim=64,
    text_dim=32,
    text_len=24,
    freq_dim=32,
)
ORIGINAL: dict[str, Any] = {
    "_class_name": "WanModelFast",
    "_diffusers_version": "0.33.0",
    "model_type": "i2v",
    "control_type": "cam",
    "text_len": SHAPE.text_len,
    "in_dim": SHAPE.in_channels,
    "dim": SHAPE.width,
    "ffn_dim": SHAPE.ffn_dim,
    "freq_dim": SHAPE.freq_dim,
    "text_dim": SHAPE.text_dim,
    "out_dim": SHAPE.out_channels,
    "num_heads": SHAPE.num_attention_heads,
    "num_layers": SHAPE.num_layers,
    "local_attn_size": -1,
    "sink_size": 0,
    "eps": SHAPE.eps,
}
CONVERTED: dict[str, Any] = {
    "_class_name": "CausalLingBotWorldTransformer3DModel",
    "_diffusers_version": wan.LIBRARY,
    "patch_size": list(SHAPE.patch_size),
    "text_len": SHAPE.text_len,
    "num_attention_heads": SHAPE.num_attention_heads,
    "attention_head_dim": SHAPE.attention_head_dim,
    "in_channels": SHAPE.in_channels,
    "out_channels": SHAPE.out_channels,
    "text_dim": SHAPE.text_dim,
    "freq_dim": SHAPE.freq_dim,
    "ffn_dim": SHAPE.ffn_dim,
    "num_layers": SHAPE.num_layers,
    "eps": SHAPE.eps,
    "local_attn_size": -1,
    "num_frames_per_block": SHAPE.num_frames_per_block,
}
INDEX: dict[str, Any] = {
    "_class_name": "LingBotWorldCausalDMDPipeline",
    "_diffusers_version": wan.LIBRARY,
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "CausalLingBotWorldTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
CARD: dict[str, Any] = {
    "name": "tiny-lingbot-world",
    "trained": False,
    "defaults": {"size": [32, 48], "num_frames": 21, "fps": 8},
}
_SHARDS = 2


def write(folder: Path, *, converted: bool = False) -> None:
    """Write a checkpoint in one of the two layouts: `converted` for diffusers, or as published."""
    wan.write(folder if converted else folder / "components")
    write_json(folder / "card.json", CARD)
    if converted:
        write_json(folder / "model_index.json", INDEX)
        for old in (folder / "transformer").iterdir():
            old.unlink()
        write_transformer(folder / "transformer", CONVERTED)
    else:
        write_transformer(folder / "lingbot_world_fast", ORIGINAL)


def write_transformer(
    folder: Path, config: dict[str, Any], name_of: Callable[[str], str] = original_name
) -> None:
    """Write its configuration, and its weights in shards with an index, under original names."""
    write_json(folder / "config.json", config)
    with torch.device("meta"):
        found = LingBotNetwork(SHAPE).state_dict()
    tensors = {
        name_of(name): drawn(f"{SEED}/{name}", tuple(meta.shape)).to(torch.bfloat16)
        for name, meta in sorted(found.items())
    }
    names = list(tensors)
    places: dict[str, str] = {}
    for shard in range(_SHARDS):
        file = f"diffusion_pytorch_model-{shard + 1:05}-of-{_SHARDS:05}.safetensors"
        own = names[shard::_SHARDS]
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(own, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)
