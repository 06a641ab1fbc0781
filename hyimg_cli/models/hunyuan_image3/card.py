"""A checkpoint folder's facts, from its JSON files and safetensors headers; no torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import promised_bytes, read_json, weight_bytes, weight_files
from hyimg_cli.loading.packed import stored_index
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.family import Reading
from hyimg_cli.models.hunyuan_image3.config import (
    VAE_CHUNK_BYTES,
    Architecture,
    GenerationConfig,
    VaeArchitecture,
    architecture,
    defaulted,
    generation_config,
)
from hyimg_cli.models.hunyuan_image3.split import expert_counts
from hyimg_cli.spec.card import PICTURE_BYTES, Bucket, ModelCard, Routing, WeightCounts, Working
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import OF_STEPS, OF_TEXT

FAMILY = "hunyuan_image3"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "card.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "system_prompt.py",
)
_BF16_BYTES = 2
_HALVES = "vae.encoder.", "vae.decoder."
# Sizes that the Instruct models add for any base size.
_EXTRA_SIZES = (Size(1024, 768), Size(1280, 720), Size(768, 1024), Size(720, 1280))
# Maximum number of rows that fill up a group of 16 (`kernels.experts`).
_FP8_FILLED_ROWS = 15
_OF_PROMPTS = {"drop_think", "use_system_prompt", "system_prompt", "infer_align_image_size"}


def read_architecture(folder: Path) -> Architecture:
    """Return the network that `folder/config.json` describes."""
    path = folder / "config.json"
    return architecture(read_json(path), where=path)


def read_generation(folder: Path) -> GenerationConfig:
    """Return the defaults in `folder/generation_config.json`."""
    path = folder / "generation_config.json"
    return generation_config(read_json(path), where=path)


def model_card(folder: Path, model: str) -> ModelCard:
    """Return the card of the checkpoint in `folder`, called `model` by the user.

    A `card.json` in the folder may give its name, say that it is untrained, and restrict the sizes
    to the ratio indices of its training.
    """
    arch, generation = read_architecture(folder), read_generation(folder)
    extra, layers = Config.read(folder / "card.json", is_optional=True), arch.num_hidden_layers
    return ModelCard(
        model=model,
        family=FAMILY,
        name=extra.text("name", folder.name),
        is_trained=extra.flag("trained", True),
        is_distilled=arch.cfg_distilled,
        buckets=_allowed(arch, extra),
        pixels_per_cell=arch.vae.ffactor_spatial,
        source_vit_tokens=arch.vision.max_num_patches,
        kv_bytes_per_token=2 * arch.num_key_value_heads * arch.head_dim * layers * _BF16_BYTES,
        weight_bytes=_weight_bytes(folder),
        max_positions=arch.max_position_embeddings,
        vocab_size=arch.vocab_size,
        defaults=generation.defaults,
        follows=OF_STEPS | OF_TEXT | _OF_PROMPTS,
        latent_channels=arch.vae.latent_channels,
        row_bytes=arch.hidden_size * _BF16_BYTES,
        kv_layers=layers,
        activations=_activations(arch),
        weights=_weights(folder, arch),
        routing=Routing(layers, arch.num_experts, arch.moe_topk),
        vae_bytes_per_pixel=_vae_bytes(arch.vae),
        vae_chunk_bytes=VAE_CHUNK_BYTES,
        tile_pixels=arch.vae.sample_size,
        base_size=arch.image_base_size,
    )


def reading(folder: Path) -> Reading:
    """Return the files in `folder` that are read, and the defaults for what they omit."""
    config, generation = (
        read_json(folder / name) for name in ("config.json", "generation_config.json")
    )
    try:
        weights = [path.name for path in weight_files(folder)]
    except CheckpointError:  # not fetched yet, or faulty, which their reader reports
        weights = []
    index = [] if weights == ["model.safetensors"] else ["model.safetensors.index.json"]
    found = [name for name in (*_SMALL_FILES, *index) if (folder / name).exists()]
    return Reading((*found, *weights), defaulted(config, generation))


def buckets(base_size: int, *, has_extras: bool) -> tuple[Bucket, ...]:
    """Return all buckets in order of their ratio index, from flat and wide to tall and narrow.

    From the square, one side grows by base/16 up to 2 base while the other shrinks to base/2; both
    ways, sorted by height/width. Source: the official `ResolutionGroup`.
    """
    step, longest, shortest = base_size // 16, base_size * 2, base_size // 2
    sizes = [Size(base_size, base_size)]
    height, width = base_size, base_size
    while height < longest or width > shortest:
        height, width = min(height + step, longest), max(width - step, shortest)
        sizes += [Size(height, width), Size(width, height)]
    sizes.sort(key=lambda size: size.height / size.width)
    if has_extras:
        known = {size.height / size.width for size in sizes}
        sizes += [size for size in _EXTRA_SIZES if size.height / size.width not in known]
    return tuple(Bucket(index, size) for index, size in enumerate(sizes))


def official_buckets(arch: Architecture) -> tuple[Bucket, ...]:
    """Return every size of the released rule for this base size."""
    return buckets(arch.image_base_size, has_extras=not arch.is_base)


def _allowed(arch: Architecture, extra: Config) -> tuple[Bucket, ...]:
    """Return the sizes of the training; if the card has none, all that are whole cells."""
    official, cell = official_buckets(arch), arch.vae.ffactor_spatial
    whole = {b.ratio_index for b in official if not (b.size.height % cell or b.size.width % cell)}
    wanted = extra.counts("ratio_indices", tuple(sorted(whole)), least=0, most=len(official) - 1)
    if not whole.issuperset(wanted) or not wanted:
        raise extra.fault("ratio_indices", wanted, f"sizes that are multiples of {cell} pixels")
    return tuple(bucket for bucket in official if bucket.ratio_index in wanted)


def _weight_bytes(folder: Path) -> int:
    """Return the bytes of all tensors."""
    promised = promised_bytes(folder)
    return weight_bytes(stored_index(folder)) if promised is None else promised


def _weights(folder: Path, arch: Architecture) -> WeightCounts:
    """Count weights by kind, from the files' headers, or else as 16 bits from the index."""
    try:
        sizes = {name: math.prod(info.shape) for name, info in stored_index(folder).items()}
    except CheckpointError:
        return weight_counts(arch, _weight_bytes(folder) // _BF16_BYTES, *_vae_weights(arch.vae))
    halves = [sum(n for name, n in sizes.items() if part in name) for part in _HALVES]
    return weight_counts(arch, sum(sizes.values()), *halves)


def weight_counts(arch: Architecture, every: int, encoder: int, decoder: int) -> WeightCounts:
    """Return weights by kind, from the total and from the weights of the VAE's halves."""
    own = expert_counts(arch)
    wide = own.wide + encoder + decoder
    rest = every - own.experts - wide
    return replace(own, wide=wide, rest=rest, encoder=encoder, decoder=decoder)


def _vae_weights(vae: VaeArchitecture) -> tuple[int, int]:
    """Return the weights of the levels of the VAE's encoder and decoder.

    They are nearly all of each: convolutions of 27 cells.
    """
    steps, in_time = (int(math.log2(f)) for f in (vae.ffactor_spatial, vae.ffactor_temporal))

    def half(widths: Sequence[int], blocks: int, of_step: list[float]) -> float:
        count: float = sum(2 * blocks * width**2 for width in widths)
        count += sum(a * b * n for a, b, n in zip(widths, widths[1:], of_step, strict=False))
        # Between the levels and the latents: two blocks of the widest, and an attention.
        return 27 * count + (27 + 1) * 4 * vae.block_out_channels[-1] ** 2

    blocks, widths = vae.layers_per_block, vae.block_out_channels
    grown = [8.0] * in_time + [4.0] * (steps - in_time)  # by a step up; a step down has as many
    shrunk = [1 / factor for factor in grown[::-1]]
    return round(half(widths, blocks, shrunk)), round(half(widths[::-1], blocks + 1, grown))


def _vae_bytes(vae: VaeArchitecture) -> int:
    """Return the bytes per pixel that the VAE holds, in float32.

    A residual block holds its input and the output of its first convolution; the second one's
    output is added to the input chunk by chunk. So there are two tensors of the widest level. Also
    the picture before and after.
    """
    widths, steps = vae.block_out_channels, int(math.log2(vae.ffactor_spatial))
    # Levels from the finest on that keep all frames.
    in_full = steps - int(math.log2(vae.ffactor_temporal))
    widest = max(
        2 * width * vae.ffactor_temporal / 2 ** max(0, level - in_full) / 4**level
        for level, width in enumerate(widths)
    )
    return math.ceil(widest * 4) + 2 * PICTURE_BYTES


def _activations(arch: Architecture) -> dict[str, Working]:
    """Return the memory of the widest part of a layer, its experts.

    A GPU holds input and output rows of the first product, and about eight copies of the residual
    stream; a CPU inputs, middles and outputs of all choices.
    """
    width, experts = arch.hidden_size, arch.num_experts
    chosen, inner, around = arch.moe_topk, arch.moe_intermediate_size, 8 * width * _BF16_BYTES
    dense = around + chosen * (width + 2 * inner) * _BF16_BYTES
    fp8 = around + chosen * (width + 2 * inner * _BF16_BYTES)
    return {
        "cpu": Working(chosen * (2 * width + 3 * inner) * _BF16_BYTES),
        "none": Working(dense),
        # Every expert's rows are padded to whole groups.
        "fp8": Working(fp8, experts * _FP8_FILLED_ROWS * (width + 2 * inner * _BF16_BYTES)),
        # One of the two stacks is unpacked for its product; so is FP8's on a GPU without an FP8
        # product.
        "nf4": Working(dense, experts * 2 * inner * width * _BF16_BYTES),
    }
