"""Writes tiny picture editors with random weights, in diffusers' layout, into a folder.

    python recipes/build-tiny-editors/tiny_editors.py OUT      OUT/qwen-image, OUT/qwen-image-edit,
                                                               OUT/qwen-image-edit-plus

Their pictures are noise; their parts, names and files are those of the released ones. OUT must not
exist.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from tokenizers import AddedToken
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2 import Qwen2Tokenizer

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PIPELINES = {
    "qwen-image": "QwenImagePipeline",
    "qwen-image-edit": "QwenImageEditPipeline",
    "qwen-image-edit-plus": "QwenImageEditPlusPipeline",
}
WIDTH = 16


def write(folder: Path, kind: str) -> Path:
    """One checkpoint: a kind of PIPELINES."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": _text_encoder(tokenizer),
        "vae": AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "transformer": QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 4, 4),
        ),
        # As it is released.
        "scheduler": FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
    }
    if kind != "qwen-image":
        parts["processor"] = Qwen2VLProcessor(
            image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=512 * 512),
            video_processor=Qwen2VLVideoProcessor(),
            tokenizer=tokenizer,
            chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        )
    getattr(diffusers, PIPELINES[kind])(**parts).save_pretrained(folder)
    card = {"name": f"tiny-{kind}", "trained": False, "base_size": 96}
    (folder / "card.json").write_text(json.dumps(card) + "\n")
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    """One token a byte, the special tokens behind them."""
    characters = [SPECIAL[0], *bytes_to_unicode().values()]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL[1:]])
    return tokenizer


def _text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists")
    for kind in PIPELINES:
        print(write(arguments.out / kind, kind))


if __name__ == "__main__":
    main()
