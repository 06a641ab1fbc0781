"""Count a forward of each family's transformer, by its configuration; no torch.

Matrix products only, of the video's tokens only: a floor, which norms, rotations and text come on
top of (a prompt of 150 tokens is less than a hundredth of a film at 480p).
"""

import math

from hyimg_cli.loading.config import Config
from hyimg_cli.spec.card import ForwardWork

# A multiplication and its addition.
_MAC = 2
# Queries with keys, and their weights with values.
_PRODUCTS = 2
_WAN_TEXT_TOKENS = 512
# Bytes of a token at a block's widest moment, in widths of the network: 22 were counted for Wan's
# blocks, 25 for HunyuanVideo-1.5's, without weights.
_TOKEN_WIDTHS = 25


HUNYUAN_BLOCKS, WAN_BLOCKS, WAN_HEADS = 54, 40, 40  # where the configuration does not say


def wan_patch(network: Config) -> tuple[int, ...]:
    """Frames, rows and columns of cells that are a token of Wan's transformer."""
    return network.counts("patch_size", (1, 2, 2), length=3)


def hunyuan_forward(network: Config) -> ForwardWork:
    """HunyuanVideo-1.5: blocks of joint attention, in which video and text have weights apart."""
    width = network.count("num_attention_heads", 16) * network.count("attention_head_dim", 128)
    layers = network.count("num_layers", HUNYUAN_BLOCKS)
    cells = network.count("patch_size_t", 1) * network.count("patch_size", 1) ** 2
    # Queries, keys, values and output; the two layers of the MLP.
    weights = 4 * width**2 + int(2 * network.number("mlp_ratio", 4.0, above=0) * width**2)
    ends = cells * width * (network.count("in_channels", 65) + network.count("out_channels", 32))
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * weights + ends),
        per_pair=_MAC * _PRODUCTS * layers * width,
        token_bytes=_TOKEN_WIDTHS * width,
    )


def wan_forward(network: Config) -> ForwardWork:
    """Wan: blocks of self-attention, and of cross-attention to the text's 512 rows."""
    heads = network.count("num_attention_heads", WAN_HEADS)
    width = heads * network.count("attention_head_dim", 128)
    layers, cells = network.count("num_layers", WAN_BLOCKS), math.prod(wan_patch(network))
    # Self-attention has four matrices; of the other's, keys and values are the text's own.
    weights = (4 + 2) * width**2 + 2 * width * network.count("ffn_dim", 13824)
    across = _PRODUCTS * _WAN_TEXT_TOKENS * width
    ends = cells * width * (network.count("in_channels", 16) + network.count("out_channels", 16))
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * (weights + across) + ends),
        per_pair=_MAC * _PRODUCTS * layers * width,
        token_bytes=_TOKEN_WIDTHS * width,
    )
