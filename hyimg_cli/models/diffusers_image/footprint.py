"""Networks of an editor: weights by the files' headers, activations by widths; no torch.

Activations were counted without a GPU (tensors without memory, bfloat16) for two blocks of each
released transformer and for each released VAE, at 1024x1024 with one source picture.
"""

from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.record import stored_networks
from hyimg_cli.spec.card import DecodeWork, Networks

# Bytes of a row in 16 bits at a forward's widest moment, by the row's width: 15 to 21 rows.
_TOKEN_WIDTHS = 2 * 22
# Of a pixel in a decode, by the width of the VAE's last level, and what the width is called.
_DECODES = {
    "AutoencoderKLQwenImage": (36, "base_dim"),
    "AutoencoderKLQwenImage21": (45, "decoder_base_dim"),
}
_PICTURE_WIDTHS = 12


def networks_of(layout: CheckpointLayout) -> Networks:
    """What the checkpoint's networks take. Raises CheckpointError."""
    transformer, vae = layout.components["transformer"], layout.components["vae"]
    if vae.class_name in _DECODES:
        widths, name = _DECODES[vae.class_name]
        per_pixel = widths * vae.config().count(name, 96)
    else:
        per_pixel = _PICTURE_WIDTHS * vae.config().counts("block_out_channels", (128,))[0]
    return Networks(
        **stored_networks(layout),
        blocks=transformer.count_blocks(),
        token_bytes=_TOKEN_WIDTHS * _width(transformer.config()),
        decode=DecodeWork(per_pixel=per_pixel),
    )


def kv_bytes(layout: CheckpointLayout) -> int:
    """Of a row's keys and values in bfloat16."""
    own = layout.components["transformer"].config()
    layers = own.count("num_layers") + own.count("num_single_layers", 0, least=0)
    return 2 * 2 * layers * _width(own)


def _width(network: Config) -> int:
    """Of a row in a transformer."""
    if network.has("dim"):
        return network.count("dim")
    return network.count("num_attention_heads", 24) * network.count("attention_head_dim", 128)
