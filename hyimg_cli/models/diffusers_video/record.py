"""HunyuanVideo-1.5 and Wan in diffusers' layout as a family; no torch.

Facts and defaults come from a checkpoint's JSON files and headers, or else from what its authors
publish: frames, frames per second, steps.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.errors import JobError, require
from hyimg_cli.loading.checkpoint import FLOATS, file_digest, parts_index
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.fitting import VIDEO_RULES, refuse_unfitting
from hyimg_cli.models.diffusers_video.layout import (
    HUNYUAN_VIDEO15,
    WAN,
    CheckpointLayout,
    count_in_groups,
    is_in_layout,
    read_layout,
    refuse_unsupported,
    shift_name,
)
from hyimg_cli.models.diffusers_video.tokenizers import check_headers, count_beyond
from hyimg_cli.models.family import Family, VideoCheckpoint
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import (
    DecodeWork,
    ForwardWork,
    PackedWeights,
    StartRule,
    TileRule,
    VideoCard,
    VideoDefaults,
)
from hyimg_cli.spec.gc_paused import freeze_libraries
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import OF_STEPS, OF_VIDEOS

if TYPE_CHECKING:
    from hyimg_cli.models.latent_video import LatentVideoModel

HUNYUAN_MAX_TOKENS = 1000
HUNYUAN_GLYPH_TOKENS = 256
WAN_MAX_TOKENS = 512
_TILE_PIXELS = 256
_STRIDE_PIXELS = 192
_MAX_RATIO = 4.0
_MOST_PIXELS = 8192
# Of the released autoencoders, counted without a GPU; others are assumed to be the same.
_HUNYUAN_DECODE = DecodeWork(per_frame_pixel=1_796)
WAN_DECODE = DecodeWork(per_pixel=10_500)
_BF16_BYTES = 2
# Before HunyuanVideo-1.5's prompt.
_TEMPLATE_TOKENS = 108
_SHIFT_OF_720P = 5.0
_SHIFT_OF_TARGET = {640: 5.0, 960: 9.0}
_HUNYUAN_BLOCKS, _WAN_BLOCKS, _WAN_HEADS = 54, 40, 40  # used if the configuration lacks it
# Of the library's class, if the configuration lacks it.
_WAN_POSITIONS = 1024
_FOLLOWS = OF_STEPS | OF_VIDEOS | {"lora", "negative_prompt", "scheduler"}
_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')
# A multiplication and its addition.
_MAC = 2
# Queries with keys, and their weights with values.
_PRODUCTS = 2
# Bytes of a token at a block's widest moment, in widths of the network: 22 were counted for Wan's
# blocks, 25 for HunyuanVideo-1.5's, without weights and without what a job holds.
_TOKEN_WIDTHS = 26
# A token's own modulation: six rows in 16 bits and in float32, its timestep's row and two copies.
_MODULATION_WIDTHS = 6 * (2 + 4) + 3 * 2


class DiffusersFolder(VideoCheckpoint):
    """A checkpoint folder, whose weights are not read."""

    def __init__(self, folder: Path, model: str) -> None:
        self.layout = read_layout(folder)
        refuse_unsupported(self.layout)
        refuse_unfitting(self.layout, VIDEO_RULES[self.layout.family])
        make_card = _hunyuan if self.layout.family == HUNYUAN_VIDEO15 else _wan
        self.card = make_card(self.layout, model)

    def check(self, job: VideoJob) -> None:
        check_texts(job, self.layout.folder, self.card)
        if self.layout.family == WAN:
            for name in self.layout.components.keys() & {"transformer", "transformer_2"}:
                check_positions(job, self.card, self.layout.components[name].config())
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import check_loras  # imports torch

            check_loras(job, self.layout)

    def advice(self, job: VideoJob) -> tuple[str, ...]:
        found = self.layout.notes
        if self.layout.family == HUNYUAN_VIDEO15:
            found += quoted_notes(job.texts)
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import lora_notes  # imports torch

            found += lora_notes(job, self.layout)
        return found

    def load(self, choice: ModelChoice) -> "LatentVideoModel":
        """Load in float32 on the CPU, bfloat16 on a GPU by default.

        Raises CheckpointError, MachineError. Every file is checked. Weights are read when needed,
        the encoders' and the network's at different times.
        """
        require("diffusers", "av")
        from hyimg_cli.models.diffusers_video.hunyuan_video15 import HunyuanVideo15
        from hyimg_cli.models.diffusers_video.wan import Wan
        from hyimg_cli.models.diffusers_video.weights import check_all, load_target

        target, count = load_target(choice), check_all(self.layout)
        freeze_libraries("diffusers")
        cls = HunyuanVideo15 if self.layout.family == HUNYUAN_VIDEO15 else Wan
        return cls(self.card, self.layout, target, count, choice)


def check_texts(job: VideoJob, folder: Path, card: VideoCard) -> None:
    """Raise JobError for a text that is longer than the checkpoint's encoder reads.

    A template adds a few tokens, so a text that is barely too long is cut, with a note in its line.
    """
    for name, text in zip(("prompt", "negative_prompt"), job.texts, strict=False):
        if count := count_beyond(folder / "tokenizer", text, card.max_prompt_tokens):
            raise JobError(
                f"the text is too long ({count:,} tokens, limit {card.max_prompt_tokens:,})",
                where=name,
                hint="shorten it: the text encoder would not read the rest",
                code="job.prompt-too-long",
            )


def quoted_notes(texts: Sequence[str]) -> tuple[str, ...]:
    """Return notes on a prompt and a negative one with longer quotes than HunyuanVideo-1.5 reads.

    The library joins the parts, each once. Their tokenizer makes a token of each byte, and an end.
    """
    notes = list[str]()
    for name, text in zip(("prompt", "negative_prompt"), texts, strict=False):
        parts = dict.fromkeys(first or second for first, second in _QUOTED.findall(text))
        joined = "".join(f'Text "{part}". ' for part in parts)
        if len(joined.encode()) + 1 > HUNYUAN_GLYPH_TOKENS:
            read = f"the {HUNYUAN_GLYPH_TOKENS} tokens that the text_encoder_2 reads"
            notes.append(f"quoted text of a {name} is longer than {read}: the rest is ignored")
    return tuple(notes)


def check_positions(job: VideoJob, card: VideoCard, network: Config) -> None:
    """Raise JobError for a video with more rows, columns or frames than Wan has positions for."""
    most = network.count("rope_max_seq_len", _WAN_POSITIONS)
    grid = card.latent_grid(job.size, job.num_frames)
    frames, *sides = (cells // step for cells, step in zip(grid, wan_patch(network), strict=True))
    if max(sides) > most:
        what = f"{job.size} has more than the {most} rows and columns of {card.name}'s positions"
        raise JobError(what, where="size", hint="use a smaller one", code="job.size")
    if frames > most:
        what = f"{job.num_frames} frames are more than the {most} latent frames of {card.name}"
        raise JobError(what, where="num_frames", hint="use fewer", code="job.num-frames")


def stored_facts(layout: CheckpointLayout, defaults: VideoDefaults) -> dict[str, Any]:
    """Return the card's fields that the checkpoint's files state, for any family.

    A `card.json` next to model_index.json may give the name, say that it is untrained, and replace
    defaults by name: numbers, or a size as [height, width]. Missing weights are not in
    `component_bytes`.
    """
    own = Config.read(layout.folder / "card.json", is_optional=True)
    values = own.table("defaults", {})
    known = {field.name for field in fields(VideoDefaults)}
    for name in values.values.keys() - known:
        raise values.fault(name, values.values[name], f"one of {', '.join(sorted(known))}")
    changed: dict[str, Any] = {
        name: Size(*values.counts(name, length=2)) if name == "size" else values.setting(name)
        for name in values.values
    }
    return stored_networks(layout) | {
        "family": layout.family,
        "name": own.text("name", layout.folder.name),
        "is_trained": own.flag("trained", True),
        "defaults": replace(defaults, **changed),
    }


def stored_networks(
    layout: CheckpointLayout, is_loaded: Callable[[str, str], bool] = lambda name, path: True
) -> dict[str, Any]:
    """Return the weights of each component as fields of `Networks`.

    `is_loaded`: False for tensors, by their component and path, that are left out.
    """
    parts = [(name, part) for name, part in layout.components.items() if part.has_weights]
    stored = [(name, part.stored_bytes()) for name, part in parts]
    found = [
        (name, {path: one for path, one in part.known_tensors().items() if is_loaded(name, path)})
        for name, part in parts
    ]
    return {
        "packed": packed_weights(layout),
        "component_bytes": tuple((name, size) for name, size in stored if size is not None),
        "component_parameters": tuple(
            (name, sum(math.prod(tensor.shape) for tensor in tensors.values()))
            for name, tensors in found
            if tensors
        ),
        "grouped_parameters": tuple(
            (name, count_in_groups(tensors)) for name, tensors in found if tensors and name != "vae"
        ),
    }


def packed_weights(layout: CheckpointLayout) -> PackedWeights | None:
    """Return how a transformer in a single file is packed; None if it is not."""
    part = layout.components["transformer"]
    tensors = [] if part.weights is None else [*part.known_tensors().values()]
    matrices = [one for one in tensors if one.dtype not in FLOATS]
    if matrices:
        numbers = [math.prod(one.shape) for one in matrices]
        nbytes = sum(one.bytes for one in matrices)
        return PackedWeights("GGUF", sum(numbers), nbytes, max(numbers))
    return PackedWeights("fp8") if any(one.parts for one in tensors) else None


def start_rule(target_size: int, cell: int) -> StartRule:
    """Return HunyuanVideo-1.5's sizes: about target_size² pixels each.

    Along the staircase under height x width = target_size², in cells. Source:
    generate_crop_size_list of the release.
    """
    sizes, area = [], round((target_size / cell) ** 2)
    height, width = area, 1
    while height > 0:
        if max(height, width) / min(height, width) <= _MAX_RATIO:
            sizes.append(Size(height * cell, width * cell))
        if height * (width + 1) <= area:
            width += 1
        else:
            height -= 1
    return StartRule(1, 1, "crop", tuple(sizes))


def _hunyuan(layout: CheckpointLayout, model: str) -> VideoCard:
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    guider = layout.components["guider"].config()
    cell = vae.count("spatial_compression_ratio", 16)
    target = network.count("target_size", 640, least=cell, most=_MOST_PIXELS)
    is_distilled = network.flag("use_meanflow", False)
    sizes = start_rule(target, cell)
    landscape = sizes.size_for(Size(9, 16))
    assert landscape is not None, "the rule has sizes"
    defaults = VideoDefaults(
        size=landscape,
        num_frames=121,
        fps=24,
        # Distilled to few steps, by its own training; its authors say 8 or 12.
        num_inference_steps=12 if is_distilled else 50,
        # 1, which means none, if the guider is switched off (a distilled checkpoint).
        guidance_scale=guider.number("guidance_scale", 6.0) if guider.flag("enabled", True) else 1,
        flow_shift=_shift(layout, _SHIFT_OF_TARGET.get(target, 5.0)),
    )
    return VideoCard(
        model=model,
        size_multiple=cell * network.count("patch_size", 1),
        pixels_per_cell=cell,
        frame_stride=vae.count("temporal_compression_ratio", 4),
        latent_channels=vae.count("latent_channels", 32),
        max_prompt_tokens=HUNYUAN_MAX_TOKENS,
        tiles=TileRule(_TILE_PIXELS // cell, _STRIDE_PIXELS // cell, cell),
        forward=hunyuan_forward(network),
        decode=_HUNYUAN_DECODE,
        text_bytes=_qwen_bytes(layout.components["text_encoder"].config()),
        start=sizes if layout.starts_from_pictures else None,
        needs_start=layout.starts_from_pictures,
        is_distilled=is_distilled,
        follows=_FOLLOWS,
        **stored_facts(layout, defaults),
    )


def _wan(layout: CheckpointLayout, model: str) -> VideoCard:
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    cell = vae.count("scale_factor_spatial", 8)
    start = _wan_start(layout)
    facts = stored_facts(layout, _wan_defaults(layout, start))
    has_two = facts["defaults"].guidance_scale_2 is not None
    return VideoCard(
        model=model,
        # The pipeline requires 16, the patches more if a latent cell is 16 pixels.
        size_multiple=max(16, cell * wan_patch(network)[1]),
        pixels_per_cell=cell,
        frame_stride=vae.count("scale_factor_temporal", 4),
        latent_channels=vae.count("z_dim", 16),
        max_prompt_tokens=WAN_MAX_TOKENS,
        tiles=TileRule(_TILE_PIXELS // cell, _STRIDE_PIXELS // cell, cell),
        forward=wan_forward(network, by_token=layout.expands_timesteps),
        context_heads=network.count("num_attention_heads", _WAN_HEADS),
        decode=WAN_DECODE,
        text_bytes=umt5_bytes(layout.components["text_encoder"].config()),
        start=start,
        needs_start=layout.starts_from_pictures and not layout.expands_timesteps,
        has_float32_vae=True,
        wants_negative=True,
        cleaner="ftfy",
        # WanPipeline.do_classifier_free_guidance: only above 1.
        guides_below_one=False,
        follows=_FOLLOWS | ({"guidance_scale_2"} if has_two else set()),
        **facts,
    )


def _qwen_bytes(encoder: Config) -> int:
    """Return the activations of HunyuanVideo-1.5's text encoder: it keeps the rows of all layers.

    Its texts are filled up to the most tokens.
    """
    width, layers = encoder.count("hidden_size", 3584), encoder.count("num_hidden_layers", 28)
    row = (layers + 9) * width + 4 * encoder.count("intermediate_size", 18944)
    return (HUNYUAN_MAX_TOKENS + _TEMPLATE_TOKENS) * row * _BF16_BYTES


def umt5_bytes(encoder: Config) -> int:
    """Return the activations of Wan's text encoder: its attention adds a bias for each pair."""
    heads, inner = encoder.count("num_heads", 64), encoder.count("d_ff", 10240)
    pairs = 4 * heads * WAN_MAX_TOKENS**2
    return (pairs + 3 * inner * WAN_MAX_TOKENS) * _BF16_BYTES


