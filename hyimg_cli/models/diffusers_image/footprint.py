"""Memory of an editor's networks: weights from headers, activations from widths; no torch.

Activations were counted in bfloat16 without a GPU, in jobs of each released editor at 1024x1024
with one source picture.
"""

from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.record import packed_weights

# Numbers of a row at a forward's peak, per unit of its width.
_TOKEN_WIDTHS = {
    "QwenImageTransformer2DModel": 16,
    "ZImageTransformer2DModel": 16,
    "FluxTransformer2DModel": 19,
    "Flux3Transformer2DModel": 28,
    "LongCatImageTransformer2DModel": 20,
}
_MOST_TOKEN_WIDTHS = 23
# Bytes of a pixel in a decode, for each unit of the width of the VAE's last level, and the key of
# that width in its configuration.
_DECODES = {
    "AutoencoderKLQwenImage": (37, "base_dim"),
    "AutoencoderKLQwenImage21": (45, "decoder_base_dim"),
}
_PICTURE_WIDTHS = 13
# Of a packed number while the library unpacks it: as an integer, and two results in 16 bits.
_UNPACKED_BYTES = 5


def kv_bytes(layout: CheckpointLayout) -> int:
    """Return the bytes of a row's keys and values in bfloat16."""
    own = layout.components["transformer"].config()
    layers = own.count("num_layers") + own.count("num_single_layers", 0, least=0)
    return 2 * 2 * layers * _width(layout)


def activations(
    layout: CheckpointLayout, rows: int, pixels: int, pictures: int = 1, *, is_tiled: bool
) -> tuple[int, int]:
    """Return the bytes, in 16 bits, of a step of `rows` rows and of a decode.

    `pixels`: of all `pictures` that are decoded at once.
    """
    part, network = layout.components["vae"], layout.components["transformer"].class_name
    token_bytes = 2 * _TOKEN_WIDTHS.get(network, _MOST_TOKEN_WIDTHS) * _width(layout)
    own = part.config()
    if part.class_name in _DECODES:
        widths, name = _DECODES[part.class_name]
        per_pixel = widths * own.count(name, 96)
    else:
        per_pixel = _PICTURE_WIDTHS * own.counts("block_out_channels", (128,))[0]
    if is_tiled:
        side = 256 if part.class_name in _DECODES else own.count("sample_size", 1024)
        pixels = min(pixels, pictures * side**2)
    return rows * token_bytes + _unpacked(layout), pixels * per_pixel


def _unpacked(layout: CheckpointLayout) -> int:
    """Return the bytes of the largest matrix of a GGUF file while a forward unpacks it."""
    packed = packed_weights(layout)
    return 0 if packed is None else packed.largest * _UNPACKED_BYTES


def _width(layout: CheckpointLayout) -> int:
    """Return the width of a row in the transformer."""
    network = layout.components["transformer"].config()
    if network.has("dim"):
        return network.count("dim")
    return network.count("num_attention_heads", 24) * network.count("attention_head_dim", 128)
