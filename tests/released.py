"""The released Instruct checkpoint by the numbers that shape its network and its sequences."""

import json
import shutil
from pathlib import Path
from typing import Any

SMALL = Path(__file__).parent / "parity" / "tiny" / "checkpoint"
# What the released config.json holds beside, and no code reads. The names are those of the base
# checkpoint's file; the values are of no matter, and stand for any.
LEFTOVERS: dict[str, Any] = {
    "anyres_pooling_size": 2,
    "anyres_vit_two_views": False,
    "auto_map": {"AutoConfig": "configuration_hunyuan.HunyuanImage3Config"},
    "dense_list": [4096, 0],
    "eod_token_id": 3,
    "im_newline_id": 11,
    "mask_init_id": 12,
    "moe_random_routing_dropped_token": False,
    "n_group": False,
    "num_media_embeds": 257,
    "pool_type": "last",
    "position_embedding_xdrope": False,
    "pretraining_tp": 1,
    "skip_cls_token": False,
    "text_end_id": 7,
    "text_start_id": 6,
    "topk_group": False,
    "transformers_version": "4.50.0",
    "video_end_id": 10,
    "video_start_id": 9,
    "vit_add_patchemb_bias": False,
    "vit_downsample_factor": [16, 16],
    "vit_input_resolution": 224,
    "vit_mapping_type": "resampler",
    "vit_norm_type": "fused",
    "vit_patch": 1,
    "vit_path": None,
    "vit_remove_prenorm": False,
    "vit_token": 64,
    "vit_used_rms_norm": False,
}


def released_folder(folder: Path) -> Path:
    """The released model's small files, with an index of shards that are not there."""
    shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = released(json.loads((SMALL / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    shards = {f"layer {n}": f"model-{n}.safetensors" for n in range(32)}
    index = {"metadata": {"total_size": 166_000_000_000}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def released(config: dict[str, Any]) -> dict[str, Any]:
    """A small checkpoint's `config.json` with the released numbers in their places."""
    layers = 32
    return (
        config
        | LEFTOVERS
        | {
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
                "sample_size": 384,
            },
            "vit": config["vit"]
            | {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "num_patches": 256,
                "patch_size": 16,
                "vision_use_head": True,
            },
            "vit_processor": config["vit_processor"] | {"max_num_patches": 1024, "patch_size": 16},
            "vit_aligner": config["vit_aligner"] | {"input_dim": 1152, "n_embed": 4096},
        }
    )
