"""Picture editors of diffusers as a family: which of the library's pipelines, and what each takes,
by a checkpoint's JSON files and safetensors headers; no torch.

A pipeline that is not in the table is refused by its name.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, SOURCE_IMAGES
from hyimg_cli.errors import JobError, SourceImageError, require
from hyimg_cli.kv.segments import ImageSegment, Segment
from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.checkpoint import file_digest
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.media.images import size_of
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_image.footprint import networks_of
from hyimg_cli.models.diffusers_image.licence import licence_of
from hyimg_cli.models.diffusers_image.rows import COUNTS, CountRows, PrefixRows
from hyimg_cli.models.diffusers_video.layout import FAMILIES as VIDEO_PIPELINES
from hyimg_cli.models.diffusers_video.layout import (
    INDEX,
    CheckpointLayout,
    component_of,
    is_video_checkpoint,
    refuse_quantized,
)
from hyimg_cli.models.family import Family, ImageCheckpoint
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import Bucket, ModelCard, SamplingDefaults
from hyimg_cli.spec.job import ImageJob, Size

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_image.model import LatentImageModel

# Stages of the library's blocks in front of the denoising.
OF_TEXTS, OF_PICTURES = "text_encoder", "vae_encoder"
_EULER = frozenset({"FlowMatchEulerDiscreteScheduler"})
_QWEN_TOKENIZERS = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
_QWEN = {
    "transformer": frozenset({"QwenImageTransformer2DModel"}),
    "vae": frozenset({"AutoencoderKLQwenImage"}),
    "text_encoder": frozenset({"Qwen2_5_VLForConditionalGeneration"}),
    "tokenizer": _QWEN_TOKENIZERS,
    "scheduler": _EULER,
}
_KLEIN_PARTS = {
    "transformer": frozenset({"Flux2Transformer2DModel"}),
    "vae": frozenset({"AutoencoderKLFlux2"}),
    "text_encoder": frozenset({"Qwen3ForCausalLM"}),
    "tokenizer": _QWEN_TOKENIZERS,
    "scheduler": _EULER,
}
_Z_IMAGE = {
    "transformer": frozenset({"ZImageTransformer2DModel"}),
    "vae": frozenset({"AutoencoderKL"}),
    "text_encoder": frozenset({"Qwen3Model", "Qwen3ForCausalLM"}),
    "tokenizer": _QWEN_TOKENIZERS,
    "scheduler": _EULER,
}
_FLUX_VAE = frozenset({"AutoencoderKL"})
_KONTEXT_PARTS = {
    "transformer": frozenset({"FluxTransformer2DModel"}),
    "vae": _FLUX_VAE,
    "text_encoder": frozenset({"CLIPTextModel"}),
    "tokenizer": frozenset({"CLIPTokenizer", "CLIPTokenizerFast"}),
    "text_encoder_2": frozenset({"T5EncoderModel"}),
    "tokenizer_2": frozenset({"T5Tokenizer", "T5TokenizerFast"}),
    "scheduler": _EULER,
}
_LONGCAT_PARTS = _QWEN | {
    "transformer": frozenset({"LongCatImageTransformer2DModel"}),
    "vae": _FLUX_VAE,
    "text_processor": frozenset({"Qwen2VLProcessor", "Qwen2_5_VLProcessor"}),
}
_QWEN21_PARTS = {
    "transformer": frozenset({"QwenImage21Transformer2DModel"}),
    "vae": frozenset({"AutoencoderKLQwenImage21"}),
    "text_encoder": frozenset({"Qwen3VLForConditionalGeneration"}),
    "processor": frozenset({"Qwen3VLProcessor"}),
    "scheduler": _EULER,
}
_QWEN_EDIT = _QWEN | {"processor": frozenset({"Qwen2VLProcessor"})}
# Latent cells of a side that are one token, and pixels of a cell.
_PATCH, _CELL = 2, 8
_STEP = _PATCH * _CELL
# Height and width of the ratios of Qwen-Image's own page, of about a million pixels.
_SIDES = (
    *((1024, 1024), (768, 1344), (1344, 768), (896, 1184), (1184, 896)),
    *((832, 1248), (1248, 832)),
)
_TOKENS_FILES = ("tokenizer.json", "tokenizer_config.json")
# Of a source picture's latents, in every step.
_REFERENCE_PIXELS = 1024**2
# The flow shift of a scheduler that shifts by the picture's size.
_BY_SIZE = 1.0
# Rows of a prompt, template and all, where nothing has counted them.
_TEXT_ROWS = 256
# Positions of Qwen-Image's, less those that a canvas of 8,192 pixels may take.
_QWEN_ROWS = 4096 - 256
# Pixels of a picture that is far from what models are trained on.
_SMALL = 512**2


@dataclass(frozen=True)
class Kind:
    """One of the library's pipelines: its modular blocks and parts, how many source pictures it
    takes, and what its checkpoints' pages sample with.

    `negative`: the text that its guidance draws away from where the job names none; None for a
    pipeline that takes none. Guidance is on where its scale is above `guides_above`;
    `is_distilled`: there is none. `joins_branches`: both are one forward, and a scale of s weighs
    their difference by s, not by s - 1. `has_own_shift`: of its schedule, by size and steps,
    whatever the scheduler says. `takes_size`: False where an edit has its source's shape, its sides
    rounded up;
    `least_side` and `most_ratio`: of sources, where there are bounds, as `most_rows` of texts with
    what they are shown. `own_inputs`: what a job gives its blocks beside what all kinds' are given;
    texts and pictures are encoded by those of them that are `of_texts` and `of_pictures`.
    `shows_pictures`: the text encoder reads the source pictures, too. `scales_pictures`: their
    latents are of one size, whatever theirs is; else of their own, or of that where it is larger.
    `reads_alpha`: of a source. `multiple`: of a result's sides. `sigmas`: its own schedule, which
    no number of steps changes. `prefix`: which of its rows depend on neither step nor noise, by
    name of `prefix.PREFIXES`; empty where all do.
    """

    blocks: str
    parts: dict[str, frozenset[str]]
    fewest: int
    most: int
    steps: int
    guidance: float
    negative: str | None = " "
    guides_above: float = 1.0
    is_distilled: bool = False
    joins_branches: bool = False
    has_own_shift: bool = False
    takes_size: bool = True
    most_rows: int = 1 << 20
    least_side: int = 0
    most_ratio: int = 0
    own_inputs: Callable[[ImageJob, ModelCard], dict[str, Any]] = lambda job, card: {}
    of_texts: frozenset[str] = frozenset()
    of_pictures: frozenset[str] = frozenset()
    shows_pictures: bool = True
    scales_pictures: bool = True
    reads_alpha: bool = False
    multiple: int = _STEP
    sigmas: tuple[float, ...] = ()
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


_KLEIN = Kind(
    "Flux2KleinModularPipeline", _KLEIN_PARTS, 0, 12, steps=4, guidance=1.0,
    negative=None, is_distilled=True, has_own_shift=True, least_side=64, most_ratio=8,
    shows_pictures=False, scales_pictures=False,
)  # fmt: skip
_QWEN21 = Kind(
    "QwenImage21ModularPipeline", _QWEN21_PARTS, 0, 10, steps=40, guidance=1.0,
    own_inputs=lambda job, card: {"output_resolution": card.base_size},
    of_texts=frozenset({"output_resolution"}), of_pictures=frozenset({"output_resolution"}),
    reads_alpha=True, multiple=32, prefix="pictures, then text",
)  # fmt: skip
KINDS = {
    "QwenImagePipeline": Kind(
        "QwenImageModularPipeline", _QWEN, 0, 0, steps=50, guidance=4.0,
        own_inputs=lambda job, card: {"max_sequence_length": 512},  # of the classic call
        of_texts=frozenset({"max_sequence_length"}),
    ),
    "QwenImageEditPipeline": Kind(
        "QwenImageEditModularPipeline", _QWEN_EDIT, 1, 1, steps=50, guidance=4.0,
        most_rows=_QWEN_ROWS,
    ),
    "QwenImageEditPlusPipeline": Kind(
        "QwenImageEditPlusModularPipeline", _QWEN_EDIT, 1, 5, steps=40, guidance=4.0,
        most_rows=_QWEN_ROWS,
    ),
    "Flux2KleinPipeline": _KLEIN,
    "Flux2KleinKVPipeline": replace(_KLEIN, prefix="references"),
    "QwenImage21Pipeline": _QWEN21,
    "ZImagePipeline": Kind(
        "ZImageModularPipeline", _Z_IMAGE, 0, 0, steps=50, guidance=5.0, negative="",
        guides_above=0.0, joins_branches=True,
    ),
    # Its guidance is embedded: never a second branch.
    "FluxKontextPipeline": Kind(
        "FluxKontextModularPipeline", _KONTEXT_PARTS, 0, 1, steps=28, guidance=2.5, negative=None,
        guides_above=math.inf, own_inputs=_kontext_inputs,
        of_pictures=frozenset({"_auto_resize"}), shows_pictures=False,
    ),
    "LongCatImagePipeline": Kind(
        "LongCatImageModularPipeline", _LONGCAT_PARTS, 0, 0, steps=50, guidance=4.0, negative="",
    ),
    "LongCatImageEditPipeline": Kind(
        "LongCatImageEditModularPipeline", _LONGCAT_PARTS, 1, 1, steps=50, guidance=4.5,
        negative="", takes_size=False,
        own_inputs=lambda job, card: {"max_area": card.base_size**2},
        of_texts=frozenset({"max_area"}), of_pictures=frozenset({"max_area"}),
    ),
}  # fmt: skip
_KLEIN_BASE = replace(
    _KLEIN, blocks="Flux2KleinBaseModularPipeline", steps=50, guidance=4.0, is_distilled=False
)


@dataclass(frozen=True)
class Condition:
    """What a job's denoising reads, made by one stage of its blocks: of texts and of pictures (path
    and sha256).
    """

    stage: str
    texts: tuple[tuple[str, str], ...]
    images: tuple[tuple[str, str], ...]
    is_guided: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> str:
        """Of the disk cache."""
        return PROMPT_EMBEDDINGS if self.texts else SOURCE_IMAGES


def list_conditions(
    kind: Kind, card: ModelCard, job: ImageJob, digests: Sequence[str]
) -> list[Condition]:
    """What the job's denoising reads, in order; of a picture that is given twice, twice."""
    is_guided = kind.is_guided(job)
    texts = [("prompt", job.prompt)]
    if is_guided and kind.negative is not None:
        texts.append(("negative_prompt", job.negative_prompt))
    images = tuple(zip(job.images, digests, strict=True))
    given = kind.own_inputs(job, card).items()
    of_texts, of_pictures = (
        tuple((name, value) for name, value in given if name in own)
        for own in (kind.of_texts, kind.of_pictures)
    )
    shown = images if kind.shows_pictures else ()
    # For its latents each picture is encoded alone, as the blocks do.
    sources = (Condition(OF_PICTURES, (), (one,), options=of_pictures) for one in images)
    return [Condition(OF_TEXTS, tuple(texts), shown, is_guided, of_texts), *sources]


