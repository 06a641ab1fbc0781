"""Whether the parts of a checkpoint fit each other, by their configurations; no torch.

Parts of several checkpoints load one by one, and fail, or draw something else, in the middle of a
job. A pipeline has rules: a number of one part is a multiple of another's.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.declared import class_options
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, WAN, CheckpointLayout

# A part and the key of a number in its configuration; of text encoders of several networks, the
# one that reads text.
_Number = tuple[str, str]
TEXT_WIDTH: _Number = ("text_encoder", "hidden_size")
# The number on the left is the one on the right, that many times.
Rule = tuple[_Number, int, _Number]
# Rules of the video pipelines; editors have theirs in `diffusers_image/parts`.
VIDEO_RULES: dict[str, tuple[Rule, ...]] = {
    WAN: (
        (("transformer", "text_dim"), 1, ("text_encoder", "d_model")),
        (("transformer", "image_dim"), 1, ("image_encoder", "hidden_size")),
        (("transformer_2", "text_dim"), 1, ("text_encoder", "d_model")),
        (("transformer_2", "in_channels"), 1, ("transformer", "in_channels")),
        (("transformer", "out_channels"), 1, ("vae", "z_dim")),
        (("transformer_2", "out_channels"), 1, ("vae", "z_dim")),
    ),
    HUNYUAN_VIDEO15: (
        (("transformer", "text_embed_dim"), 1, TEXT_WIDTH),
        (("transformer", "text_embed_2_dim"), 1, ("text_encoder_2", "d_model")),
        (("transformer", "image_embed_dim"), 1, ("image_encoder", "hidden_size")),
        (("transformer", "out_channels"), 1, ("vae", "latent_channels")),
    ),
}
# Lists of one number for each channel of latents.
_OF_CHANNELS = ("latents_mean", "latents_std")
# Positions of Z-Image: of 512 tokens of text and the picture after them, and of 1024 pixels.
_LEAST_LENS = (514, 64, 64)
# Axes of rotary positions: together they have the width of a head.
_AXES = ("axes_dims_rope", "rope_axes_dim", "axes_dims")


def refuse_unfitting(layout: CheckpointLayout, rules: Sequence[Rule], text_layers: int = 0) -> None:
    """Raise CheckpointError for parts that do not fit each other, with the numbers of both.

    `rules`: of the pipeline. `text_layers`: how many layers of the text encoder the pipeline reads.
    """
    for what in _find_misfits(layout, rules, text_layers):
        hint = "use all parts of one checkpoint, or correct the file that was changed"
        raise checkpoint.fault("parts", what, layout.folder, hint)


def picture_positions(layout: CheckpointLayout) -> tuple[int, int] | None:
    """Return how many rows and columns of tokens a picture may have; None without such a limit."""
    part = layout.components["transformer"]
    lengths = _counts(part.config(), part.class_name, "axes_lens")
    return None if lengths is None else (lengths[1], lengths[2])


def _find_misfits(
    layout: CheckpointLayout, rules: Sequence[Rule], text_layers: int
) -> Iterator[str]:
    for left, factor, right in rules:
        own, other = _number(layout, *left), _number(layout, *right)
        if own is not None and other is not None and own != factor * other:
            by = f"{factor} times " if factor > 1 else ""
            yield (
                f"the parts do not fit each other: {left[1]} of the {left[0]} is {own}, and the "
                f"{right[0]} has {by}{other} ({right[1]})"
            )
    layers = _number(layout, "text_encoder", "num_hidden_layers")
    if layers is not None and layers < text_layers:
        what = f"the text_encoder has {layers} layers, and the pipeline reads {text_layers}"
        yield f"the parts do not fit each other: {what}"
    vae = layout.components["vae"]
    channels = _number(layout, "vae", "z_dim") or _number(layout, "vae", "latent_channels")
    for name in _OF_CHANNELS:
        values = _value(vae.config(), vae.class_name, name)
        if isinstance(values, list | tuple) and channels and len(values) != channels:
            what = f"{name} of the vae has {len(values)} numbers; expected {channels}"
            yield f"{what}, one for each channel of its latents"
    for name in ("transformer", "transformer_2"):
        if part := layout.components.get(name):
            _refuse_wrong_axes(part.config(), part.class_name)


def _refuse_wrong_axes(own: Config, class_name: str) -> None:
    """Raise CheckpointError for wrong axes of a transformer's positions."""
    axes = {name: _counts(own, class_name, name) for name in _AXES}
    for name, numbers in axes.items():
        if numbers is None:
            continue
        width = _head_width(own, class_name)
        if width and sum(numbers) != width:
            raise own.fault(name, list(numbers), f"numbers that add up to {width}")
        if odd := [one for one in numbers if one % 2]:
            raise own.fault(name, list(numbers), f"even numbers (not {odd[0]})")
    lengths, dims = _counts(own, class_name, "axes_lens"), axes.get("axes_dims")
    if lengths is None or dims is None:
        return
    if len(lengths) != len(dims) or any(map(operator.lt, lengths, _LEAST_LENS)):
        least = f"{len(dims)} numbers, at least {list(_LEAST_LENS)}"
        raise own.fault("axes_lens", list(lengths), f"{least} (512 tokens, 1024 pixels)")


def _head_width(own: Config, class_name: str) -> int:
    """Return the width of an attention head, or 0 if the configuration does not say."""
    if width := _count(own, class_name, "attention_head_dim"):
        return width
    width, heads = (_count(own, class_name, name) for name in ("dim", "n_heads"))
    return width // heads if heads else 0


def _count(own: Config, class_name: str, key: str) -> int:
    """Return a number of a configuration, or the library's default for it; 0 without either."""
    default = (class_options(class_name) or {}).get(key)
    return own.count(key, default if isinstance(default, int) else 0, least=0)


def _counts(own: Config, class_name: str, key: str) -> tuple[int, ...] | None:
    """Return numbers of a configuration, or the library's defaults; None without either."""
    if own.has(key):
        return own.counts(key)
    values = _value(own, class_name, key)
    return None if values is None else tuple(values)


def _number(layout: CheckpointLayout, part: str, key: str) -> int | None:
    """Return a number of a part; None if the checkpoint lacks the part or the number."""
    component = layout.components.get(part)
    if component is None:
        return None
    own = component.config()
    # Text encoders that see pictures have a table for each of their networks.
    if own.has("text_config"):
        own = own.table("text_config")
    if own.has(key):
        return own.count(key, most=1 << 24)
    value = _value(own, component.class_name, key)
    return value if isinstance(value, int) else None


def _value(own: Config, class_name: str, key: str) -> Any:
    """Return a value of a configuration, or the library's default for it."""
    return own.values[key] if own.has(key) else (class_options(class_name) or {}).get(key)
