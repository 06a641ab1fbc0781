"""The library's pipelines that hyimg runs, by name; no torch."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import size_of
from hyimg_cli.models.diffusers_video.fitting import TEXT_WIDTH, Rule
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.licences import UNKNOWN, is_non_commercial, read_card
from hyimg_cli.spec.card import GUIDES_AWAY, ModelCard
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.options import OF_STEPS

APACHE, NON_COMMERCIAL = "Apache-2.0", "non-commercial"
# Text width of FLUX.2 klein 4B: three layers of Qwen3-4B. Larger releases have a larger one.
_OF_KLEIN_4B = 3 * 2560
# A LoRA for few steps: Qwen-Image-Edit-2509-Lightning-4steps-V1.0-bf16.safetensors
_LIGHTNING = re.compile(r"lightning[-_ ]?([0-9]+)[-_ ]?steps", re.IGNORECASE)
_SHARED: dict[str, Set[str]] = {
    "tokenizer": {"Qwen2Tokenizer", "Qwen2TokenizerFast"},
    "scheduler": {"FlowMatchEulerDiscreteScheduler"},
}
_QWEN: dict[str, Set[str]] = _SHARED | {
    "transformer": {"QwenImageTransformer2DModel"},
    "vae": {"AutoencoderKLQwenImage"},
    "text_encoder": {"Qwen2_5_VLForConditionalGeneration"},
}
_QWEN_EDIT: dict[str, Set[str]] = _QWEN | {"processor": {"Qwen2VLProcessor"}}
_QWEN21: dict[str, Set[str]] = {
    "scheduler": _SHARED["scheduler"],
    "transformer": {"QwenImage21Transformer2DModel"},
    "vae": {"AutoencoderKLQwenImage21"},
    "text_encoder": {"Qwen3VLForConditionalGeneration"},
    "processor": {"Qwen3VLProcessor"},
}
_KLEIN: dict[str, Set[str]] = _SHARED | {
    "transformer": {"Flux2Transformer2DModel"},
    "vae": {"AutoencoderKLFlux2"},
    "text_encoder": {"Qwen3ForCausalLM"},
}
_Z_IMAGE: dict[str, Set[str]] = _SHARED | {
    "transformer": {"ZImageTransformer2DModel"},
    "vae": {"AutoencoderKL"},
    "text_encoder": {"Qwen3Model", "Qwen3ForCausalLM"},
}
_KONTEXT: dict[str, Set[str]] = _SHARED | {
    "transformer": {"FluxTransformer2DModel"},
    "vae": {"AutoencoderKL"},
    "text_encoder": {"CLIPTextModel"},
    "tokenizer": {"CLIPTokenizer", "CLIPTokenizerFast"},
    "text_encoder_2": {"T5EncoderModel"},
    "tokenizer_2": {"T5Tokenizer", "T5TokenizerFast"},
}
_LONGCAT: dict[str, Set[str]] = _QWEN | {
    "transformer": {"LongCatImageTransformer2DModel"},
    "vae": {"AutoencoderKL"},
    "text_processor": {"Qwen2VLProcessor", "Qwen2_5_VLProcessor"},
}
# What must fit between these parts: see `fitting`.
_FITS_QWEN: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "z_dim")),
    (("transformer", "out_channels"), 1, ("vae", "z_dim")),
)
_FITS_QWEN21: tuple[Rule, ...] = (
    (("transformer", "context_in_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 1, ("vae", "z_dim")),
    (("transformer", "out_channels"), 1, ("vae", "z_dim")),
)
_FITS_KLEIN: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 3, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
)
_FITS_Z_IMAGE: tuple[Rule, ...] = (
    (("transformer", "cap_feat_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 1, ("vae", "latent_channels")),
)
_FITS_KONTEXT: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 1, ("text_encoder_2", "d_model")),
    (("transformer", "pooled_projection_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
)
_FITS_LONGCAT: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
)
# Positions of Qwen-Image, minus the ones that a canvas with sides of 8,192 pixels may take.
_QWEN_ROWS = 4096 - 256
# Sizes of FLUX.1 Kontext's training, to which the library scales sources.
_KONTEXT_SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184)),
    *((944, 1104), (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752)),
    *((1456, 720), (1504, 688), (1568, 672)),
)
_NO_GUIDANCE = "its steps have no guidance"
_NO_BRANCH = "guidance_scale is an input of its network; diffusers' true_cfg_scale is not supported"
_SHORT = {"tokenizer": 512}
# Pictures with fewer pixels are far from what models are trained on.
_SMALL = 512**2


@dataclass(frozen=True)
class LibraryPipeline:
    """One of the library's pipelines."""

    # Its modular blocks, its parts with their classes, and what must fit between them.
    blocks: str
    parts: dict[str, Set[str]]
    fits: tuple[Rule, ...]
    # Minimum and maximum number of source pictures.
    fewest: int
    most: int
    # Defaults of its checkpoints' pages.
    steps: int
    guidance: float
    # Licence of its releases; empty if they differ.
    licence: str = APACHE
    # Default negative prompt; None: it takes none.
    negative: str | None = " "
    # Why it takes none, if it takes none.
    no_negative: str = GUIDES_AWAY
    # A larger scale adds a second branch.
    guides_above: float = 1.0
    # It has no guidance, whatever the scale.
    is_distilled: bool = False
    # Blocks that replace the library's: a name of `own_blocks.OWN_BLOCKS`.
    own_blocks: str = ""
    # Size and steps decide its shift, not the scheduler's configuration.
    has_own_shift: bool = False
    # A fixed schedule; jobs cannot change its number of steps.
    sigmas: tuple[float, ...] = ()
    # False: an edit has its source's shape, with sides rounded up.
    takes_size: bool = True
    # Sides of results are multiples of it.
    multiple: int = 16
    # Sides of edits in their source's shape; 0: `multiple`. It is what the library brings
    # references to.
    fitted_multiple: int = 0
    # Those edits have at most the pixels of the model's square.
    is_bounded: bool = False
    # Sizes of those edits, width and height; empty: any.
    fitted_sizes: tuple[tuple[int, int], ...] = ()
    # A source that is kept is brought to the size of its edit; other kinds do that by themselves.
    fits_kept: bool = False
    # An edit without a size is a square, whatever the shape of its source.
    squares: bool = False
    # Limits of sources, and of texts with the pictures they see.
    least_side: int = 0
    most_ratio: int = 0
    # The shape is limited by the size of the square, in which no side may round to 0.
    narrows: bool = False
    most_rows: int = 1 << 20
    # By tokenizer, the tokens of a text that are read. The rest is ignored, or the job is refused.
    text_tokens: Mapping[str, int] = field(default_factory=dict)
    cuts_texts: bool = True
    # Inputs of its blocks that other kinds do not have. Then the ones that its encoders read: the
    # picture encoder's, and the text encoder's if it sees pictures.
    own_inputs: Callable[[ImageJob, ModelCard], dict[str, Any]] = lambda job, card: {}
    of_encoders: Set[str] = frozenset()
    # Layers of the text encoder that the blocks read, from the first one; 0: all.
    text_layers: int = 0
    # Activations of a text with the pictures that its encoder sees, in 16 bits, as traced.
    text_bytes: int = 280_000_000
    # The text encoder sees the source pictures.
    shows_pictures: bool = True
    # All sources are scaled to one area; otherwise only larger ones are.
    scales_pictures: bool = True
    # It reads the alpha of a source.
    reads_alpha: bool = False
    # Rows that depend on neither step nor noise: a name of `prefix.PREFIXES`.
    prefix: str = ""

    @property
    def joins_branches(self) -> bool:
        """True if one forward computes both guidance branches."""
        return self.own_blocks == "joined branches"

    @property
    def follows(self) -> frozenset[str]:
        """Return the options of jobs that it reads."""
        is_read = {
            "guidance_scale": not self.is_distilled,
            "flow_shift": not self.has_own_shift,
            "negative_prompt": self.negative is not None,
        }
        unread = {name for name, is_so in is_read.items() if not is_so}
        return (OF_STEPS | {"lora", "negative_prompt", "infer_align_image_size"}) - unread

    def is_guided(self, job: ImageJob) -> bool:
        """Return True if the job's steps evaluate a second branch."""
        return not self.is_distilled and job.guidance_scale > self.guides_above


