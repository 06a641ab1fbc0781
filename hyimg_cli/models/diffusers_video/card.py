"""A video checkpoint's facts and defaults, from its JSON files and safetensors headers; no torch.

What a checkpoint does not say itself is what its authors publish beside it: frames, frames a
second, steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hyimg_cli.loading.config import Config
from hyimg_cli.models.diffusers_video.layout import (
    HUNYUAN_VIDEO15,
    CheckpointLayout,
    Component,
    read_layout,
    shift_name,
)
from hyimg_cli.models.diffusers_video.unsupported import refuse_unsupported
from hyimg_cli.models.diffusers_video.work import (
    HUNYUAN_BLOCKS,
    WAN_BLOCKS,
    WAN_HEADS,
    hunyuan_forward,
    wan_forward,
    wan_patch,
)
from hyimg_cli.spec.card import (
    DecodeWork,
    StartRule,
    TileRule,
    VideoCard,
    VideoDefaults,
)
from hyimg_cli.spec.job import Size

HUNYUAN_MAX_TOKENS = 1000
WAN_MAX_TOKENS = 512
_TILE_PIXELS = 256
_STRIDE_PIXELS = 192
_MAX_RATIO = 4.0
_MOST_PIXELS = 8192
# Of the released autoencoders, counted without a GPU; others are taken to be as they are.
_HUNYUAN_DECODE = DecodeWork(per_frame_pixel=1_796)
WAN_DECODE = DecodeWork(per_pixel=10_500)
_SHIFT_OF_720P = 5.0
_SHIFT_OF_TARGET = {640: 5.0, 960: 9.0}


def video_card(folder: Path, model: str) -> VideoCard:
    """The card of the checkpoint in `folder`, called `model` by the user.

    A `card.json` beside model_index.json may name the checkpoint, say that it is untrained, and
    replace defaults by name. Weights that are not there yet are missing from `component_bytes`.
    """
    layout = read_layout(folder)
    refuse_unsupported(layout)
    card = (_hunyuan if layout.family == HUNYUAN_VIDEO15 else _wan)(layout, model)
    return counted(card, layout)


def counted(card: VideoCard, layout: CheckpointLayout) -> VideoCard:
    """A card with what is counted in the checkpoint's files, and what its card.json says."""
    folder = layout.folder
    extra = Config.read(folder / "card.json", is_optional=True)
    return replace(
        card,
        name=extra.text("name", folder.name),
        is_trained=extra.flag("trained", True),
        component_bytes=_counted(layout, Component.stored_bytes),
        component_parameters=_counted(layout, Component.parameters),
        defaults=_overridden(card.defaults, extra.table("defaults", {})),
    )


def start_rule(target_size: int, cell: int) -> StartRule:
    """Of a HunyuanVideo-1.5 checkpoint: all sizes with about target_size² pixels. Source:
    generate_crop_size_list of the release.
    """
    return StartRule(1, 1, "crop", tuple(_crop_sizes(target_size, cell)))


def _crop_sizes(target_size: int, cell: int) -> Iterator[Size]:
    """Heights and widths along the staircase under height x width = target_size², in cells."""
    area = round((target_size / cell) ** 2)
    height, width = area, 1
    while height > 0:
        if max(height, width) / min(height, width) <= _MAX_RATIO:
            yield Size(height * cell, width * cell)
        if height * (width + 1) <= area:
            width += 1
        else:
            height -= 1


