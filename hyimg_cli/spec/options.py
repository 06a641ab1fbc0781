"""Settings that a job has for itself, each declared once, as a field of the job.

From a declaration follow its flag, variable, key of a recipe and of a manifest line, help and
schema, the value in the job, and its part of the resume key. None means the checkpoint's own value;
a job has the value itself.
"""

import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal, NewType, get_args

from annotated_types import Interval

from hyimg_cli.spec.step_cache import StepCache

# Panels in the help.
RUN, MODEL, SAMPLING, VIDEO = "Run", "Model", "Sampling defaults", "Video (t2v, i2v)"
CANDIDATES = "Candidates"
OUTSIDE = "Edits that change nothing else"
# The default is the job's checkpoint's own, if nothing else sets it.
CHECKPOINT = object()


def option(default: Any, help: str, **declared: Any) -> Any:
    """Return a field that is a setting.

    Its annotation says what it may hold; `declared` are the further fields of
    `settings.table.Declaration`.
    """
    row = {"help": help, "default": None if default is MISSING else default, **declared}
    value = None if default is CHECKPOINT else default
    return field(default=value, metadata={"setting": row})


BotTask = Literal["none", "think", "recaption", "think_recaption"]
SystemPrompt = Literal[
    "None", "en_vanilla", "en_recaption", "en_think_recaption", "en_unified", "dynamic", "custom"
]
Renorm = Literal["global", "channel", "text_channel", "none"]
# How a picture becomes a frame of another shape: stretch it, or crop its edges.
Fit = Literal["stretch", "crop"]
# Boxes in pixels of the source with ; between them, or the path of a mask; its alpha channel is the
# mask after `transparent:` or `opaque:`.
Region = NewType("Region", str)
# Left, top, right and bottom in pixels.
Box = tuple[int, int, int, int]
_BOXES = re.compile(r"([0-9]+(,[0-9]+){3})(;[0-9]+(,[0-9]+){3})*")
_MASK = re.compile(r"(?:(transparent|opaque):)?(.*)", re.DOTALL)
BOT_TASKS: tuple[BotTask, ...] = get_args(BotTask)
# The limit of the model with the highest; each model's own is on its card.
MAX_SOURCE_IMAGES = 12
MAX_SEED = 2**63 - 1
# A typing error beyond: each layer takes the rows of a picture.
MAX_LAYERS = 20
Seed = Annotated[int, Interval(ge=0, le=MAX_SEED)]
Scale = Annotated[float, Interval(ge=0, le=100)]
Part = Annotated[float, Interval(ge=0, le=1)]

_of_job = partial(option, in_line=True, pixels="job")
sampling_option = partial(_of_job, panel=SAMPLING)
_picture = partial(sampling_option, only="pictures")
# The default depends on a picture's checkpoint.
_checkpoint = partial(_picture, CHECKPOINT)
_text = partial(_checkpoint, only="text")
_video = partial(_of_job, panel=VIDEO, only="videos")
outside_option = partial(_of_job, panel=OUTSIDE, only="pictures")
_gate = partial(outside_option, None, commands=("eval",))


def box_text(box: Iterable[int]) -> str:
    """Return a box as a line has it: LEFT,TOP,RIGHT,BOTTOM."""
    return ",".join(map(str, box))