def _wan_start(layout: CheckpointLayout) -> StartRule | None:
    """Return how a Wan checkpoint takes a picture; None if it does not.

    The 5B model makes the picture its first frame; others have channels for it. Picture tokens have
    a fixed number; the 2.2 pair reads none, and takes a last frame or not.
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


def _wan_defaults(layout: CheckpointLayout, start: StartRule | None) -> VideoDefaults:
    """Return the defaults of Wan 2.1, the 2.2 pair (720p, two scales), or the 2.2 5B (24 fps)."""
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
    # Only the shift distinguishes the 720p checkpoint of 2.1 from the 480p one.
    is_large = start.fewest == 2 or plain.flow_shift >= _SHIFT_OF_720P
    return replace(
        plain,
        size=Size(720, 1280) if is_large else plain.size,
        num_inference_steps=50 if start.fewest == 2 else 40,
    )


def _shift(layout: CheckpointLayout, otherwise: float) -> float:
    scheduler = layout.components["scheduler"]
    return scheduler.config().number(shift_name(scheduler), otherwise, above=0)


def wan_patch(network: Config) -> tuple[int, ...]:
    """Return the frames, rows and columns of cells in a token of Wan's transformer."""
    return network.counts("patch_size", (1, 2, 2), length=3)


def hunyuan_forward(network: Config) -> ForwardWork:
    """Return a forward of HunyuanVideo-1.5: joint attention, weights by kind of token.

    Here and for Wan: only matrix products of the video's tokens, a lower bound without norms,
    rotations and text (a prompt of 150 tokens adds less than 1 % at 480p).
    """
    width = network.count("num_attention_heads", 16) * network.count("attention_head_dim", 128)
    layers = network.count("num_layers", _HUNYUAN_BLOCKS)
    cells = network.count("patch_size_t", 1) * network.count("patch_size", 1) ** 2
    # Queries, keys, values and output; the two layers of the MLP.
    weights = 4 * width**2 + int(2 * network.number("mlp_ratio", 4.0, above=0) * width**2)
    channels = network.count("in_channels", 65) + network.count("out_channels", 32)
    return _forward_work(cells, width, layers, weights, channels)


