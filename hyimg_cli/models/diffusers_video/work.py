"""What a forward of each family's transformer computes, by its configuration; no torch.

Matrix products only, of the video's tokens only: a floor, which norms, rotations and text come on
top of (a prompt of 150 tokens is less than a hundredth of a film at 480p).
"""

import math
from typing import Any

from hyimg_cli.spec.card import ForwardWork

# A multiplication and its addition.
_MAC = 2
# Queries with keys, and their weights with values.
_PRODUCTS = 2
_WAN_TEXT_TOKENS = 512


def hunyuan_forward(network: dict[str, Any]) -> ForwardWork:
    """HunyuanVideo-1.5: blocks of joint attention, in which video and text have weights apart."""
    width = network.get("num_attention_heads", 16) * network.get("attention_head_dim", 128)
    layers, cells = network.get("num_layers", 54), _cells(network)
    # Queries, keys, values and output; the two layers of the MLP.
    weights = 4 * width**2 + int(2 * network.get("mlp_ratio", 4.0) * width**2)
    ends = cells * width * (network.get("in_channels", 65) + network.get("out_channels", 32))
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * weights + ends),
        per_pair=_MAC * _PRODUCTS * layers * width,
    )


def wan_forward(network: dict[str, Any]) -> ForwardWork:
    """Wan: blocks of self-attention, and of cross-attention to the text's 512 rows."""
    width = network.get("num_attention_heads", 40) * network.get("attention_head_dim", 128)
    layers, cells = network.get("num_layers", 40), math.prod(network.get("patch_size", (1, 2, 2)))
    # Self-attention has four matrices; of the other's, keys and values are the text's own.
    weights = (4 + 2) * width**2 + 2 * width * network.get("ffn_dim", 13824)
    across = _PRODUCTS * _WAN_TEXT_TOKENS * width
    ends = cells * width * (network.get("in_channels", 16) + network.get("out_channels", 16))
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * (weights + across) + ends),
        per_pair=_MAC * _PRODUCTS * layers * width,
    )


def _cells(network: dict[str, Any]) -> int:
    side, frames = network.get("patch_size", 1), network.get("patch_size_t", 1)
    return int(frames * side * side)
