"""Facts and defaults of a checkpoint, from its JSON files and headers; no torch."""

from dataclasses import asdict, replace

from hyimg_cli.loading.config import Config
from hyimg_cli.models.diffusers_video.card import WAN_DECODE, counted
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.work import wan_forward
from hyimg_cli.models.lingbot_world.layout import FAMILY, network_shape
from hyimg_cli.models.lingbot_world.network_shape import NetworkShape
from hyimg_cli.spec.card import ChunkRule, StartRule, TileRule, VideoCard, VideoDefaults
from hyimg_cli.spec.job import Size

_BF16_BYTES = 2
_PIXELS_PER_CELL, _FRAME_STRIDE = 8, 4
# Decoded whole, as it is published: latent frame by latent frame, so the size alone counts.
_NO_TILES = TileRule(1 << 20, 1 << 20, _PIXELS_PER_CELL)


def lingbot_card(layout: CheckpointLayout, model: str) -> VideoCard:
    """The card of a checkpoint, called `model` by the user; bytes are of parts that are there."""
    shape = network_shape(layout)
    card = VideoCard(
        model=model,
        family=FAMILY,
        name="",
        is_trained=True,
        size_multiple=_PIXELS_PER_CELL * shape.patch_size[1],
        pixels_per_cell=_PIXELS_PER_CELL,
        frame_stride=_FRAME_STRIDE,
        latent_channels=shape.out_channels,
        max_prompt_tokens=shape.text_len,
        tiles=_NO_TILES,
        component_bytes=(),
        forward=wan_forward(Config(asdict(shape), "")),
        needs_start=True,
        defaults=VideoDefaults(
            size=Size(480, 832),
            num_frames=81,
            fps=16,
            num_inference_steps=4,
            guidance_scale=1.0,
            flow_shift=10.0,
        ),
        has_float32_vae=True,
        guides_below_one=False,
        is_distilled=True,
        chunks=chunk_rule(shape),
        blocks=shape.num_layers,
        decode=WAN_DECODE,
        has_camera=True,
    )
    card = counted(card, layout)
    size = card.defaults.size
    rule = StartRule(1, 1, "stretch", area=size.height * size.width, multiple=card.size_multiple)
    return replace(card, start=rule)


def chunk_rule(shape: NetworkShape) -> ChunkRule:
    """Bytes of K/V, of the camera's scale and shift and a forward's rows, and of the text's K/V."""
    pair = 2 * shape.num_layers * shape.width * _BF16_BYTES
    # A block's rows in float32: residual, normed, queries, keys, values, and its feed-forward's.
    rows = 4 * (6 * shape.width + 2 * shape.ffn_dim)
    return ChunkRule(shape.num_frames_per_block, pair, pair + rows, pair * shape.text_len)