def size_by_source(kind: LibraryPipeline, base_size: int, source: Size) -> Size:
    """Return the size of about `base_size`² pixels with the source's shape.

    A reference of this size is not resized by the library.
    """
    # NOTE: computed in the library's order: another order may round to another multiple.
    ratio, step = source.width / source.height, kind.fitted_multiple or kind.multiple
    if kind.fitted_sizes and base_size**2 >= _SMALL:
        nearest = min(kind.fitted_sizes, key=lambda one: abs(ratio - one[0] / one[1]))
        return Size(nearest[1], nearest[0])
    width = math.sqrt(base_size**2 * ratio)
    exact = (width / ratio / step, width / step)
    if not kind.is_bounded:
        rounded = round if kind.takes_size else math.ceil
        return Size(*(max(1, rounded(count)) * step for count in exact))
    steps = [(max(1, math.floor(count)), max(1, math.ceil(count))) for count in exact]
    sizes = [Size(rows * step, columns * step) for rows, columns in itertools.product(*steps)]
    within = [one for one in sizes if one.height * one.width <= base_size**2] or sizes[:1]
    return min(within, key=lambda one: abs(math.log(one.width / one.height / ratio)))


def _kontext_inputs(job: ImageJob, card: ModelCard) -> dict[str, Any]:
    """Return Kontext's inputs: results keep the requested size.

    The library scales results to a million pixels, whatever size is requested, and sources to a
    size of its list. Here, small sources of small results also stay unchanged.
    """
    bucket = card.bucket_of(job.size)
    made = bucket.size if bucket else Size(card.base_size, card.base_size)
    # A kept source is brought to the size of its edit.
    sources = () if job.outside else map(size_of, job.images)
    areas = [one.height * one.width for one in (made, *sources)]
    own = {"height": made.height, "width": made.width, "max_area": areas[0]}
    return own | {"_auto_resize": max(areas) >= _SMALL}


