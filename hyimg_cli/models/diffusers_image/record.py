"""Picture editors of diffusers as a family: facts from a checkpoint's JSON and headers.

No torch. A pipeline that is not in the table is refused by name.
"""

import json
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, SOURCE_IMAGES
from hyimg_cli.errors import JobError, SourceImageError, require
from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.checkpoint import file_digest
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.manifest.written import REWRITTEN
from hyimg_cli.media.images import view_size
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_image.advice import few_steps_advice, square_advice
from hyimg_cli.models.diffusers_image.batches import batch_key
from hyimg_cli.models.diffusers_image.file_weights import (
    TRANSFORMER,
    doubts,
    fitting_file,
    made_as,
)
from hyimg_cli.models.diffusers_image.footprint import activations, kv_bytes
from hyimg_cli.models.diffusers_image.kind import (
    NON_COMMERCIAL,
    LibraryPipeline,
    size_by_source,
)
from hyimg_cli.models.diffusers_image.rewriter.record import find_rewriter, refuse_wrong_rewriter
from hyimg_cli.models.diffusers_image.rows import (
    COUNTS,
    CountRows,
    PrefixRows,
    count_layers,
    text_rows,
)
from hyimg_cli.models.diffusers_image.table import KINDS, kind_of, licence_of
from hyimg_cli.models.diffusers_video.fitting import picture_positions, refuse_unfitting
from hyimg_cli.models.diffusers_video.layout import FAMILIES as VIDEO_PIPELINES
from hyimg_cli.models.diffusers_video.layout import (
    CheckpointLayout,
    Component,
    component_of,
    is_in_layout,
    refuse_quantized,
)
from hyimg_cli.models.diffusers_video.record import stored_networks
from hyimg_cli.models.diffusers_video.tokenizers import check_headers, count_beyond
from hyimg_cli.models.family import Family, ImageCheckpoint
from hyimg_cli.models.foreign_files import OTHER_TOOLS
from hyimg_cli.models.licences import UNKNOWN
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.card import NO_TEXT, Bucket, ModelCard, Networks, SamplingDefaults
from hyimg_cli.spec.gc_paused import freeze_libraries
from hyimg_cli.spec.job import ImageJob, Size, View
from hyimg_cli.spec.work import picture_work

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_image.model import LatentImageModel
    from hyimg_cli.models.diffusers_image.rewriter.model import PromptRewriter

# Height and width of the ratios of Qwen-Image's page, about a million pixels each.
_SIDES = (
    *((1024, 1024), (768, 1344), (1344, 768), (896, 1184), (1184, 896)),
    *((832, 1248), (1248, 832)),
)
# Of a text encoder's tensor, its layer.
_TEXT_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
_HEAD = re.compile(r"(?:language_model\.)?lm_head\.")
# Control tokens begin with one of these.
_MARKS = ("<", "[")
_TOKENS_FILES = ("tokenizer.json", "tokenizer_config.json")
# Pixels of a source picture in every step.
_REFERENCE_PIXELS = 1024**2
# The flow shift that leaves the shift to the scheduler's rule by the picture's size.
_BY_SIZE = 1.0

_NOT_REWRITTEN = (
    "{}'s authors advise against prompts as people write them: hyimg think rewrites them first"
)

# Stages of the library's blocks before denoising.
OF_TEXTS, OF_PICTURES = "text_encoder", "vae_encoder"
NEGATIVE = "negative_prompt"


@dataclass(frozen=True)
class Condition:
    """A text, or pictures (view and whole digest), that one stage of the blocks encodes for a job.

    `text` has its field, and the pictures that its encoder sees. `size`: the one to which the
    pictures are brought first; None for their own.
    """

    stage: str
    text: tuple[str, str] | None
    images: tuple[tuple[View, str], ...]
    options: tuple[tuple[str, Any], ...] = ()
    size: Size | None = None


