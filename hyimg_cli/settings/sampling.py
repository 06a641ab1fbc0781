"""Settings of jobs: what holds where a manifest line says nothing."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from annotated_types import Interval

from hyimg_cli.settings.kinds import (
    MAX_SEED,
    NEGATIVE_PROMPT,
    SIZE,
    SPAN,
    STEP_CACHE,
    Aliases,
    text,
)
from hyimg_cli.settings.option import CHECKPOINT, option
from hyimg_cli.settings.panels import OUTSIDE, SAMPLING, VIDEO
from hyimg_cli.settings.paths import LORAS, REGION
from hyimg_cli.spec.job import (
    MAX_SOURCE_IMAGES,
    BotTask,
    Fit,
    Lora,
    OnGlobal,
    RegionMode,
    SizeRequest,
)
from hyimg_cli.spec.step_cache import StepCache

SystemPrompt = Literal[
    "None", "en_vanilla", "en_recaption", "en_think_recaption", "en_unified", "dynamic", "custom"
]
Vary = Literal["picture", "text", "both"]
Renorm = Literal["global", "channel", "text_channel", "none"]
# About seven minutes at 24 a second: beyond any model, so a slip of the pen.
MAX_FRAMES = 10001
MAX_FPS = 240

_of_job = partial(option, in_line=True, pixels="job")
_sampling = partial(_of_job, panel=SAMPLING)
_text = partial(_sampling, only="pictures")
_video = partial(_of_job, panel=VIDEO, only="videos")
_outside = partial(_of_job, panel=OUTSIDE, only="pictures")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a job is sampled. None of what a checkpoint may say: as that says."""

    size: SizeRequest = _sampling(SizeRequest(), "Of the result.", SIZE, is_basic=True)
    num_inference_steps: int | None = _sampling(
        CHECKPOINT,
        "Denoise steps.",
        Interval(ge=1, le=1000),
        is_basic=True,
        flags=("--num-inference-steps", "--steps"),
        aliases=("steps",),
    )
    guidance_scale: float | None = _sampling(
        CHECKPOINT, "How hard the prompt pulls.", Interval(ge=0, le=100)
    )
    flow_shift: float | None = _sampling(
        CHECKPOINT, "Shift of the noise schedule.", Interval(gt=0, le=100)
    )
    step_cache: StepCache | None = _sampling(
        None,
        "Lossy: between full denoise steps estimate what the model would say: "
        "taylor:interval=3,order=1,first=3,tail=1, or none.",
        STEP_CACHE,
    )
    seed: int | None = _sampling(
        None, "Seed of jobs without one of their own.", Interval(ge=0, le=MAX_SEED), is_basic=True
    )
    n: int = _sampling(
        1,
        "Number of results of a line.",
        Interval(ge=1, le=1000),
        aliases=("num_outputs_per_prompt",),
    )
    vary: Vary = _text("both", "What the results of a line differ in, by their seeds.")
    bot_task: BotTask | None = _text(
        CHECKPOINT,
        "Text before the picture.",
        Aliases({"auto": "none", "image": "none"}),
        is_basic=True,
    )
    drop_think: bool | None = _text(
        CHECKPOINT, "Denoise without the think text.", flags=("--drop-think/--keep-think",)
    )
    use_system_prompt: SystemPrompt | None = _text(CHECKPOINT, "Which system prompt.")
    system_prompt: str | None = _text(None, "Text for the custom one.", text("system prompt"))
    ar_seed: int | None = _text(None, "Seed of the text stage.", Interval(ge=0, le=MAX_SEED))
    temperature: float | None = _text(
        CHECKPOINT, "Text stage; 0 is greedy.", Interval(ge=0, le=100)
    )
    top_k: int | None = _text(CHECKPOINT, "Text stage; 0 is off.", Interval(ge=0, le=2**31 - 1))
    top_p: float | None = _text(CHECKPOINT, "Text stage; 1 is off.", Interval(gt=0, le=1))
    max_new_tokens: int | None = _text(
        CHECKPOINT, "Longest text to write.", Interval(ge=1, le=65536)
    )
    image_guidance_scale: float | None = _text(
        CHECKPOINT,
        "How hard source images pull; BAGEL. Up to 1: not apart from the prompt.",
        Interval(ge=0, le=100),
    )
    guidance_interval: tuple[float, float] | None = _text(
        CHECKPOINT, "Noise levels that are guided, the lower one left out: 0.4,1; BAGEL.", SPAN
    )
    guidance_renorm: Renorm | None = _text(CHECKPOINT, "How guidance is kept from growing; BAGEL.")
    guidance_renorm_min: float | None = _text(
        CHECKPOINT,
        "How much of its length guidance keeps at least; 1 is renorm none; BAGEL.",
        Interval(ge=0, le=1),
    )
    infer_align_image_size: bool = _text(False, "Edits get their source's aspect ratio.")
    negative_prompt: str = _video("", "What the video should not show.", NEGATIVE_PROMPT)
    num_frames: int | None = _video(
        CHECKPOINT, "Frames of a video, 4 k + 1.", Interval(ge=1, le=MAX_FRAMES)
    )
    fps: int | None = _video(CHECKPOINT, "Frames a second in the file.", Interval(ge=1, le=MAX_FPS))
    fit: Fit | None = _video(
        None, "How an i2v picture gets the video's shape. Default: as the model's authors do it."
    )
    lora: tuple[Lora, ...] | None = _video(
        None,
        "LoRA files: FILE[@WEIGHT], for two transformers high=FILE;low=FILE. Needs peft.",
        LORAS,
    )
    scheduler: Literal["euler"] | None = _video(
        None,
        "euler: the steps that four- and eight-step models were distilled to. Default: the "
        "checkpoint's own.",
    )
    guidance_scale_2: float | None = _video(
        CHECKPOINT, "Guidance of the second of two transformers.", Interval(ge=0, le=100), panel=""
    )


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Whether and how an edit keeps its source outside."""

    keep_outside: bool = _outside(
        False, "Edits in their source's size, every pixel outside the edit equal to it."
    )
    kept_source: int = _outside(
        1, "Of several sources the one kept.", Interval(ge=1, le=MAX_SOURCE_IMAGES)
    )
    region: str | None = _outside(
        None, "Where edits may be (source pixels): implies keep_outside.", REGION
    )
    region_mode: RegionMode = _outside("limit", "The region limits what is found, or stands.")
    on_global: OnGlobal = _outside("keep", "What becomes of an edit of all the picture.")
    max_outside_change: float | None = _outside(
        None, "Gate: mean distance (CIE76) of the result outside the edit.", Interval(ge=0, le=100)
    )
    max_edited_area: float | None = _outside(
        None, "Gate: part of the picture that was edited.", Interval(ge=0, le=1)
    )
    max_spill: float | None = _outside(
        None, "Gate: part of the edit outside the region.", Interval(ge=0, le=1)
    )