def condition_key(
    layout: CheckpointLayout, one: Condition, dtype: str, device: str, *, is_tiled: bool
) -> str:
    """A condition's place in the disk cache, by texts and files' bytes, whatever they are called;
    `device` as in `CheckpointLayout.encoding_key`, `is_tiled`: the VAE's work.
    """
    of_texts = layout.components.keys() - {"transformer", "scheduler", "vae"}
    return layout.encoding_key(
        dtype,
        device,
        stage=one.stage,
        texts=one.texts,
        images=[sha256 for _, sha256 in one.images],
        guided=one.is_guided,
        options=one.options,
        files=[layout.identity_of(name) for name in sorted(of_texts if one.texts else {"vae"})],
        tiled=is_tiled and not one.texts,
    )


def kind_of(layout: CheckpointLayout) -> Kind:
    """The pipeline's row, or what the checkpoint makes of it: of a klein that is not distilled the
    base one's, of a Qwen-Image-2.1 with a schedule of its own the turbo's.
    """
    kind, index = KINDS[layout.family], layout.index
    if kind is _KLEIN and not index.flag("is_distilled", False):
        return _KLEIN_BASE
    if kind is _QWEN21 and index.has("sample_sigmas"):
        sigmas = index.numbers("sample_sigmas")
        turbo = "QwenImage21TurboModularPipeline"
        return replace(
            kind, blocks=turbo, steps=len(sigmas), sigmas=sigmas, negative=None, is_distilled=True
        )
    return kind


