"""HunyuanVideo-1.5 with small numbers: five autoencoder stages, four dual-stream blocks."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from tokenizers import AddedToken
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2 import Qwen2Tokenizer

from tiny_checkpoints.writing import bfloat16, write_json, write_weights

SEED = "tiny-video-1"
LIBRARY = "0.42.1"
# Words of the films on which the embedded checkpoint is trained: one token each, as whole words.
WORDS = (
    "circle", "square", "triangle", "red", "yellow", "green", "blue", "purple", "white",
    "left", "right", "up", "down", "still", "moves", "moving", "goes", "slides", "stays", "stands",
    "standing", "black", "dark", "background",
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The released tokenizer spends 108 tokens on everything before the prompt, and the pipeline cuts
# off exactly this many. Here a token is a byte, so the system message, which contains none of
# WORDS, is cut to give 108 in all.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'system' %}{{ message['content'][:92] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ENCODER: dict[str, Any] = {
    "model_type": "qwen2_5_vl_text",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [1, 1, 2],
    },
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GLYPH_ENCODER: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 267,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
TRANSFORMER: dict[str, Any] = {
    "_class_name": "HunyuanVideo15Transformer3DModel",
    "_diffusers_version": LIBRARY,
    "in_channels": 33,
    "out_channels": 16,
    "num_attention_heads": 3,
    "attention_head_dim": 24,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "mlp_ratio": 3.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 32,
    "text_embed_2_dim": 24,
    "image_embed_dim": 16,
    "rope_theta": 256.0,
    "rope_axes_dim": [8, 8, 8],
    "target_size": 64,
    "task_type": "t2v",
    "use_meanflow": False,
}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLHunyuanVideo15",
    "_diffusers_version": LIBRARY,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "block_out_channels": [8, 16, 16, 16, 32],
    "layers_per_block": 1,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
    "scaling_factor": 1.03682,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": LIBRARY,
    "num_train_timesteps": 1000,
    "shift": 3.0,
}
GUIDER: dict[str, Any] = {
    "_class_name": "ClassifierFreeGuidance",
    "_diffusers_version": LIBRARY,
    "guidance_scale": 2.0,
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
    "enabled": True,
}
CARD: dict[str, Any] = {
    "name": "tiny-video",
    "trained": False,
    "defaults": {"num_frames": 9, "fps": 8, "num_inference_steps": 8},
}
MODEL_INDEX: dict[str, Any] = {
    "_class_name": "HunyuanVideo15Pipeline",
    "_diffusers_version": LIBRARY,
    "guider": ["diffusers", "ClassifierFreeGuidance"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo15"],
}


def write(folder: Path, *, seed: str = SEED) -> None:
    """Write the whole checkpoint; other files in an existing folder are kept."""
    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(folder / "card.json", CARD)
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_json(folder / "guider" / "guider_config.json", GUIDER)
    _write_tokenizers(folder)
    _write_text_encoders(folder, seed)
    _write_networks(folder, seed)


def _write_text_encoders(folder: Path, seed: str) -> None:
    write_json(
        folder / "text_encoder" / "config.json",
        {"architectures": ["Qwen2_5_VLTextModel"], **TEXT_ENCODER},
    )
    write_weights(
        folder / "text_encoder" / "model.safetensors",
        lambda: Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**arguments(TEXT_ENCODER))),
        f"{seed}/text_encoder",
        bfloat16,
    )
    write_json(
        folder / "text_encoder_2" / "config.json",
        {"architectures": ["T5EncoderModel"], **GLYPH_ENCODER},
    )
    write_weights(
        folder / "text_encoder_2" / "model.safetensors",
        lambda: T5EncoderModel(T5Config(**arguments(GLYPH_ENCODER))),
        f"{seed}/text_encoder_2",
        bfloat16,
    )


def _write_networks(folder: Path, seed: str) -> None:
    write_json(folder / "transformer" / "config.json", TRANSFORMER)
    write_weights(
        folder / "transformer" / "diffusion_pytorch_model.safetensors",
        lambda: HunyuanVideo15Transformer3DModel(**arguments(TRANSFORMER)),
        f"{seed}/transformer",
        transformer_dtype,
    )
    write_json(folder / "vae" / "config.json", VAE)
    write_weights(
        folder / "vae" / "diffusion_pytorch_model.safetensors",
        lambda: AutoencoderKLHunyuanVideo15(**arguments(VAE)),
        f"{seed}/vae",
        bfloat16,
    )


def transformer_dtype(name: str) -> torch.dtype:
    """Return the dtype: the glyph projection, most of the weights, takes one byte each.

    It is 2048 wide in any configuration.
    """
    is_wide = name.startswith("context_embedder_2.linear_") and name.endswith(".weight")
    return torch.float8_e4m3fn if is_wide else torch.bfloat16


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration file's contents as its class takes them."""
    return {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key != "model_type"
    }


def _write_tokenizers(folder: Path) -> None:
    """Write tokenizers with one token a byte, then the special tokens and the words."""
    main = folder / "tokenizer"
    characters = [*SPECIAL[:1], *bytes_to_unicode().values(), *SPECIAL[1:]]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL[1:]])
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in WORDS])
    main.mkdir(parents=True, exist_ok=True)
    text = tokenizer.backend_tokenizer.to_str(pretty=True)
    (main / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    (main / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        main / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": 131072,
        },
    )
    write_json(
        folder / "tokenizer_2" / "tokenizer_config.json",
        {
            "tokenizer_class": "ByT5Tokenizer",
            "extra_ids": 0,
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "model_max_length": 1000000,
        },
    )
