"""The released Instruct checkpoint by the numbers that shape its network and its sequences."""

from typing import Any


def released(config: dict[str, Any]) -> dict[str, Any]:
    """A small checkpoint's `config.json` with the released numbers in their places."""
    layers = 32
    return config | {
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "head_dim": 128,
        "num_experts": 64,
        "moe_topk": [8] * layers,
        "num_shared_expert": [1] * layers,
        "moe_intermediate_size": [3072] * layers,
        "vocab_size": 133120,
        "pad_token_id": 128009,
        "max_position_embeddings": 22800,
        "vae_downsample_factor": [16, 16],
        "patch_embed_hidden_dim": 1024,
        "image_base_size": 1024,
        "vae": config["vae"]
        | {
            "block_out_channels": [128, 256, 512, 1024, 1024],
            "latent_channels": 32,
            "layers_per_block": 2,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
        },
        "vit": config["vit"]
        | {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_patches": 256,
            "patch_size": 16,
        },
        "vit_processor": config["vit_processor"] | {"max_num_patches": 1024},
        "vit_aligner": config["vit_aligner"] | {"input_dim": 1152, "n_embed": 4096},
    }