def pipeline_name(folder: Path) -> str:
    """The pipeline that a checkpoint's index names; empty where it has none."""
    if not is_video_checkpoint(folder):
        return ""
    return Config.read(folder / INDEX).text("_class_name", "")


def read_layout(folder: Path) -> CheckpointLayout:
    """The checkpoint in `folder`. Raises CheckpointError for another pipeline or foreign code."""
    name, index = pipeline_name(folder), Config.read(folder / INDEX)
    if name not in KINDS:
        what = f"{INDEX} names the pipeline {name!r}"
        raise checkpoint.fault("family", what, folder, f"known are {', '.join(KINDS)}")
    components = {
        part: component_of(folder, part, index.values.get(part), classes)
        for part, classes in KINDS[name].parts.items()
    }
    return CheckpointLayout(folder, name, components, index)


class EditorFolder(ImageCheckpoint):
    """A checkpoint folder, its weights unread."""

    def __init__(self, folder: Path, model: str) -> None:
        self.layout = read_layout(folder)
        _refuse_unsupported(self.layout)
        self.kind = kind_of(self.layout)
        self.card = _card(self.layout, self.kind, model)

    def check(self, job: ImageJob) -> None:
        kind, has_own_shift = self.kind, job.flow_shift == self.card.defaults.flow_shift
        # The checkpoint's own stands in the record of every picture.
        has_own_negative = job.negative_prompt == self.card.defaults.negative_prompt
        is_unguided = kind.negative is not None and not kind.is_guided(job)
        is_unread = is_unguided and not has_own_negative
        for name, is_asked in (
            ("guidance_scale", kind.is_distilled and job.guidance_scale != kind.guidance),
            ("size", not kind.takes_size and not (job.size.is_auto or job.outside)),
            ("num_inference_steps", kind.sigmas and job.num_inference_steps != kind.steps),
            ("flow_shift", kind.has_own_shift and not has_own_shift),
            ("bot_task", job.writes_text),
            ("cot_text" if job.cot_text else "cot_token_ids", job.has_given_text),
            ("system_prompt", job.system_prompt is not None),
            ("use_system_prompt", job.use_system_prompt != "None"),
            # An edit that keeps its source has its shape by itself.
            ("infer_align_image_size", job.infer_align_image_size and not job.outside),
            ("negative_prompt", is_unread and "negative_prompt" in job.user_fields),
        ):
            if is_asked:
                what = f"{self.card.name} does not follow {name}"
                raise JobError(what, where=name, hint="leave it out", code="job.not-followed")
        scheduler = self.layout.components["scheduler"].config()
        if job.num_inference_steps == 1 and has_own_shift and scheduler.has("shift_terminal"):
            what, hint = f"one step of {self.card.name} would have no schedule", "take 2 or more"
            raise JobError(what, where="num_inference_steps", hint=hint, code="job.one-step")
        for name in ("prompt", "negative_prompt"):
            text = getattr(job, name)
            if "<" in text and (found := [one for one in self._control_tokens if one in text]):
                what = f"the text has the control token {max(found, key=len)}"
                raise JobError(what, where=name, hint="take it out", code="job.control-token")
        for path in job.images if self.kind.least_side else ():
            with suppress(SourceImageError):  # which is told of the file
                self._check_source(size_of(path))
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import check_loras  # imports torch

            check_loras(job, self.layout)

    def _check_source(self, size: Size) -> None:
        short, long = sorted((size.height, size.width))
        least, most = self.kind.least_side, self.kind.most_ratio
        if short < least or long > most * short:
            what = f"a source of {size}; {self.card.name} takes sides of {least} and more"
            what += f", at most {most} to 1"
            raise JobError(what, where="images", hint="scale or crop it", code="job.source-size")

    @cached_property
    def _control_tokens(self) -> frozenset[str]:
        """What the tokenizers would not read as text: it stands in their templates."""
        found = set[str]()
        for name, part in self.layout.components.items():
            for file in _TOKENS_FILES if name.startswith(("tokenizer", "processor")) else ():
                own = Config.read(part.folder / file, is_optional=True)
                decoder = own.table("added_tokens_decoder", {}).values.values()
                listed = own.values.get("added_tokens")
                for one in (*decoder, *(listed if isinstance(listed, list) else ())):
                    match one:
                        case {"content": str(token), "special": True} if token.startswith("<"):
                            found.add(token)
        return frozenset(found)

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        if self.kind.prefix:
            branches = self._branches(job, source_sizes)
            prefixes = [sum(one.segments) for one in branches]
            return JobTokens(
                positive=prefixes[0],
                negative=sum(prefixes[1:]),
                step_rows=branches[0].per_step,
                branches=len(branches),
                kv_rows=sum(prefixes),
            )
        bucket = self.card.bucket_of(job.size) or self.card.nearest_bucket(1, 1)
        pixels = bucket.size.height * bucket.size.width
        for size in source_sizes:
            own = size.height * size.width
            is_fitted = self.kind.scales_pictures or own == 1  # 1: its size is not known
            pixels += _REFERENCE_PIXELS if is_fitted else min(own, _REFERENCE_PIXELS)
        return JobTokens(
            step_rows=pixels // _STEP**2 + _TEXT_ROWS, branches=self.card.branches(job)
        )

    def prefixes(
        self, job: ImageJob, source_sizes: Sequence[Size], digests: Sequence[str]
    ) -> list[list[Segment]]:
        if not self.kind.prefix:
            return [[]]  # nothing of a job's rows outlives a step
        pictures = f"{list(digests)} {job.lora}"
        found = list[list[Segment]]()
        for text, rows in zip(self._texts(job), self._branches(job, source_sizes), strict=True):
            what = (
                [pictures, text][-len(rows.segments) :] if self.kind.shows_pictures else [pictures]
            )
            pairs = zip(rows.segments, what, strict=False)
            found.append([ImageSegment((0,) * count, one, ()) for count, one in pairs])
        return found

    def _texts(self, job: ImageJob) -> list[str]:
        """Of each guidance branch."""
        return [job.prompt, job.negative_prompt][: self.card.branches(job)]

    def _branches(self, job: ImageJob, source_sizes: Sequence[Size]) -> list[PrefixRows]:
        bucket = self.card.bucket_of(job.size)
        size = bucket.size if bucket else None
        return [self._rows(text, source_sizes, size) for text in self._texts(job)]

    @cached_property
    def _rows(self) -> CountRows:
        return COUNTS[self.kind.prefix](self.layout.folder, self.card.base_size)

    def encodings(self, job: ImageJob, digests: Sequence[str]) -> list[tuple[str, Any]]:
        return [(one.kind, one) for one in list_conditions(self.kind, self.card, job, digests)]

    def encoding_key(self, item: Condition, choice: ModelChoice, dtype: str, device: str) -> str:
        is_tiled = bool(choice.vae_use_tiling)
        return condition_key(self.layout, item, dtype, device, is_tiled=is_tiled)

    def load(self, choice: ModelChoice, **_: object) -> "LatentImageModel":  # type: ignore[override]
        require("diffusers")
        from hyimg_cli.models.diffusers_image.model import LatentImageModel

        return LatentImageModel(self.card, self.layout, self.kind, choice)


