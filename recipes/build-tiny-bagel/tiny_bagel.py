"""Write a tiny BAGEL checkpoint in the released layout to a folder.

    python recipes/build-tiny-bagel/tiny_bagel.py OUT

Weights are random, from a fixed seed: for trying out and for tests, not for pictures. Errors of the
released configuration are repeated here: a missing ViT layer, and a position table of 32 x 32 that
has 8 x 8 rows. OUT must not exist.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hyimg_cli.models.bagel.config import AutoencoderShape, read_architecture
from hyimg_cli.models.bagel.weights import autoencoder, stored_name, stored_shape, without_weights

TABLE_SIDE, VIT_SIDE, VIT_LAYERS = 8, 9, 2
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIGS: dict[str, dict[str, Any]] = {
    "config.json": {
        "architectures": ["Bagel"],
        "model_type": "bagel",
        "visual_gen": True,
        "visual_und": True,
        "latent_patch_size": 2,
        "max_latent_size": 32,
        "vit_max_num_patch_per_side": VIT_SIDE,
        "connector_act": "gelu_pytorch_tanh",
        "interpolate_pos": False,
        "timestep_shift": 1.0,
        "vae_config": {"z_channels": 16, "downsample": 8, "ch": 32, "ch_mult": [1, 1, 2, 2]},
        "image_transforms": {
            "vae": {"max_size": 128, "min_size": 64, "stride": 16},
            "vit": {"max_size": 112, "min_size": 28, "stride": 14},
        },
    },
    "llm_config.json": {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 288,
    },
    "vit_config.json": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": VIT_LAYERS + 1,
        "num_attention_heads": 2,
        "num_channels": 3,
        "image_size": VIT_SIDE * 14,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "preprocessor_config.json": {"image_processor_type": "SiglipImageProcessor"},
    "card.json": {"name": "tiny-bagel", "trained": False},
}


def write(folder: Path) -> None:
    """Write a whole checkpoint to a new folder."""
    folder.mkdir(parents=True)
    for name, config in CONFIGS.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n")
    tokenizer().save(str(folder / "tokenizer.json"))
    # Not known from the weights yet.
    arch = read_architecture(folder)
    shapes = {name: tuple(v.shape) for name, v in without_weights(arch)[0].state_dict().items()}
    shapes["latent_pos_embed.pos_embed"] = (TABLE_SIDE**2, arch.decoder.hidden_size)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: values(name, shape, generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "ema.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(tensors), "ema.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_vae(folder, arch.vae)


def write_vae(folder: Path, arch: AutoencoderShape) -> None:
    """Write the autoencoder's own file, under the names of its released layout."""
    with torch.device("meta"):
        found = autoencoder(arch).state_dict()
    generator = torch.Generator().manual_seed(2)
    stored = {stored_name(name, len(arch.ch_mult)): value for name, value in found.items()}
    tensors = {
        name: values(name, stored_shape(name, tuple(value.shape)), generator)
        for name, value in sorted(stored.items())
    }
    save_file(tensors, folder / "ae.safetensors")


def values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random values that keep a signal's scale; about 1 for norms."""
    drawn = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        drawn = 1 + 0.1 * drawn
    elif len(shape) == 1:
        drawn = 0.1 * drawn
    elif "embed" not in name:
        drawn = drawn / math.sqrt(math.prod(shape[1:]))
    return drawn.to(torch.bfloat16)


def tokenizer() -> Tokenizer:
    """Return a tokenizer: a token for each byte, then the markers; words are split as in Qwen2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists")
    write(arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
