"""The library's pipelines that are run, by name; no torch."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from hyimg_cli.media.images import size_of
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Size

APACHE, NON_COMMERCIAL = "Apache-2.0", "non-commercial"
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
# Positions of Qwen-Image's, less those that a canvas of 8,192 pixels may take.
_QWEN_ROWS = 4096 - 256
# Pixels of a picture that is far from what models are trained on.
_SMALL = 512**2


@dataclass(frozen=True)
class Kind:
    """One of the library's pipelines."""

    # Its modular blocks; and its parts, each of one of these classes.
    blocks: str
    parts: dict[str, Set[str]]
    # Source pictures of a job.
    fewest: int
    most: int
    # What its checkpoints' pages sample with.
    steps: int
    guidance: float
    # Of its releases; empty where they have several.
    licence: str = APACHE
    # The text that its guidance draws away from where the job names none; None: it takes none.
    negative: str | None = " "
    # The scale from which on there is a second branch.
    guides_above: float = 1.0
    # There is no guidance, whatever the scale.
    is_distilled: bool = False
    # Both branches are one forward, and a scale of s weighs their difference by s, not by s - 1.
    joins_branches: bool = False
    # Its schedule's, by size and steps, whatever the scheduler says.
    has_own_shift: bool = False
    # Its own schedule, which no number of steps changes.
    sigmas: tuple[float, ...] = ()
    # False: an edit has its source's shape, its sides rounded up.
    takes_size: bool = True
    # Of a result's sides.
    multiple: int = 16
    # Bounds of sources; and of texts with what they are shown.
    least_side: int = 0
    most_ratio: int = 0
    most_rows: int = 1 << 20
    # What a job gives its blocks beside what all kinds' are given; and which of it its encoders
    # read: that of pictures, and that of texts where it is shown them.
    own_inputs: Callable[[ImageJob, ModelCard], dict[str, Any]] = lambda job, card: {}
    of_encoders: Set[str] = frozenset()
    # Of the text encoder, from its first on, that the blocks read; 0: all.
    text_layers: int = 0
    # The text encoder reads the source pictures, too.
    shows_pictures: bool = True
    # Latents of sources are of one size; else of their own, or of that where it is larger.
    scales_pictures: bool = True
    # Of a source.
    reads_alpha: bool = False
    # Which of its rows depend on neither step nor noise, by name of `prefix.PREFIXES`.
    prefix: str = ""

    def is_guided(self, job: ImageJob) -> bool:
        """True if the job's steps evaluate a second branch."""
        return not self.is_distilled and job.guidance_scale > self.guides_above


def _kontext_inputs(job: ImageJob, card: ModelCard) -> dict[str, Any]:
    """The library brings results to a million pixels, whatever is asked for, and sources to sizes
    of its own list, of as many: of small results, small sources stay as they are.
    """
    bucket = card.bucket_of(job.size)
    made = bucket.size if bucket else Size(card.base_size, card.base_size)
    areas = [one.height * one.width for one in (made, *map(size_of, job.images))]
    own = {"height": made.height, "width": made.width, "max_area": areas[0]}
    return own | {"_auto_resize": max(areas) >= _SMALL}


_KLEIN_KIND = Kind(
    "Flux2KleinModularPipeline", _KLEIN, 0, 12, steps=4, guidance=1.0, licence="",
    negative=None, is_distilled=True, has_own_shift=True, least_side=64, most_ratio=8,
    text_layers=28, shows_pictures=False, scales_pictures=False,
)  # fmt: skip
_QWEN21_KIND = Kind(
    "QwenImage21ModularPipeline", _QWEN21, 0, 10, steps=40, guidance=1.0, licence=NON_COMMERCIAL,
    own_inputs=lambda job, card: {"output_resolution": card.base_size},
    of_encoders=frozenset({"output_resolution"}),
    reads_alpha=True, multiple=32, prefix="pictures, then text",
)  # fmt: skip
_EDIT_KIND = Kind(
    "QwenImageEditModularPipeline", _QWEN_EDIT, 1, 1, steps=50, guidance=4.0, most_rows=_QWEN_ROWS,
)  # fmt: skip
_LONGCAT_KIND = Kind(
    "LongCatImageModularPipeline", _LONGCAT, 0, 0, steps=50, guidance=4.0, negative=""
)
KINDS = {
    "QwenImagePipeline": Kind(
        "QwenImageModularPipeline", _QWEN, 0, 0, steps=50, guidance=4.0,
        own_inputs=lambda job, card: {"max_sequence_length": 512},  # of the classic call
        of_encoders=frozenset({"max_sequence_length"}),
    ),
    "QwenImageEditPipeline": _EDIT_KIND,
    "QwenImageEditPlusPipeline": replace(
        _EDIT_KIND, blocks="QwenImageEditPlusModularPipeline", most=5, steps=40
    ),
    "Flux2KleinPipeline": _KLEIN_KIND,
    "Flux2KleinKVPipeline": replace(_KLEIN_KIND, prefix="references"),
    "QwenImage21Pipeline": _QWEN21_KIND,
    "ZImagePipeline": Kind(
        "ZImageModularPipeline", _Z_IMAGE, 0, 0, steps=50, guidance=5.0, negative="",
        guides_above=0.0, joins_branches=True,
    ),
    # Its guidance is embedded: never a second branch.
    "FluxKontextPipeline": Kind(
        "FluxKontextModularPipeline", _KONTEXT, 0, 1, steps=28, guidance=2.5,
        licence=NON_COMMERCIAL, negative=None, guides_above=math.inf, own_inputs=_kontext_inputs,
        of_encoders=frozenset({"_auto_resize"}), shows_pictures=False,
    ),
    "LongCatImagePipeline": _LONGCAT_KIND,
    "LongCatImageEditPipeline": replace(
        _LONGCAT_KIND, blocks="LongCatImageEditModularPipeline", fewest=1, most=1, guidance=4.5,
        takes_size=False, own_inputs=lambda job, card: {"max_area": card.base_size**2},
        of_encoders=frozenset({"max_area"}),
    ),
}  # fmt: skip
# Distilled releases with the name of a full one's pipeline: what their schedulers say that those of
# the full ones do not, and the steps and guidance of their pages.
_DISTILLED: dict[str, tuple[dict[str, float], int, float]] = {
    "ZImagePipeline": ({"shift": 3.0}, 8, 0.0),
    "LongCatImageEditPipeline": ({"base_shift": 1.15, "max_shift": 1.15}, 8, 1.0),
}


def kind_of(layout: CheckpointLayout) -> Kind:
    """The pipeline's row, or what the checkpoint makes of it: of a klein that is not distilled the
    base one's, of a Qwen-Image-2.1 with a schedule of its own, or a Z-Image or LongCat-Image-Edit
    with the turbo's scheduler, the turbo's.
    """
    kind, index = KINDS[layout.family], layout.index
    if kind is _KLEIN_KIND and not index.flag("is_distilled", False):
        base = "Flux2KleinBaseModularPipeline"
        return replace(kind, blocks=base, steps=50, guidance=4.0, is_distilled=False)
    if kind is _QWEN21_KIND and index.has("sample_sigmas"):
        sigmas = index.numbers("sample_sigmas")
        turbo = "QwenImage21TurboModularPipeline"
        return replace(
            kind, blocks=turbo, steps=len(sigmas), sigmas=sigmas, negative=None, is_distilled=True
        )
    if layout.family in _DISTILLED:
        known, steps, guidance = _DISTILLED[layout.family]
        if known.items() <= layout.components["scheduler"].config().values.items():
            return replace(kind, steps=steps, guidance=guidance)
    return kind