def _hunyuan(layout: CheckpointLayout, model: str) -> VideoCard:
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    cell = vae.count("spatial_compression_ratio", 16)
    target = network.count("target_size", 640, least=cell, most=_MOST_PIXELS)
    is_distilled = network.flag("use_meanflow", False)
    tile = _TILE_PIXELS // cell
    sizes = start_rule(target, cell)
    landscape = sizes.size_for(Size(9, 16))
    assert landscape is not None, "the rule has sizes"
    return VideoCard(
        model=model,
        family=layout.family,
        name="",
        is_trained=True,
        size_multiple=cell * network.count("patch_size", 1),
        pixels_per_cell=cell,
        frame_stride=vae.count("temporal_compression_ratio", 4),
        latent_channels=vae.count("latent_channels", 32),
        max_prompt_tokens=HUNYUAN_MAX_TOKENS,
        tiles=TileRule(tile, tile - tile // 4, cell),
        component_bytes=(),
        forward=hunyuan_forward(network),
        blocks=network.count("num_layers", HUNYUAN_BLOCKS),
        decode=_HUNYUAN_DECODE,
        start=sizes if layout.starts_from_pictures else None,
        needs_start=layout.starts_from_pictures,
        is_distilled=is_distilled,
        defaults=VideoDefaults(
            size=landscape,
            num_frames=121,
            fps=24,
            # Distilled to few steps, by its own training; its authors say 8 or 12.
            num_inference_steps=12 if is_distilled else 50,
            guidance_scale=_guidance(layout),
            flow_shift=_shift(layout, _SHIFT_OF_TARGET.get(target, 5.0)),
        ),
    )


def _wan(layout: CheckpointLayout, model: str) -> VideoCard:
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    cell = vae.count("scale_factor_spatial", 8)
    tile, stride = _TILE_PIXELS // cell, _STRIDE_PIXELS // cell
    return VideoCard(
        model=model,
        family=layout.family,
        name="",
        is_trained=True,
        # The pipeline asks for 16, the patches for more where a latent cell is 16 pixels.
        size_multiple=max(16, cell * wan_patch(network)[1]),
        pixels_per_cell=cell,
        frame_stride=vae.count("scale_factor_temporal", 4),
        latent_channels=vae.count("z_dim", 16),
        max_prompt_tokens=WAN_MAX_TOKENS,
        tiles=TileRule(tile, stride, cell),
        component_bytes=(),
        forward=wan_forward(network),
        blocks=network.count("num_layers", WAN_BLOCKS),
        context_heads=network.count("num_attention_heads", WAN_HEADS),
        decode=WAN_DECODE,
        start=_wan_start(layout),
        needs_start=layout.starts_from_pictures and not layout.expands_timesteps,
        defaults=_wan_defaults(layout),
        has_float32_vae=True,
        wants_negative=True,
        cleaner="ftfy",
        # WanPipeline.do_classifier_free_guidance: only above 1.
        guides_below_one=False,
    )


def _wan_start(layout: CheckpointLayout) -> StartRule | None:
    """The 5B model makes the picture its first frame; others have channels for it. Tokens of a
    picture are read in a fixed number; the 2.2 pair reads none, and takes a last frame or not.
    """
    if layout.expands_timesteps:
        return StartRule(1, 1, "stretch")
    if not layout.starts_from_pictures:
        return None
    network = layout.components["transformer"].config()
    if not network.has("image_dim"):
        return StartRule(1, 2, "stretch")
    count = 2 if network.has("pos_embed_seq_len") else 1
    return StartRule(count, count, "stretch")


def _wan_defaults(layout: CheckpointLayout) -> VideoDefaults:
    """Wan 2.1's, those of the 2.2 pair (720p, two scales), or of the 2.2 5B (24 fps)."""
    start = _wan_start(layout)
    plain = VideoDefaults(
        size=Size(480, 832),
        num_frames=81,
        fps=16,
        num_inference_steps=50,
        guidance_scale=5.0,
        flow_shift=_shift(layout, 3.0),
    )
    if layout.expands_timesteps:
        return replace(plain, size=Size(704, 1280), num_frames=121, fps=24)
    if "transformer_2" in layout.components:
        high, low = (4.0, 3.0) if start is None else (3.5, 3.5)
        return replace(
            plain,
            size=Size(720, 1280),
            num_inference_steps=40,
            guidance_scale=high,
            guidance_scale_2=low,
        )
    if start is None:
        return plain
    # Only the shift tells the 720p checkpoint of 2.1 from the 480p one.
    is_large = start.fewest == 2 or plain.flow_shift >= _SHIFT_OF_720P
    return replace(
        plain,
        size=Size(720, 1280) if is_large else plain.size,
        num_inference_steps=50 if start.fewest == 2 else 40,
    )


def _guidance(layout: CheckpointLayout) -> float:
    """The guider's scale; 1, which is none, where it is switched off (a distilled checkpoint)."""
    guider = layout.components["guider"].config()
    return guider.number("guidance_scale", 6.0) if guider.flag("enabled", True) else 1.0


def _shift(layout: CheckpointLayout, otherwise: float) -> float:
    scheduler = layout.components["scheduler"]
    return scheduler.config().number(shift_name(scheduler), otherwise, above=0)


def _counted(
    layout: CheckpointLayout, count: Callable[[Component], int | None]
) -> tuple[tuple[str, int], ...]:
    """A count of each component whose weights are there."""
    found = ((name, count(c)) for name, c in layout.components.items() if c.has_weights)
    return tuple((name, number) for name, number in found if number is not None)


def _overridden(defaults: VideoDefaults, values: Config) -> VideoDefaults:
    """`defaults` with the values of card.json: numbers by field name, a size as [height, width]."""
    known = {field.name for field in fields(VideoDefaults)}
    for name in values.values.keys() - known:
        raise values.fault(name, values.values[name], f"one of {', '.join(sorted(known))}")
    changed: dict[str, Any] = {
        name: Size(*values.counts(name, length=2)) if name == "size" else values.setting(name)
        for name in values.values
    }
    return replace(defaults, **changed)
