"""Networks of an editor: weights by the files' headers, activations by widths; no torch.

Activations were counted without a GPU (tensors without memory, bfloat16) for two blocks of each
released transformer and for each released VAE, at 1024x1024 with one source picture.
"""

import math
import re
from collections import Counter

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.models.diffusers_video.record import stored_networks
from hyimg_cli.spec.card import DecodeWork, Networks

# Bytes of a row in 16 bits at a forward's widest moment, by the row's width: 15 to 21 rows.
_TOKEN_WIDTHS = 2 * 22
# Of a pixel in a decode, by the width of the VAE's last level: of one for videos, for pictures.
_VIDEO_WIDTHS, _PICTURE_WIDTHS = 2 * 18, 2 * 6
_BLOCK = re.compile(r"\w+\.\d+\.")


def networks_of(layout: CheckpointLayout) -> Networks:
    """What the checkpoint's networks take. Raises CheckpointError."""
    transformer, vae = layout.components["transformer"], layout.components["vae"]
    if vae.class_name.startswith("AutoencoderKLQwen"):
        per_pixel = _VIDEO_WIDTHS * vae.config().count("base_dim", 96)
    else:
        per_pixel = _PICTURE_WIDTHS * vae.config().counts("block_out_channels", (128,))[0]
    return Networks(
        **stored_networks(layout),
        blocks=_count_blocks(transformer),
        token_bytes=_TOKEN_WIDTHS * _width(transformer.config()),
        decode=DecodeWork(per_pixel=per_pixel),
    )


def _count_blocks(transformer: Component) -> int:
    """Blocks of a transformer, if all were as large as the largest, and nothing beside them; 0
    where its weights are not here.
    """
    sizes = Counter[str]()
    try:
        for name, tensor in transformer.tensors().items():
            block = _BLOCK.match(name)
            sizes[block[0] if block else ""] += math.prod(tensor.shape)
    except CheckpointError:
        return 0
    beside = sizes.pop("", 0)
    largest = max(sizes.values(), default=beside)
    return (beside + sizes.total()) // max(1, largest + beside // 2)


def _width(network: Config) -> int:
    """Of a row in a transformer."""
    if network.has("dim"):
        return network.count("dim")
    return network.count("num_attention_heads", 24) * network.count("attention_head_dim", 128)