def pipeline_name(folder: Path) -> str:
    """Return the pipeline that a checkpoint's index names, or an empty string."""
    if not is_in_layout(folder):
        return ""
    return Config.read(checkpoint.parts_index(folder)).text("_class_name", "")


def read_layout(folder: Path, weights: Path | None = None) -> CheckpointLayout:
    """Read the layout of a checkpoint; `weights`: a file in place of its transformer's.

    Raises CheckpointError for an unknown pipeline, and for a file of another network.
    """
    name, index = pipeline_name(folder), Config.read(checkpoint.parts_index(folder))
    if name not in KINDS:
        what = f"{Path(index.where).name} names the pipeline {name!r}"
        is_other = name.startswith("StableDiffusion")  # SD 1.5, SDXL
        hint = OTHER_TOOLS if is_other else f"supported are {', '.join(KINDS)}"
        raise checkpoint.fault("family", what, folder, hint)
    components = {
        part: component_of(folder, part, index.values.get(part), classes)
        for part, classes in KINDS[name].parts.items()
    }
    for part, values in KINDS[name].built_in_parts.items():
        components[part] = Component(
            folder / part, "diffusers", values["_class_name"], None, values
        )
    if weights is not None:
        own = components[TRANSFORMER]
        components[TRANSFORMER] = replace(own, weights=fitting_file(weights, own))
    return CheckpointLayout(folder, name, components, index)


