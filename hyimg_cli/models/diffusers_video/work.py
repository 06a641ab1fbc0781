"""Count a forward of each family's transformer, by its configuration; no torch.

Matrix products only, of the video's tokens only: a floor, which norms, rotations and text come on
top of (a prompt of 150 tokens is less than a hundredth of a film at 480p).
"""

import math
from typing import Any

from hyimg_cli.errors import CheckpointError
from hyimg_cli.spec.card import ForwardWork

# A multiplication and its addition.
_MAC = 2
# Queries with keys, and their weights with values.
_PRODUCTS = 2
_WAN_TEXT_TOKENS = 512
# Bytes of a token at a block's widest moment, in widths of the network: 22 were counted for Wan's
# blocks, 25 for HunyuanVideo-1.5's, without weights.
_TOKEN_WIDTHS = 25


def hunyuan_blocks(network: dict[str, Any]) -> int:
    """Blocks of HunyuanVideo-1.5's transformer."""
    return int(_Numbers(network)["num_layers", 54])


def wan_blocks(network: dict[str, Any]) -> int:
    """Blocks of Wan's transformer."""
    return int(_Numbers(network)["num_layers", 40])


def wan_heads(network: dict[str, Any]) -> int:
    """Heads of attention of Wan's transformer."""
    return int(_Numbers(network)["num_attention_heads", 40])


def hunyuan_forward(network: dict[str, Any]) -> ForwardWork:
    """HunyuanVideo-1.5: blocks of joint attention, in which video and text have weights apart."""
    of = _Numbers(network)
    width = of["num_attention_heads", 16] * of["attention_head_dim", 128]
    layers, cells = hunyuan_blocks(network), of["patch_size_t", 1] * of["patch_size", 1] ** 2
    # Queries, keys, values and output; the two layers of the MLP.
    weights = 4 * width**2 + int(2 * of["mlp_ratio", 4] * width**2)
    ends = cells * width * (of["in_channels", 65] + of["out_channels", 32])
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * weights + ends),
        per_pair=_MAC * _PRODUCTS * layers * width,
        token_bytes=_TOKEN_WIDTHS * width,
    )


def wan_forward(network: dict[str, Any]) -> ForwardWork:
    """Wan: blocks of self-attention, and of cross-attention to the text's 512 rows."""
    of = _Numbers(network)
    width = of["num_attention_heads", 40] * of["attention_head_dim", 128]
    layers, cells = wan_blocks(network), math.prod(network.get("patch_size", (1, 2, 2)))
    # Self-attention has four matrices; of the other's, keys and values are the text's own.
    weights = (4 + 2) * width**2 + 2 * width * of["ffn_dim", 13824]
    across = _PRODUCTS * _WAN_TEXT_TOKENS * width
    ends = cells * width * (of["in_channels", 16] + of["out_channels", 16])
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * (weights + across) + ends),
        per_pair=_MAC * _PRODUCTS * layers * width,
        token_bytes=_TOKEN_WIDTHS * width,
    )


class _Numbers:
    """Numbers of a transformer's configuration, by name and the class's own default."""

    def __init__(self, network: dict[str, Any]) -> None:
        self._network = network

    def __getitem__(self, name_and_default: tuple[str, int]) -> Any:
        """Raises CheckpointError where something else than a number stands there."""
        name, otherwise = name_and_default
        value = self._network.get(name, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"transformer/config.json: {name} is {value!r}, not a number",
                hint="download the checkpoint again, with its config.json files",
                code="checkpoint.config",
            )
        return value
