"""What a forward computes, by a few numbers of its configuration, against torch's own count."""

from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.hunyuan_video15 import MaskFreeAttention, hoisted_forward
from hyimg_cli.models.diffusers_video.record import hunyuan_forward, wan_forward
from hyimg_cli.models.latent import PromptEmbedding

# The released widths, two of the layers.
HUNYUAN: dict[str, Any] = {
    "in_channels": 65, "out_channels": 32, "num_attention_heads": 16, "attention_head_dim": 128,
    "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 4.0, "patch_size": 1, "patch_size_t": 1,
    "text_embed_dim": 3584, "text_embed_2_dim": 1472, "image_embed_dim": 1152,
    "rope_axes_dim": (16, 56, 56), "target_size": 640, "task_type": "t2v",
}  # fmt: skip
WAN: dict[str, Any] = {
    "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16,
    "ffn_dim": 13824, "freq_dim": 256, "text_dim": 4096, "num_layers": 2, "patch_size": (1, 2, 2),
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
}  # fmt: skip
META = torch.device("meta")


@pytest.mark.parametrize("grid", [(3, 30, 53), (5, 45, 80)])
def test_hunyuan_against_torchs_count(grid: tuple[int, int, int]) -> None:
    with META:
        network = HunyuanVideo15Transformer3DModel(**HUNYUAN).eval()
        for block in network.transformer_blocks:
            block.attn.set_processor(MaskFreeAttention())
        noise = torch.empty(1, 32, *grid)
        text = PromptEmbedding("k", {"text": torch.empty(1, 3584)}, ())
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            forward = hoisted_forward(network, text, noise, None)
            forward(torch.empty(1, 65, *grid), torch.empty(1), None)
    assert hunyuan_forward(Config(HUNYUAN, "")).flops(grid) == pytest.approx(
        counted.get_total_flops(), rel=0.01
    )


@pytest.mark.parametrize("grid", [(3, 60, 104), (3, 90, 160)])
def test_wan_against_torchs_count(grid: tuple[int, int, int]) -> None:
    with META:
        network = WanTransformer3DModel(**WAN).eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            network(
                hidden_states=torch.empty(1, 16, *grid),
                timestep=torch.empty(1),
                encoder_hidden_states=torch.empty(1, 512, 4096),
            )
    # The text's own keys and values, which are the same for a film of any length.
    text = 2 * 512 * (2 * WAN["num_layers"] * 5120**2 + 4096 * 5120 + 5120**2)
    own = wan_forward(Config(WAN, "")).flops(grid) + text
    assert own == pytest.approx(counted.get_total_flops(), rel=0.01)