class EditorFolder(ImageCheckpoint):
    """A checkpoint folder, without its weights."""

    def __init__(self, folder: Path, model: str, weights: Path | None = None) -> None:
        self.layout = read_layout(folder, weights)
        self.kind = kind_of(self.layout)
        _refuse_unsupported(self.layout, self.kind)
        refuse_unfitting(self.layout, self.kind.fits, self.kind.text_layers)
        self.card = _card(self.layout, self.kind, model)

    def check(self, job: ImageJob) -> None:
        kind, own = self.kind, self.card.defaults
        keeps_shift = job.flow_shift == own.flow_shift
        # The checkpoint's default is in the record of every picture, so only a user's counts.
        is_unguided = kind.negative is not None and not kind.is_guided(job)
        is_unread = is_unguided and job.negative_prompt != own.negative_prompt
        for name, is_asked in (
            ("size", not kind.takes_size and not (job.size.is_auto or job.outside)),
            ("num_inference_steps", kind.sigmas and job.num_inference_steps != kind.steps),
            ("negative_prompt", is_unread and "negative_prompt" in job.user_fields),
        ):
            if is_asked:
                what = f"{self.card.name} does not follow {name}"
                raise JobError(what, where=name, hint="remove it", code="job.not-followed")
        scheduler = self.layout.components["scheduler"].config()
        if job.num_inference_steps == 1 and keeps_shift and scheduler.has("shift_terminal"):
            what, hint = f"{self.card.name} cannot run a single step", "use 2 or more"
            raise JobError(what, where="num_inference_steps", hint=hint, code="job.one-step")
        for name in ("prompt", "negative_prompt"):
            text = getattr(job, name)
            if any(one in text for one in _MARKS) and (
                found := [one for one in self._control_tokens if one in text]
            ):
                what = f"the text contains the control token {max(found, key=len)}"
                raise JobError(what, where=name, hint="remove it", code="job.control-token")
        self._refuse_narrow(job)
        self._refuse_large(job)
        for name, part, count, most in () if kind.cuts_texts else self._find_long(job):
            what = f"the text has {count:,} tokens; its {part} reads {most:,}"
            raise JobError(what, where=name, hint="shorten it", code="job.too-long")
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import check_loras  # imports torch

            check_loras(job, self.layout)

    def advice(self, job: ImageJob) -> Sequence[str]:
        said = f"{self.card.name} has a non-commercial licence: read it before using its pictures"
        is_free = self.card.licence != NON_COMMERCIAL
        left = "reads: the rest is ignored"
        long = [
            f"a {name} is longer than the {most:,} tokens that the {part} {left}"
            for name, part, _, most in (self._find_long(job) if self.kind.cuts_texts else ())
        ]
        if self.card.licence == UNKNOWN and self.card.made_as:
            said, is_free = f"the licence of {self.card.name} is not known: read its page", False
        how: tuple[str, ...] = (self.card.made_as,) if self.card.made_as else ()
        if self.kind.rewrites and REWRITTEN not in json.loads(job.extra_json):
            how += (_NOT_REWRITTEN.format(self.card.name),)
        return (*(() if is_free else (said,)), *how, *long, *self.notes(job))

    def _find_long(self, job: ImageJob) -> Iterator[tuple[str, str, int, int]]:
        """Yield field, encoder, number of tokens and their limit of each text that is too long."""
        is_guided = self.kind.is_guided(job)
        for name in ("prompt", NEGATIVE) if is_guided else ("prompt",):
            for tokenizer, most in self.kind.text_tokens.items():
                folder = self.layout.components[tokenizer].folder
                if count := count_beyond(folder, getattr(job, name), most):
                    encoder = tokenizer.replace("tokenizer", "text_encoder")
                    yield name, encoder.replace("processor", "text_encoder"), count, most

    def _refuse_large(self, job: ImageJob) -> None:
        """Raise JobError for a picture with more rows or columns than there are positions for."""
        limits, bucket = picture_positions(self.layout), self.card.bucket_of(job.size)
        if limits is None or bucket is None:
            return
        most = Size(*(count * self.kind.multiple for count in limits))
        if bucket.size.height > most.height or bucket.size.width > most.width:
            what = f"{bucket.size} is larger than {most}, for which {self.card.name} has positions"
            raise JobError(what, where="size", hint="use a smaller one", code="job.size")

    def notes(self, job: ImageJob) -> tuple[str, ...]:
        """Return warnings for the job's result line, from the checkpoint's files and the LoRAs'."""
        found = (
            doubts(self.layout)
            + few_steps_advice(job)
            + square_advice(self.kind, self.card.base_size, job)
        )
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import lora_notes  # imports torch

            found += lora_notes(job, self.layout)
        return found + self.layout.notes

    def _refuse_narrow(self, job: ImageJob) -> None:
        """Raise JobError for a source that the library cannot bring to its size."""
        kind, limits = self.kind, list[str]()
        least, most = kind.least_side, kind.most_ratio
        if kind.narrows:
            step = kind.fitted_multiple or kind.multiple
            most = (2 * self.card.base_size // step) ** 2 - 1
        if least:
            limits.append(f"sides of {least} pixels or more")
        if most:
            limits.append(f"shapes up to {most} to 1")
        for view in job.views:
            with suppress(SourceImageError):  # reported for the file elsewhere
                size = view_size(view)
                short, long = sorted((size.height, size.width))
                if short < least or (most and long > most * short):
                    what = f"the source is {size}; {self.card.name} takes {', and '.join(limits)}"
                    hint = "scale or crop it"
                    raise JobError(what, where="images", hint=hint, code="job.source-size")

    @cached_property
    def _control_tokens(self) -> frozenset[str]:
        """Tokens of the tokenizers' templates, which are not read as text."""
        found = set[str]()
        for name, part in self.layout.components.items():
            for file in _TOKENS_FILES if name.startswith(("tokenizer", "processor")) else ():
                own = Config.read(part.folder / file, is_optional=True)
                decoder = own.table("added_tokens_decoder", {}).values.values()
                listed = own.values.get("added_tokens")
                for one in (*decoder, *(listed if isinstance(listed, list) else ())):
                    match one:
                        case {"content": str(token), "special": True} if token.startswith(_MARKS):
                            found.add(token)
        return frozenset(found)

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        branches = self._branches(job, source_sizes)
        first, *others = (rows.prefix for rows in branches)
        return JobTokens(
            positive=first,
            step_rows=branches[0].per_step,
            branches=len(branches),
            kv_rows=first + sum(others),
        )

    def _branches(self, job: ImageJob, source_sizes: Sequence[Size]) -> list[PrefixRows]:
        texts = [job.prompt, job.negative_prompt][: self.card.branches(job)]
        bucket = self.card.bucket_of(job.size)
        size = bucket.size if bucket else None
        if job.layers:
            square = Size(self.card.base_size, self.card.base_size)
            return [count_layers(job.layers, size or square)] * len(texts)
        seen = source_sizes if self.kind.most else ()
        return [self._rows(text, seen, size) for text in texts]

    @cached_property
    def _rows(self) -> CountRows:
        name = self.kind.rows or self.kind.prefix
        return COUNTS[name](self.layout.folder, self.card)

    def encodings(self, job: ImageJob, digests: Sequence[str]) -> list[tuple[str, Any]]:
        """Return what the job's denoising reads, in order, each with its kind in the disk cache.

        A picture that is given twice is listed twice.
        """
        kind, texts = self.kind, [("prompt", job.prompt)]
        if kind.is_guided(job):
            # Empty for a model that takes none.
            texts.append((NEGATIVE, job.negative_prompt))
        images = tuple(zip(job.views, digests, strict=True))
        given = kind.own_inputs(job, self.card).items()
        options = tuple((name, value) for name, value in given if name in kind.of_encoders)
        of_texts = tuple((name, value) for name, value in given if name in kind.of_texts)
        shown, known = (images, options) if kind.shows_pictures else ((), of_texts)
        found = [(PROMPT_EMBEDDINGS, Condition(OF_TEXTS, text, shown, known)) for text in texts]
        # For its latents each picture is encoded alone, as the blocks do.
        for number, one in enumerate(images, 1):
            size = None
            if self.card.fits_kept and job.outside and number == job.outside.kept_source:
                size = Size(job.size.height, job.size.width)
            found.append((SOURCE_IMAGES, Condition(OF_PICTURES, None, (one,), options, size)))
        return found

    def encoding_key(self, item: Condition, choice: ModelChoice, dtype: str, device: str) -> str:
        # Files count by their bytes, not by their names; only the VAE works in tiles.
        of_texts = self.layout.components.keys() - {"transformer", "scheduler", "vae"}
        brought = {"size": str(item.size)} if item.size else {}
        return self.layout.encoding_key(
            dtype,
            device,
            stage=item.stage,
            text=item.text,
            images=[view.digest_of(sha256) for view, sha256 in item.images],
            options=item.options,
            files=[
                self.layout.identity_of(name) for name in sorted(of_texts if item.text else {"vae"})
            ],
            tiled=bool(choice.vae_use_tiling) and not item.text,
            **brought,
        )

    def activations(self, job: ImageJob, config: RunConfig) -> tuple[int, int, int]:
        """Sources count as squares of the model's base size, unless an edit has its source's."""
        base, choice = self.card.base_size, config.model
        sizes = [Size(base, base)] * len(job.images)
        pixels = picture_work(job.parts[0], self.card).pixels
        if canvas := self.kind.canvas(job):
            sizes, pixels = [canvas.size], canvas.size.height * canvas.size.width
        tokens = self.count(job, sizes, 0)
        rows = max(tokens.step_rows, tokens.positive)
        if self.kind.joins_branches and self.kind.is_guided(job):
            rows *= 2
        if self.kind.prefix:  # in the step that makes its K/V, attention copies its rows
            rows = rows * 7 // 5
        pictures = job.layers or 1
        is_tiled = bool(choice.vae_use_tiling)
        step, decode = activations(self.layout, rows, pixels, pictures, is_tiled=is_tiled)
        a_step, later = self._prefix_rows(job, sizes, config)
        per_row = self.card.kv_bytes_per_token
        return self._text_bytes(job), step + a_step * per_row, decode + later * per_row

    def _text_bytes(self, job: ImageJob) -> int:
        """Return the activations of the job's longest text, in 16 bits."""
        if not self.kind.text_row_bytes:
            return self.kind.text_bytes
        texts = [job.prompt, job.negative_prompt][: self.card.branches(job)]
        return self.kind.text_row_bytes * max(map(text_rows(self.layout.folder), texts))

    def batch_key(self, job: ImageJob) -> Hashable | None:
        return batch_key(self.kind, self.card, job)

    def _prefix_rows(
        self, job: ImageJob, sizes: Sequence[Size], config: RunConfig
    ) -> tuple[int, int]:
        """Return the rows whose K/V are kept during the job's steps, and after them.

        Segments are kept for other jobs, and joined for this one. On a GPU, branches share the
        pictures'.
        """
        branches, machine = self._branches(job, sizes), config.model.machine
        is_on_gpu = config.model.kind(has_gpu=machine is not None and machine.has_gpu) == "cuda"
        pictures = [one.pictures for one in branches]
        kept = max(pictures) if is_on_gpu else sum(pictures)
        kept += sum(one.text for one in branches)
        most = config.batch.prefix_cache_mb * 1_000_000
        if not config.reuse.kv_reuse or kept * self.card.kv_bytes_per_token > most:
            return sum(one.prefix for one in branches), 0
        return kept + sum(one.prefix for one in branches if one.pictures and one.text), kept

    def find_rewriter(self) -> None:
        if self.kind.rewrites:
            find_rewriter(self.layout)

    def load_rewriter(self, choice: ModelChoice) -> "PromptRewriter":
        require("diffusers")
        from hyimg_cli.models.diffusers_image.rewriter.model import PromptRewriter

        files = find_rewriter(self.layout)
        refuse_wrong_rewriter(files)
        return PromptRewriter(files, choice)

    def load(self, choice: ModelChoice, **_: object) -> "LatentImageModel":  # type: ignore[override]
        require("diffusers")
        from hyimg_cli.models.diffusers_image.model import LatentImageModel
        from hyimg_cli.models.diffusers_video.weights import check_all

        parameter_count = check_all(self.layout)
        freeze_libraries("diffusers")
        return LatentImageModel(self, choice, parameter_count)


def shifted(scheduler: Config, shift: float) -> dict[str, float | None]:
    """Return the changes that a flow shift makes to a scheduler's configuration.

    One that shifts by the picture's size gets the same shift at every size, and no terminal shift,
    as the authors of Qwen-Image's Lightning do.
    """
    if not scheduler.flag("use_dynamic_shifting", False):
        return {"shift": shift}
    if shift == _BY_SIZE:
        return {}
    return dict.fromkeys(("base_shift", "max_shift"), math.log(shift)) | {"shift_terminal": None}


def _refuse_unsupported(layout: CheckpointLayout, kind: LibraryPipeline) -> None:
    """Raise CheckpointError for a checkpoint that cannot be run."""
    refuse_quantized(layout)
    for name, expected in kind.built_in.items():
        found = layout.index.values.get(name, expected)
        if found != expected:
            raise layout.index.fault(name, found, f"{expected}, as in diffusers' blocks")
    transformer = layout.components[TRANSFORMER]
    for name, expected in kind.of_transformer.items():
        if (found := transformer.config().values.get(name, False)) != expected:
            raise transformer.config().fault(name, found, f"{expected}, as {layout.family} needs")
    for part in layout.components.values():
        if part.has_weights and part.config().has("auto_map"):
            hint = "use a version without auto_map: a checkpoint's code is never executed"
            what = f"the {part.name} needs its own code"
            raise checkpoint.fault("code", what, part.folder, hint)


def _refuse_wrong(folder: Path, *weights: Path) -> None:
    require("diffusers")
    from hyimg_cli.models.diffusers_video.weights import check_all, check_readers  # imports torch

    layout = EditorFolder(folder, "", *weights).layout
    check_all(layout)
    check_readers(layout)


def _is_loaded(kind: LibraryPipeline, component: str, path: str) -> bool:
    """Return False for a text encoder's head and last layers, which the blocks never read."""
    if not component.startswith("text_encoder"):
        return True
    layer = _TEXT_LAYER.match(path)
    is_last = layer is not None and 0 < kind.text_layers <= int(layer[1])
    return not (is_last or _HEAD.match(path))


def _card(layout: CheckpointLayout, kind: LibraryPipeline, model: str) -> ModelCard:
    own = Config.read(layout.folder / "card.json", is_optional=True)
    base_size = own.count("base_size", kind.base_size)
    sides = [(side, side) for side in kind.edit_sides] or _SIDES
    networks = Networks(**stored_networks(layout, partial(_is_loaded, kind)))
    scheduler = layout.components["scheduler"].config()
    name, is_trained = own.text("name", layout.folder.name), own.flag("trained", True)
    if (file := layout.components[TRANSFORMER].weights) is not None:
        name = file.path.name
    licence = licence_of(layout) if is_trained else ""
    # A layered picture's source has the size of its layers.
    of_reference = _REFERENCE_PIXELS * (kind.scales_pictures and not kind.layers)
    if file is not None and licence != NON_COMMERCIAL:
        licence = UNKNOWN  # the README is of the components
    return ModelCard(
        model=model,
        family="diffusers_image",
        name=name,
        is_trained=is_trained,
        licence=licence,
        made_as=made_as(layout),
        is_distilled=kind.is_distilled,
        buckets=tuple(Bucket(number, Size(*size)) for number, size in enumerate(sides)),
        pixels_per_cell=8,
        source_vit_tokens=0,
        kv_bytes_per_token=kv_bytes(layout) if kind.prefix else 0,
        weight_bytes=networks.weight_bytes,
        max_positions=1 << 20,
        vocab_size=0,
        size_multiple=kind.multiple,
        has_graphs=False,
        base_size=base_size,
        networks=networks,
        guides=kind.is_guided,
        # Rows that are kept from step to step count once.
        reference_pixels=of_reference if kind.most and not kind.prefix else None,
        fewest_images=kind.fewest,
        most_images=kind.most,
        # hyimg brings the source of a network that sees none to the size of the result.
        keeps_small=not (kind.most and kind.scales_pictures),
        fits_kept=kind.fits_kept or not kind.most,
        inpaints=not kind.layers,
        joins_jobs=not kind.prefix,
        edit_shape="square" if kind.squares else "source",
        rewrites=kind.rewrites,
        follows=kind.follows,
        reasons={"negative_prompt": kind.no_negative},
        size_by_source=partial(size_by_source, kind),
        edit_sides=kind.edit_sides,
        defaults=SamplingDefaults(
            num_inference_steps=kind.steps,
            guidance_scale=kind.guidance,
            flow_shift=_BY_SIZE
            if scheduler.flag("use_dynamic_shifting", False)
            else scheduler.number("shift", 1.0, above=0),
            **NO_TEXT,
            negative_prompt=kind.negative or "",
            layers=kind.layers or None,
        ),
    )


FAMILY = Family(
    name="diffusers_image",
    makes="pictures",
    # Other pipelines of the library are refused by name, unless they make videos.
    marks=lambda folder: pipeline_name(folder) not in ("", *VIDEO_PIPELINES),
    open=EditorFolder,
    takes_weights=True,
    fingerprint=lambda folder, *weights: read_layout(folder, *weights).fingerprint(
        file_digest(checkpoint.parts_index(folder))
    ),
    tensors=lambda folder, *weights: read_layout(folder, *weights).tensors(),
    check_headers=lambda folder, *weights: check_headers(read_layout(folder, *weights)),
    weights=lambda folder: read_layout(folder).weights(),
    refuse_wrong=_refuse_wrong,
)