def wan_forward(network: Config, *, by_token: bool = False) -> ForwardWork:
    """Return a forward of Wan: self-attention, and cross-attention to the text's 512 rows.

    `by_token`: each token has its own timestep (2.2's 5B model).
    """
    heads = network.count("num_attention_heads", _WAN_HEADS)
    width = heads * network.count("attention_head_dim", 128)
    layers, cells = network.count("num_layers", _WAN_BLOCKS), math.prod(wan_patch(network))
    # Self-attention has four matrices; in cross-attention, keys and values come from the text.
    weights = (4 + 2) * width**2 + 2 * width * network.count("ffn_dim", 13824)
    across = _PRODUCTS * WAN_MAX_TOKENS * width
    channels = network.count("in_channels", 16) + network.count("out_channels", 16)
    found = _forward_work(cells, width, layers, weights + across, channels)
    own = _MODULATION_WIDTHS * width if by_token else 0
    return replace(found, token_bytes=found.token_bytes + own)


def _forward_work(cells: int, width: int, layers: int, weights: int, channels: int) -> ForwardWork:
    """Return a forward of `layers` with these weights; `channels` per cell in and out."""
    return ForwardWork(
        cells_per_token=cells,
        per_token=_MAC * (layers * weights + cells * width * channels),
        per_pair=_MAC * _PRODUCTS * layers * width,
        token_bytes=_TOKEN_WIDTHS * width,
    )


def _refuse_wrong(folder: Path) -> None:
    require("diffusers", "av")
    from hyimg_cli.models.diffusers_video.weights import check_all, check_readers  # imports torch

    layout = DiffusersFolder(folder, "").layout
    check_all(layout)
    check_readers(layout)


FAMILY = Family(
    name="diffusers_video",
    makes="videos",
    marks=is_in_layout,
    open=DiffusersFolder,
    fingerprint=lambda folder: read_layout(folder).fingerprint(file_digest(parts_index(folder))),
    tensors=lambda folder: read_layout(folder).tensors(),
    check_headers=lambda folder: check_headers(read_layout(folder)),
    weights=lambda folder: read_layout(folder).weights(),
    refuse_wrong=_refuse_wrong,
    follows=frozenset({"quantization", "attention_backend", "compile_blocks", "cpu_offload=group"}),
)
