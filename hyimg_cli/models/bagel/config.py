"""The checkpoint's JSON files and safetensors headers as typed facts; no torch.

Wrong or missing values are inferred from the weights: the released `config.json` may say 32 for a
position table of 64 x 64, and `vit_config.json` one layer too many. No file says that queries and
keys are normed and embeddings not tied.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import (
    TensorInfo,
    promised_bytes,
    tensor_index,
)
from hyimg_cli.models.common.config import MOST_WIDTH, Config, VitShape, refuse_unreleased
from hyimg_cli.spec.card import (
    NO_TEXT,
    PICTURE_BYTES,
    Bucket,
    ModelCard,
    SamplingDefaults,
    WeightCounts,
    Working,
)
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import OF_STEPS, OF_TEXT

FAMILY = "bagel"
WEIGHTS, VAE_WEIGHTS = "ema", "ae"
# Pixels per cell of the VAE, and cells per token.
VAE_STRIDE, PATCH = 8, 2
TOKEN_PIXELS = VAE_STRIDE * PATCH
TILE_PIXELS = 512
_BF16_BYTES = 2
_RELEASED_SIDE = 64
_MOST_SIDE = 4096
_LATENT_TABLE, _VIT_TABLE = "latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed"
_VIT = "vit_model.vision_model."
_VIT_POSITIONS = f"{_VIT}embeddings.position_embedding.weight"
# Height and width of the demo's sizes, at 1024 pixels a side.
_SIZES = ((1024, 1024), (768, 1024), (1024, 768), (576, 1024), (1024, 576))
# Options with a single released value; anything else is another network.
_ONLY_RELEASED: dict[str, Any] = {
    "latent_patch_size": PATCH,
    "connector_act": "gelu_pytorch_tanh",
    "interpolate_pos": False,
    "visual_gen": True,
    "visual_und": True,
}
_OF_LLM = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
_OF_VIT = {"hidden_act": "gelu_pytorch_tanh", "num_channels": 3}
DEFAULTS = SamplingDefaults(
    num_inference_steps=50,
    guidance_scale=4.0,
    flow_shift=3.0,
    **NO_TEXT | {"max_new_tokens": 1024},
    image_guidance_scale=1.5,
    guidance_interval=(0.4, 1.0),
    guidance_renorm="global",
    guidance_renorm_min=0.0,
)
_OF_GUIDANCE = {"guidance_interval", "guidance_renorm", "guidance_renorm_min"}
_OF_GUIDANCE |= {"image_guidance_scale"}
# The settings of the authors' demo for edits.
EDIT_DEFAULTS = replace(
    DEFAULTS, image_guidance_scale=2.0, guidance_interval=(0.0, 1.0), guidance_renorm="text_channel"
)


@dataclass(frozen=True)
class SizeLimits:
    """The size rule of a picture: its longest and shortest side, and the multiple of both."""

    max_size: int
    min_size: int
    stride: int


@dataclass(frozen=True)
class DecoderShape:
    """The language model; both of its sets of weights have these numbers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float


@dataclass(frozen=True, kw_only=True)
class VisionShape(VitShape):
    """The SigLIP tower; `positions` rows in its table, `table_side` squared in the model's."""

    positions: int
    table_side: int

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2


@dataclass(frozen=True)
class AutoencoderShape:
    """FLUX's autoencoder: its first level's width, multiples of it, and the latents' scale."""

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    scale_factor: float = 0.3611
    shift_factor: float = 0.1159

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.ch * multiple for multiple in self.ch_mult)


@dataclass(frozen=True)
class BagelShape:
    """The shape of the network. `table_side`: maximum rows and columns of a picture's tokens."""

    decoder: DecoderShape
    vision: VisionShape
    vae: AutoencoderShape
    table_side: int
    vae_limits: SizeLimits
    vit_limits: SizeLimits
    max_pixels: int

    @property
    def patch_values(self) -> int:
        """The number of values in a latent token."""
        return self.vae.z_channels * PATCH**2

    @property
    def max_side(self) -> int:
        """The longest side of a picture, in pixels."""
        return self.table_side * TOKEN_PIXELS