def shifted(scheduler: Config, shift: float) -> dict[str, float | None]:
    """What a flow shift changes of a scheduler's configuration: of one that shifts by the picture's
    size, the same at every size, down to no end of its own. So do the authors of Qwen-Image's
    Lightning.
    """
    if not scheduler.flag("use_dynamic_shifting", False):
        return {"shift": shift}
    if shift == _BY_SIZE:
        return {}
    return dict.fromkeys(("base_shift", "max_shift"), math.log(shift)) | {"shift_terminal": None}


def _kv_bytes(layout: CheckpointLayout) -> int:
    """Of a row's keys and values in bfloat16."""
    own = layout.components["transformer"].config()
    layers = own.count("num_layers") + own.count("num_single_layers", 0, least=0)
    return 2 * 2 * layers * own.count("num_attention_heads") * own.count("attention_head_dim")


def _refuse_unsupported(layout: CheckpointLayout) -> None:
    """Passes a checkpoint that can be run. Raises CheckpointError."""
    refuse_quantized(layout)
    for part in layout.components.values():
        if part.has_weights and part.config().has("auto_map"):
            hint = "use an edition without it: code that a checkpoint brings along is never run"
            raise checkpoint.fault("code", f"the {part.name} wants its own code", part.folder, hint)
    network = layout.components["transformer"].config()
    if network.has("axes_dims_rope") and network.has("attention_head_dim"):
        axes, width = network.counts("axes_dims_rope"), network.count("attention_head_dim")
        if sum(axes) != width:
            raise network.fault("axes_dims_rope", list(axes), f"numbers that add up to {width}")
    network.counts("axes_lens", (1,))