def boxes_text(boxes: Iterable[Box]) -> str:
    """Return boxes as the region of a line has them, with ; between them."""
    return ";".join(map(box_text, boxes))


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA: its file's path or hub name, its scale, and one of two transformers.

    The transformer is empty if there is only one. Without a file: no LoRA on this transformer.
    """

    file: str
    weight: float = 1.0
    on: str = ""

    def __str__(self) -> str:
        where = f"{self.on}=" if self.on else ""
        return f"{where}{self.file or 'none'}" + ("" if self.weight == 1 else f"@{self.weight:g}")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of both pictures and videos."""

    # NOTE: each job class defines the slots, so that a million jobs stay small.
    __slots__ = ()

    num_inference_steps: Annotated[int, Interval(ge=1, le=1000)] = sampling_option(
        CHECKPOINT,
        "Number of denoise steps.",
        is_basic=True,
        flags=("--num-inference-steps", "--steps"),
        aliases=("steps",),
    )
    guidance_scale: Scale = sampling_option(CHECKPOINT, "Guidance strength of the prompt.")
    flow_shift: Annotated[float, Interval(gt=0, le=100)] = sampling_option(
        CHECKPOINT, "Shift of the noise schedule."
    )
    step_cache: StepCache | None = sampling_option(
        None,
        "Estimate denoise steps between full ones (lossy).",
    )
    lora: tuple[Lora, ...] = sampling_option(
        (),
        "Apply LoRA files: FILE[@WEIGHT], separated by semicolons; high=FILE;low=FILE for a "
        "model of two transformers. Needs peft.",
        only="latents",
    )
    seed: Seed = sampling_option(None, "Seed of jobs without one.", is_basic=True)
    # Only some models read it, and only with guidance.
    negative_prompt: str = sampling_option("", "What the result should not show.", only="negative")


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """Options of pictures only. Options of guidance are None for a model that reads none."""

    __slots__ = ()

    bot_task: BotTask = _checkpoint(
        "Text to write before drawing.", spellings={"auto": "none", "image": "none"}, is_basic=True
    )
    drop_think: bool = _text(
        "Denoise without the think text, or with it.", flags=("--drop-think/--keep-think",)
    )
    use_system_prompt: SystemPrompt = _checkpoint("System prompt to use.")
    system_prompt: str | None = _picture(None, "Text of the custom system prompt.")
    ar_seed: Seed = _picture(None, "Seed of the text stage. Default: the job's seed.", only="text")
    image_guidance_scale: Scale | None = _checkpoint(
        "Separate guidance strength for source images; off up to 1."
    )
    guidance_interval: tuple[float, float] | None = _checkpoint(
        "Guide only noise levels above LOW and up to HIGH, for example 0.4,1."
    )
    guidance_renorm: Renorm | None = _checkpoint("How to limit the norm of the guided prediction.")
    guidance_renorm_min: Part | None = _checkpoint(
        "Minimum fraction of the norm to keep; 1 turns renormalization off."
    )
    # Sources are then resized to the model's sizes, not cropped; only a picture of the same size as
    # its source gets its aspect ratio.
    infer_align_image_size: bool = _picture(False, "Give edits the aspect ratio of their source.")
    # None for a model that draws one picture.
    layers: Annotated[int, Interval(ge=1, le=MAX_LAYERS)] | None = _checkpoint(
        "Number of transparent layers to draw."
    )


@dataclass(frozen=True, slots=True)
class TextSampling:
    """How the AR stage picks tokens."""

    temperature: Scale = _text("Sampling temperature of the text stage; 0 is greedy.")
    top_k: Annotated[int, Interval(ge=0, le=2**31 - 1)] = _text(
        "Sample text from the K most likely tokens; 0 turns this off."
    )
    top_p: Annotated[float, Interval(gt=0, le=1)] = _text(
        "Sample text from the most likely tokens that add up to P; 1 turns this off."
    )
    max_new_tokens: Annotated[int, Interval(ge=1, le=65536)] = _text(
        "Maximum length of the text, in tokens."
    )


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """Options of videos only."""

    __slots__ = ()

    # More than seven minutes at 24 frames a second: no model can do it, so it is a typing error.
    num_frames: Annotated[int, Interval(ge=1, le=10001)] = _video(
        CHECKPOINT, "Number of frames, 4 k + 1."
    )
    fps: Annotated[int, Interval(ge=1, le=240)] = _video(
        CHECKPOINT, "Frames per second of the file."
    )
    # None without source pictures.
    fit: Fit | None = _video(
        None,
        "Stretch or crop an i2v start image to the video's shape. Default: as the model's "
        "authors do.",
    )
    scheduler: Literal["euler"] | None = _video(
        None,
        "Use this scheduler instead of the checkpoint's; euler is for models distilled to 4 "
        "or 8 steps.",
    )
    # For models with two transformers (Wan 2.2), else None.
    guidance_scale_2: Scale | None = _video(
        CHECKPOINT,
        "Guidance strength in the second of two transformers.",
        panel="",
        only="pair",
    )