def read_architecture(folder: Path) -> BagelShape:
    """Return the network in `folder`. Raises CheckpointError for a missing or unreleased key."""
    config = Config.read(folder / "config.json")
    llm, vit = (
        config.table(name) if config.has(name) else Config.read(folder / f"{name}.json")
        for name in ("llm_config", "vit_config")
    )
    for own, only in ((config, _ONLY_RELEASED), (llm, _OF_LLM), (vit, _OF_VIT)):
        refuse_unreleased(own, only)
    found: Mapping[str, TensorInfo] = {}
    try:
        found = tensor_index(folder, WEIGHTS)
    except CheckpointError as error:
        # Checks and plans do not need the weights.
        if error.code != "checkpoint.no-weights":
            raise
    heads = llm.count("num_attention_heads")
    decoder = llm.facts(
        DecoderShape, head_dim=llm.count("head_dim", llm.count("hidden_size") // heads)
    )
    stated = vit.count("num_hidden_layers", least=2)
    # The released loader drops the last of the stated layers: the file has one less.
    has_last = f"{_VIT}encoder.layers.{stated - 1}.layer_norm1.weight" in found
    side = config.count("vit_max_num_patch_per_side", 70, most=_MOST_SIDE)
    rows = math.prod(found[_VIT_POSITIONS].shape[:1]) if _VIT_POSITIONS in found else side**2
    vision = vit.facts(
        VisionShape,
        num_hidden_layers=stated if has_last else stated - 1,
        positions=rows,
        table_side=_side(found, _VIT_TABLE, side),
    )
    vae = config.table("vae_config", {})
    autoencoder = vae.facts(AutoencoderShape)
    # The shape of a FLUX autoencoder; much larger numbers could not be built.
    if not (len(autoencoder.ch_mult) == 4 and max(autoencoder.widths) < MOST_WIDTH):
        raise vae.fault("ch_mult", autoencoder.ch_mult, f"four, and below {MOST_WIDTH:,} channels")
    transforms = config.table("image_transforms", {})
    return BagelShape(
        decoder=decoder,
        vision=vision,
        vae=autoencoder,
        table_side=_side(found, _LATENT_TABLE, _RELEASED_SIDE),
        vae_limits=_limits(transforms, "vae", 1024, 512, TOKEN_PIXELS),
        vit_limits=_limits(transforms, "vit", 980, 224, vision.patch_size),
        max_pixels=transforms.count("max_pixels", 14 * 14 * 9 * 1024),
    )


def _limits(transforms: Config, name: str, longest: int, shortest: int, stride: int) -> SizeLimits:
    own = transforms.table(name, {"max_size": longest, "min_size": shortest, "stride": stride})
    return own.facts(SizeLimits)


def _side(found: Mapping[str, TensorInfo], name: str, otherwise: int) -> int:
    """Return the rows and columns of a square table of positions, from its number of rows."""
    if name not in found:
        return otherwise
    rows = math.prod(found[name].shape[:1])
    if math.isqrt(rows) ** 2 != rows:
        what = f"{name} has {rows} rows; expected a square number"
        raise CheckpointError(what, code="checkpoint.mismatch")
    return math.isqrt(rows)


def model_card(folder: Path, model: str, arch: BagelShape) -> ModelCard:
    """Return the card of the checkpoint in `folder`, called `model` by the user.

    A `card.json` in the folder may give its name, and say that it is untrained.
    """
    extra = Config.read(folder / "card.json", is_optional=True)
    # The demo's sizes, scaled to the longest side of the table of positions.
    buckets = tuple(
        Bucket(index, Size(*(max(1, side * arch.max_side // 1024 // 16) * 16 for side in size)))
        for index, size in enumerate(_SIZES)
    )
    decoder, counts = arch.decoder, _weights(folder, arch.decoder)
    kv = decoder.num_hidden_layers * 2 * decoder.num_key_value_heads * decoder.head_dim
    row = 8 * decoder.hidden_size + 3 * decoder.intermediate_size
    # A quantized matrix is unpacked for its product, through float32.
    matrix = decoder.hidden_size * decoder.intermediate_size
    return ModelCard(
        model=model,
        family=FAMILY,
        name=extra.text("name", folder.name),
        is_trained=extra.flag("trained", True),
        is_distilled=False,
        buckets=buckets,
        pixels_per_cell=VAE_STRIDE,
        source_vit_tokens=arch.vision.table_side**2,
        kv_bytes_per_token=kv * _BF16_BYTES,
        weight_bytes=(counts.experts + counts.rest + counts.wide) * _BF16_BYTES,
        max_positions=decoder.max_position_embeddings,
        vocab_size=decoder.vocab_size,
        defaults=DEFAULTS,
        edit_defaults=EDIT_DEFAULTS,
        follows=OF_STEPS | OF_TEXT | _OF_GUIDANCE | {"infer_align_image_size"},
        latent_channels=arch.vae.z_channels,
        row_bytes=decoder.hidden_size * _BF16_BYTES,
        kv_layers=decoder.num_hidden_layers,
        activations=dict.fromkeys(("cpu", "none"), Working(row * _BF16_BYTES))
        | dict.fromkeys(("fp8", "nf4"), Working(row * _BF16_BYTES, 3 * matrix * _BF16_BYTES)),
        weights=counts,
        # Of the decoder's finest level, whose first block is as wide as the level below: its input,
        # normalised, and after its activation.
        vae_bytes_per_pixel=4 * 3 * arch.vae.widths[1] + 2 * PICTURE_BYTES,
        tile_pixels=TILE_PIXELS,
        base_size=arch.max_side,
        size_multiple=TOKEN_PIXELS,
        edit_shape="source",
        has_graphs=False,
    )


def _weights(folder: Path, decoder: DecoderShape) -> WeightCounts:
    """Count weights by format: VAE in float32, decoder matrices in fewer bits on request.

    From the index if the files are missing.
    """
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    heads, kv = (
        count * decoder.head_dim
        for count in (decoder.num_attention_heads, decoder.num_key_value_heads)
    )
    sets = 2 * decoder.num_hidden_layers
    experts = sets * hidden * (2 * heads + 2 * kv + 3 * inner)
    rows = sets * (heads + 2 * kv + 2 * inner + 2 * hidden)
    try:
        every, wide = (
            sum(math.prod(info.shape) for info in tensor_index(folder, stem).values())
            for stem in (WEIGHTS, VAE_WEIGHTS)
        )
    except CheckpointError:
        every, wide = (promised_bytes(folder) or 0) // _BF16_BYTES, 0
    return WeightCounts(experts, rows, wide, max(0, every - experts))
