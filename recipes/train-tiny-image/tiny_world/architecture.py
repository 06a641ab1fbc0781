"""The embedded checkpoint's numbers, under the official configuration keys."""

from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from hyimg_cli.models.hunyuan_image3.config import Architecture, architecture
from tiny_world.scenes import PICTURE_PX

LAYERS = 4
LATENT_PX = 16
# Only the square is trained: index 16 of the official table, at any base size.
RATIO_INDEX = 16
# Rows (and columns) of latent cells and of ViT patches in one picture.
LATENT_GRID = PICTURE_PX // LATENT_PX

_WIDTH = 192
_EXPERT_WIDTH = 96
_VISION_WIDTH = 96
PATCH_PX = 16
VISION_GRID = PICTURE_PX // PATCH_PX
_MAX_PATCHES = VISION_GRID**2
_MAX_POSITIONS = 1024

_BACKBONE: dict[str, Any] = {
    "model_version": "HunyuanImage-3.0-Instruct",
    "architectures": ["HunyuanImage3ForCausalMM"],
    "model_type": "hunyuan_image_3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 32,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": _WIDTH,
    "intermediate_size": _EXPERT_WIDTH,
    "max_position_embeddings": _MAX_POSITIONS,
    "mlp_bias": False,
    "moe_drop_tokens": False,
    "moe_intermediate_size": [_EXPERT_WIDTH] * LAYERS,
    "moe_layer_num_skipped": 0,
    "moe_topk": [2] * LAYERS,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "num_attention_heads": 6,
    "num_experts": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_shared_expert": [1] * LAYERS,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "custom"},
    "rope_theta": 10000.0,
    "rope_type": "2d",
    "routed_scaling_factor": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_cla": False,
    "cla_share_factor": 2,
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "class_num": 0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}

_PICTURES: dict[str, Any] = {
    "vae_downsample_factor": [LATENT_PX, LATENT_PX],
    "img_proj_type": "unet",
    "patch_size": 1,
    "patch_embed_hidden_dim": 128,
    "image_base_size": PICTURE_PX,
    "cond_token_attn_type": "joint_full",
    "cond_image_type": "vae_vit",
    "vae_type": "hunyuan-image-vae-v1",
    "vae_dtype": "float32",
    "vae_autocast_dtype": "float32",
    "cfg_distilled": False,
    "use_meanflow": False,
}

_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLConv3D",
    "block_out_channels": [64, 64, 64, 64, 64],
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 1,
    "ffactor_spatial": LATENT_PX,
    "ffactor_temporal": 1,
    "sample_size": PICTURE_PX,
    "sample_tsize": 1,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
}

_VISION: dict[str, Any] = {
    "vit_type": "siglip2-so400m-patch16-naflex",
    "vit": {
        "_attn_implementation": "sdpa",
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": _VISION_WIDTH,
        "intermediate_size": 2 * _VISION_WIDTH,
        "layer_norm_eps": 1e-06,
        "num_attention_heads": 3,
        "num_channels": 3,
        "num_hidden_layers": 2,
        "num_patches": _MAX_PATCHES,
        "output_attentions": False,
        "output_hidden_states": False,
        "patch_size": PATCH_PX,
        "use_return_dict": True,
        "vision_use_head": False,
    },
    "vit_processor": {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Siglip2ImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "max_num_patches": _MAX_PATCHES,
        "patch_size": PATCH_PX,
        "resample": 2,
        "rescale_factor": 1 / 255,
    },
    "vit_aligner": {
        "projector_type": "mlp_gelu",
        "input_dim": _VISION_WIDTH,
        "n_embed": _WIDTH,
        "depth": 2,
    },
}


def checkpoint_config(tokenizer: Tokenizer, scaling_factor: float) -> dict[str, Any]:
    """Return the whole `config.json`."""
    ids = {
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": tokenizer.token_to_id("<pad>"),
        "pad_id": tokenizer.token_to_id("<pad>"),
        "bos_token_id": tokenizer.token_to_id("<|startoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "im_start_id": tokenizer.token_to_id("<boi>"),
        "im_end_id": tokenizer.token_to_id("<eoi>"),
        "image_token_id": tokenizer.token_to_id("<img>"),
    }
    vae = {"vae": _VAE | {"scaling_factor": scaling_factor}}
    return _BACKBONE | _PICTURES | vae | _VISION | ids


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the whole `generation_config.json`."""
    return {
        "bot_task": "think_recaption",
        "diff_guidance_scale": 3.0,
        "diff_infer_steps": 20,
        "disable_compile": True,
        "do_sample": True,
        "drop_think": False,
        "eos_token_id": [tokenizer.token_to_id("<|endoftext|>")],
        "flow_shift": 2.0,
        "max_length": _MAX_POSITIONS,
        "max_new_tokens": 128,
        "pad_token_id": tokenizer.token_to_id("<pad>"),
        "sequence_template": "instruct",
        "temperature": 0.6,
        "top_k": 1024,
        "top_p": 0.95,
        "use_system_prompt": "None",
    }


def tiny_architecture(tokenizer: Tokenizer, scaling_factor: float = 1.0) -> Architecture:
    """Return the network that `checkpoint_config` describes."""
    return architecture(checkpoint_config(tokenizer, scaling_factor))


def with_scaling(arch: Architecture, scaling_factor: float) -> Architecture:
    """Return the same network with the autoencoder's measured scaling."""
    return replace(arch, vae=replace(arch.vae, scaling_factor=scaling_factor))