RegionMode = Literal["limit", "instead", "auto", "inpaint"]


@dataclass(frozen=True, slots=True)
class KeepOutside:
    """How a redraw is put back on its source, which stays equal outside the edit.

    `kept_source` and `strength` affect the drawing, and so does the region if the model draws only
    there. The gates are limits: a picture that exceeds one is kept and reported.
    """

    kept_source: Annotated[int, Interval(ge=1, le=MAX_SOURCE_IMAGES)] = outside_option(
        1, "Number of the source to keep, if a job has several."
    )
    region: Region = outside_option(
        Region(""),
        "Allow edits only in a box X0,Y0,X1,Y1 (in source pixels; several with ; between them), a "
        "mask, or a folder's masks that are named like the sources. Implies --keep-outside.",
        commands=("eval",),
    )
    region_mode: RegionMode = outside_option(
        "limit",
        "Limit the detected edit to the region, let the region replace it, or let the model draw "
        "only there (inpaint); auto: inpaint where the model can, else instead.",
        commands=("eval",),
    )
    strength: Annotated[float, Interval(gt=0, le=1)] = outside_option(
        1.0, "Fraction of the steps that inpainting takes; less keeps more of the source."
    )
    region_keeps: Literal["outside", "inside"] = outside_option(
        "outside",
        "What stays unchanged: everything outside the region, or everything inside it.",
        commands=("eval",),
    )
    on_global: Literal["keep", "fail"] = outside_option(
        "keep", "Keep or fail a result whose source was not kept: all of it was edited."
    )
    max_outside_change: Scale | None = _gate(
        "Gate: maximum mean colour difference (CIE76) outside the edit."
    )
    max_edited_area: Part | None = _gate("Gate: maximum fraction of the picture that is edited.")
    max_spill: Part | None = _gate("Gate: maximum fraction of the edit outside the region.")
    max_seam: Scale | None = outside_option(
        None, "Gate: maximum difference in colour at the edit's seam, in levels (CIE76)."
    )

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Return left, top, right and bottom of each box; empty if it is a mask or absent."""
        if not _BOXES.fullmatch(self.region):
            return ()
        sides = [tuple(map(int, box.split(","))) for box in self.region.split(";")]
        return tuple((left, top, right, bottom) for left, top, right, bottom in sides)

    @property
    def put_back(self) -> Literal["limit", "instead"]:
        """Return how the region and the detected edit decide what of the redraw is used."""
        return "limit" if self.region_mode == "limit" else "instead"

    @property
    def mask(self) -> str:
        """Return the path of the region's mask; empty if it has none."""
        return "" if self.boxes else _MASK.fullmatch(self.region)[2]  # type: ignore[index]

    @property
    def edits_where(self) -> str:
        """Return `transparent` or `opaque` if the mask's alpha channel decides; else empty."""
        return _MASK.fullmatch(self.region)[1] or ""  # type: ignore[index]


def _defaults(*parts: Any) -> dict[str, Any]:
    return {one.name: one.default for part in parts for one in fields(part)}


# The options of each kind of job by name, with the value that means "not set".
PICTURE_OPTIONS = _defaults(PictureOptions, JobOptions)
VIDEO_OPTIONS = _defaults(VideoOptions, JobOptions)
TEXT_OPTIONS = _defaults(TextSampling)
# What several families follow. A card names all options that its model follows, so that a new one
# is refused, or reported, for every other model.
OF_STEPS = frozenset({"num_inference_steps", "guidance_scale", "flow_shift", "step_cache", "seed"})
OF_TEXT = frozenset({"bot_task", "ar_seed", "temperature", "top_k", "top_p", "max_new_tokens"})
OF_TEXT |= {"cot_text", "cot_token_ids", "ratio_index", "written", "choices"}
OF_VIDEOS = frozenset({"num_frames", "fps", "fit"})
# Options of an edit that do not change the drawing: only the finishing is repeated.
DRAWING = ("kept_source", "strength")
FINISHING = tuple(name for name in _defaults(KeepOutside) if name not in DRAWING)