_KLEIN_PIPELINE = LibraryPipeline(
    "Flux2KleinModularPipeline", _KLEIN, _FITS_KLEIN, 0, 12, steps=4, guidance=1.0, licence="",
    negative=None, no_negative=_NO_GUIDANCE, is_distilled=True, has_own_shift=True,
    least_side=64, most_ratio=8,
    text_layers=28, text_tokens=_SHORT, shows_pictures=False, scales_pictures=False,
    fits_kept=True, is_bounded=True,
    own_blocks="rows in order",
)  # fmt: skip
_QWEN21_PIPELINE = LibraryPipeline(
    "QwenImage21ModularPipeline", _QWEN21, _FITS_QWEN21, 0, 10, steps=40, guidance=1.0,
    licence=NON_COMMERCIAL,
    own_inputs=lambda job, card: {"output_resolution": card.base_size},
    of_encoders=frozenset({"output_resolution"}),
    # Of 8,192 positions, ten pictures take fewer than 1,024. Later ones would be read as negative.
    text_tokens={"processor": 8192 - 1024}, cuts_texts=False,
    reads_alpha=True, multiple=32, narrows=True, prefix="pictures, then text",
    text_bytes=1_000_000_000,
)  # fmt: skip
_EDIT_PIPELINE = LibraryPipeline(
    "QwenImageEditModularPipeline", _QWEN_EDIT, _FITS_QWEN, 1, 1, steps=50, guidance=4.0,
    most_rows=_QWEN_ROWS, text_tokens={"tokenizer": _QWEN_ROWS}, cuts_texts=False,
    # Its text encoder takes shapes up to 200 to 1, after sides were rounded to multiples of 32.
    most_ratio=163, fitted_multiple=32, text_bytes=600_000_000,
)  # fmt: skip
_LONGCAT_PIPELINE = LibraryPipeline(
    "LongCatImageModularPipeline",
    _LONGCAT,
    _FITS_LONGCAT,
    0,
    0,
    steps=50,
    guidance=4.0,
    negative="",
    text_tokens=_SHORT,
    cuts_texts=False,
)
KINDS = {
    "QwenImagePipeline": LibraryPipeline(
        "QwenImageModularPipeline", _QWEN, _FITS_QWEN, 0, 0, steps=50, guidance=4.0,
        own_inputs=lambda job, card: {"max_sequence_length": 512},  # the classic call's
        text_tokens=_SHORT,
        of_encoders=frozenset({"max_sequence_length"}),
    ),
    "QwenImageEditPipeline": _EDIT_PIPELINE,
    "QwenImageEditPlusPipeline": replace(
        _EDIT_PIPELINE, blocks="QwenImageEditPlusModularPipeline", most=5, steps=40, most_ratio=0
    ),
    "Flux2KleinPipeline": _KLEIN_PIPELINE,
    "Flux2KleinKVPipeline": replace(_KLEIN_PIPELINE, prefix="references"),
    "QwenImage21Pipeline": _QWEN21_PIPELINE,
    "ZImagePipeline": LibraryPipeline(
        "ZImageModularPipeline", _Z_IMAGE, _FITS_Z_IMAGE, 0, 0, steps=50, guidance=5.0, negative="",
        guides_above=0.0, text_tokens=_SHORT, own_blocks="joined branches",
    ),
    # Its guidance is an input of the transformer: never a second branch.
    "FluxKontextPipeline": LibraryPipeline(
        "FluxKontextModularPipeline", _KONTEXT, _FITS_KONTEXT, 0, 1, steps=28, guidance=2.5,
        licence=NON_COMMERCIAL, negative=None, no_negative=_NO_BRANCH, guides_above=math.inf,
        own_inputs=_kontext_inputs,
        text_tokens={"tokenizer": 77 - 2, "tokenizer_2": 512 - 1},
        of_encoders=frozenset({"_auto_resize"}), shows_pictures=False, least_side=16,
        fitted_sizes=_KONTEXT_SIZES, fits_kept=True, squares=True,
    ),
    "LongCatImagePipeline": _LONGCAT_PIPELINE,
    "LongCatImageEditPipeline": replace(
        _LONGCAT_PIPELINE, blocks="LongCatImageEditModularPipeline", fewest=1, most=1, guidance=4.5,
        takes_size=False, own_inputs=lambda job, card: {"max_area": card.base_size**2},
        of_encoders=frozenset({"max_area"}), text_bytes=600_000_000,
    ),
}  # fmt: skip
# Distilled releases that name the same pipeline as the full one: scheduler values that only they
# have, and the steps and guidance of their pages.
_DISTILLED: dict[str, tuple[dict[str, float], int, float]] = {
    "ZImagePipeline": ({"shift": 3.0}, 8, 0.0),
    "LongCatImageEditPipeline": ({"base_shift": 1.15, "max_shift": 1.15}, 8, 1.0),
}


