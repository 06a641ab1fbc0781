"""Wan 2.1 and 2.2 with small numbers."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from tiny_checkpoints.writing import bfloat16, write_json, write_weights

SEED = "tiny-wan-1"
LIBRARY = "0.42.1"
TEXT_ENCODER: dict[str, Any] = {
    "model_type": "umt5",
    "vocab_size": 256,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "is_encoder_decoder": False,
    "use_cache": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
TRANSFORMER: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel",
    "_diffusers_version": LIBRARY,
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "_diffusers_version": LIBRARY,
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}
CARD: dict[str, Any] = {
    "name": "tiny-wan",
    "trained": False,
    "defaults": {"size": [48, 80], "num_frames": 9, "fps": 8, "num_inference_steps": 8},
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": LIBRARY,
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


def write(folder: Path, *, boundary_ratio: float | None = None, seed: str = SEED) -> None:
    """Write a Wan 2.1 checkpoint, or with `boundary_ratio` a Wan 2.2 one of two transformers."""
    write_json(folder / "model_index.json", index_of(boundary_ratio))
    write_json(folder / "card.json", CARD)
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_tokenizer(folder / "tokenizer")
    _write_text_encoder(folder / "text_encoder", seed)
    for name in ("transformer", "transformer_2")[: 1 if boundary_ratio is None else 2]:
        _write_transformer(folder / name, f"{seed}/{name}")
    write_json(folder / "vae" / "config.json", VAE)
    write_weights(
        folder / "vae" / "diffusion_pytorch_model.safetensors",
        lambda: AutoencoderKLWan(**_arguments(VAE)),
        f"{seed}/vae",
        bfloat16,
    )


def index_of(boundary_ratio: float | None) -> dict[str, Any]:
    """Return the contents of model_index.json."""
    network = ["diffusers", "WanTransformer3DModel"]
    return {
        "_class_name": "WanPipeline",
        "_diffusers_version": LIBRARY,
        "boundary_ratio": boundary_ratio,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": network,
        "transformer_2": [None, None] if boundary_ratio is None else network,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def _write_text_encoder(folder: Path, seed: str) -> None:
    write_json(folder / "config.json", {"architectures": ["UMT5EncoderModel"], **TEXT_ENCODER})
    write_weights(
        folder / "model.safetensors",
        lambda: UMT5EncoderModel(UMT5Config(**_arguments(TEXT_ENCODER))),
        f"{seed}/text_encoder",
        bfloat16,
    )


def _write_transformer(folder: Path, seed: str) -> None:
    write_json(folder / "config.json", TRANSFORMER)
    write_weights(
        folder / "diffusion_pytorch_model.safetensors",
        lambda: WanTransformer3DModel(**_arguments(TRANSFORMER)),
        seed,
        kept_in_float32,
    )


def kept_in_float32(name: str) -> torch.dtype:
    """Return names kept in float32, as in released checkpoints: norms, time embedding, tables."""
    kept = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    return torch.float32 if any(part in name for part in kept) else torch.bfloat16


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token a printable character."""
    characters = ["<pad>", "</s>", "<unk>", "▁", *(chr(code) for code in range(33, 127))]
    vocabulary = [(c, 0.0 if index < 3 else -1.0) for index, c in enumerate(characters)]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0)
    folder.mkdir(parents=True, exist_ok=True)
    text = tokenizer.backend_tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "T5Tokenizer",
            "extra_ids": 0,
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "model_max_length": 512,
        },
    )


def _arguments(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key != "model_type"
    }