def _refuse_wrong(folder: Path) -> None:
    from hyimg_cli.models.diffusers_video.weights import check_weights  # imports torch

    for part in EditorFolder(folder, "").layout.components.values():
        if part.has_weights:
            check_weights(part)


def _card(layout: CheckpointLayout, kind: Kind, model: str) -> ModelCard:
    own = Config.read(layout.folder / "card.json", is_optional=True)
    parts = [part for part in layout.components.values() if part.has_weights]
    scheduler = layout.components["scheduler"].config()
    return ModelCard(
        model=model,
        family="diffusers_image",
        name=own.text("name", layout.folder.name),
        is_trained=own.flag("trained", True),
        licence=licence_of(layout) if own.flag("trained", True) else "",
        is_distilled=kind.is_distilled,
        buckets=tuple(Bucket(number, Size(*sides)) for number, sides in enumerate(_SIDES)),
        pixels_per_cell=_CELL,
        source_vit_tokens=0,
        kv_bytes_per_token=_kv_bytes(layout) if kind.prefix else 0,
        weight_bytes=sum(part.stored_bytes() or 0 for part in parts),
        max_positions=1 << 20,
        vocab_size=0,
        size_multiple=kind.multiple,
        has_graphs=False,
        base_size=own.count("base_size", 1024),
        networks=networks_of(layout),
        guides=kind.is_guided,
        reference_pixels=_REFERENCE_PIXELS if kind.scales_pictures else 0,
        fewest_images=kind.fewest,
        most_images=kind.most,
        rounds_up=not kind.takes_size,
        defaults=SamplingDefaults(
            num_inference_steps=kind.steps,
            guidance_scale=kind.guidance,
            flow_shift=_BY_SIZE
            if scheduler.flag("use_dynamic_shifting", False)
            else scheduler.number("shift", 1.0, above=0),
            bot_task="none",
            drop_think=False,
            use_system_prompt="None",
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=1,
            has_negative_prompt=kind.negative is not None,
            negative_prompt=kind.negative or "",
        ),
    )


FAMILY = Family(
    name="diffusers_image",
    makes="pictures",
    # Others of the library are refused by their name, unless they make videos.
    marks=lambda folder: pipeline_name(folder) not in ("", *VIDEO_PIPELINES),
    open=EditorFolder,
    fingerprint=lambda folder: read_layout(folder).fingerprint(file_digest(folder / INDEX)),
    tensors=lambda folder: read_layout(folder).tensors(),
    refuse_wrong=_refuse_wrong,
)