def kind_of(layout: CheckpointLayout) -> LibraryPipeline:
    """Return the pipeline's row, adapted to a checkpoint's base or turbo version.

    For a klein base model, or a turbo version of Qwen-Image-2.1, Z-Image or LongCat-Image-Edit.
    """
    kind, index = KINDS[layout.family], layout.index
    if kind is _KLEIN_PIPELINE and not index.flag("is_distilled", False):
        base = "Flux2KleinBaseModularPipeline"
        return replace(
            kind, blocks=base, steps=50, guidance=4.0, is_distilled=False, no_negative=GUIDES_AWAY
        )
    if kind is _QWEN21_PIPELINE and index.has("sample_sigmas"):
        sigmas = index.numbers("sample_sigmas")
        turbo = "QwenImage21TurboModularPipeline"
        return replace(
            kind,
            blocks=turbo,
            steps=len(sigmas),
            sigmas=sigmas,
            negative=None,
            is_distilled=True,
            no_negative=_NO_GUIDANCE,
        )
    if layout.family in _DISTILLED:
        known, steps, guidance = _DISTILLED[layout.family]
        if known.items() <= layout.components["scheduler"].config().values.items():
            return replace(kind, steps=steps, guidance=guidance)
    return kind


def licence_of(layout: CheckpointLayout) -> str:
    """Return a checkpoint's licence in one word, or UNKNOWN.

    From its README, or else its pipeline's releases.
    """
    words = read_card(layout.folder)
    if any(map(is_non_commercial, words)):
        return NON_COMMERCIAL
    if words and words[0] != "other":
        return APACHE if words[0] == "apache-2.0" else words[0]
    if of_releases := KINDS[layout.family].licence:
        return of_releases
    width = layout.components["transformer"].config().count("joint_attention_dim", 0)
    return APACHE if width == _OF_KLEIN_4B else NON_COMMERCIAL if width > _OF_KLEIN_4B else UNKNOWN


def square_advice(kind: LibraryPipeline, base_size: int, job: ImageJob) -> tuple[str, ...]:
    """Return a warning if an edit will not have its source's shape, which nobody asked for."""
    if not (kind.squares and job.images and job.size.is_auto):
        return ()
    with suppress(SourceImageError):  # reported for the file elsewhere
        source = size_of(job.images[0])
        if source.height != source.width:
            what = f"an edit of a {source} source is drawn as a {base_size}x{base_size} square"
            return (f"{what}; infer_align_image_size gives it the source's shape",)
    return ()


def few_steps_advice(job: ImageJob) -> tuple[str, ...]:
    """Return a warning if a job uses a few-step LoRA with other settings than recommended.

    By the LoRA's authors.
    """
    for lora in job.lora:
        name = lora.file.rpartition("/")[2]
        if found := _LIGHTNING.search(name):
            wanted = {"num_inference_steps": int(found[1]), "guidance_scale": 1, "flow_shift": 3}
            others = {one: getattr(job, one) for one in wanted if getattr(job, one) != wanted[one]}
            if others:
                asks = ", ".join(f"{one} {wanted[one]}" for one in others)
                has = ", ".join(f"{value:g}" for value in others.values())
                return (f"{name} was trained for {asks}; this job uses {has}",)
    return ()
