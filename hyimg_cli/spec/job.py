"""One picture or one video to make, fully resolved: nothing is left to a default further down."""

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from hyimg_cli.spec.step_cache import StepCache

Task = Literal["it2i", "t2i"]
VideoTask = Literal["t2v", "i2v"]
AnyTask = Literal[Task, VideoTask]
BotTask = Literal["none", "think", "recaption", "think_recaption"]
Format = Literal["png", "jpeg", "webp"]
RegionMode = Literal["limit", "instead"]
OnGlobal = Literal["keep", "fail"]
# How a picture becomes a frame of another shape: its aspect ratio goes, or its edges.
Fit = Literal["stretch", "crop"]
TASKS: tuple[Task, ...] = ("it2i", "t2i")
VIDEO_TASKS: tuple[VideoTask, ...] = get_args(VideoTask)
BOT_TASKS: tuple[BotTask, ...] = ("none", "think", "recaption", "think_recaption")
FORMATS: tuple[Format, ...] = get_args(Format)
REGION_MODES: tuple[RegionMode, ...] = get_args(RegionMode)
ON_GLOBAL: tuple[OnGlobal, ...] = get_args(OnGlobal)
FITS: tuple[Fit, ...] = get_args(Fit)
MAX_SOURCE_IMAGES = 3
# Read by some models only.
GUIDANCE_FIELDS = (
    "image_guidance_scale",
    "guidance_interval",
    "guidance_renorm",
    "guidance_renorm_min",
)
# Of a file of camera poses, and the name of the file beside it.
POSES_SUFFIX = ".npy"
INTRINSICS = f"intrinsics{POSES_SUFFIX}"
# Its name is its id.
BY_ID = "{custom_id}"
_SUFFIXES: dict[Format, str] = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}


@dataclass(frozen=True, slots=True)
class Size:
    """Height and width in pixels, in that order."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """A size as a job asks for it: `auto` (the model chooses), or a height and width to be matched.

    `W:H` ratios are kept as height and width; the model's nearest bucket by ratio replaces both.
    A video's pixels are its own, so there `is_ratio` tells `16:32` from `16x32`.
    """

    height: int = 0
    width: int = 0
    is_ratio: bool = field(default=False, compare=False)

    @property
    def is_auto(self) -> bool:
        return self.height == 0

    def __str__(self) -> str:
        return "auto" if self.is_auto else f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class TextSampling:
    """How the AR stage picks tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Encoding:
    """How pixels become a file. `quality`: 1 to 100, None where nothing of them is lost."""

    format: Format = "png"
    quality: int | None = None

    @property
    def suffix(self) -> str:
        return _SUFFIXES[self.format]

    @property
    def is_lossless(self) -> bool:
        return self.quality is None


@dataclass(frozen=True, slots=True)
class TextInputs:
    """All of a job that decides the text it writes, but its bucket and what is in its files.

    Of a greedy text there is no seed, nor what only a choice by chance looks at.
    """

    model: str
    prompt: str
    images: tuple[str, ...]
    is_aligned: bool
    use_system_prompt: str
    system_prompt: str | None
    bot_task: BotTask
    chooses_size: bool
    sampling: TextSampling
    seed: int


@dataclass(frozen=True, slots=True)
class KeepOutside:
    """How a redraw is put back on its source, which stays equal outside the edit.

    `kept_source`: which of the job's images, from 1; it decides what is drawn. The rest is done
    behind the drawing: `region` is a box "x0,y0,x1,y1" or the path of a mask, in the source's
    pixels, by `region_mode` a limit to the edit that is found or taken instead of it. The others
    are gates: a picture beyond them is kept and told.
    """

    kept_source: int = 1
    region: str = ""
    region_mode: RegionMode = "limit"
    on_global: OnGlobal = "keep"
    max_outside_change: float | None = None
    max_edited_area: float | None = None
    max_spill: float | None = None

    @property
    def box(self) -> tuple[int, int, int, int] | None:
        """The region's left, top, right and bottom; None where it is a mask or nothing."""
        parts = self.region.split(",")
        if len(parts) != 4 or not all(part.isdecimal() for part in parts):
            return None
        left, top, right, bottom = map(int, parts)
        return left, top, right, bottom

    @property
    def mask(self) -> str:
        """The path of the region's mask; empty where it has none."""
        return "" if self.box else self.region


# What of them changes no drawing: the finishing is done again, and no more.
FINISHING = tuple(field.name for field in fields(KeepOutside) if field.name != "kept_source")


@dataclass(frozen=True, slots=True)
class ImageJob:
    """One `it2i` or `t2i` picture. `images` are paths as given, resolved against the manifest.

    `GUIDANCE_FIELDS` are None for a model that reads none. `cot_text` or `cot_token_ids` replace
    the AR stage's writing; `written_json` is what was noted of these ids when they were written,
    empty where nothing was. `infer_align_image_size`: sources are resized to the model's sizes,
    not cut, and a picture of the same size gets its source's aspect ratio. `outside`: it is put
    back on its source. `file_name`: a template, see `settings.file_names`. `user_fields` names the
    manifest fields that the user set for this job: one that no stage consumes is an error.
    """

    custom_id: str
    task: Task
    prompt: str
    images: tuple[str, ...]
    model: str
    seed: int
    size: SizeRequest
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float
    bot_task: BotTask
    text: TextSampling
    ar_seed: int = 0
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    written_json: str = ""
    drop_think: bool = False
    infer_align_image_size: bool = False
    outside: KeepOutside | None = None
    use_system_prompt: str = "None"
    system_prompt: str | None = None
    encoding: Encoding = Encoding()
    image_guidance_scale: float | None = None
    guidance_interval: tuple[float, float] | None = None
    guidance_renorm: str | None = None
    guidance_renorm_min: float | None = None
    step_cache: StepCache | None = None
    file_name: str = BY_ID
    metadata_json: str = "null"
    extra_json: str = "{}"
    source_line: str = ""
    user_fields: frozenset[str] = frozenset()

    @property
    def writes_text(self) -> bool:
        """True if the AR stage has text to write for this job."""
        return self.bot_task != "none" and not self.has_given_text

    @property
    def has_given_text(self) -> bool:
        """True if the text before the picture is the job's own."""
        return self.cot_text is not None or self.cot_token_ids is not None

    @property
    def kept_image(self) -> str:
        """The path of the source that stays equal outside the edit."""
        assert self.outside is not None, "the job keeps what is outside an edit"
        return self.images[self.outside.kept_source - 1]

    @property
    def text_inputs(self) -> TextInputs | None:
        """Inputs that decide the job's text; None where it writes none. Jobs of one bucket with
        equal ones write the same text, as long as their sources' files stay as they are.
        """
        if not self.writes_text:
            return None
        text = self.text
        greedy = TextSampling(0.0, 0, 1.0, text.max_new_tokens)
        return TextInputs(
            model=self.model,
            prompt=self.prompt,
            images=self.images,
            is_aligned=self.infer_align_image_size and bool(self.images),
            use_system_prompt=self.use_system_prompt,
            system_prompt=self.system_prompt,
            bot_task=self.bot_task,
            chooses_size=self.size.is_auto,
            sampling=text if text.temperature else greedy,
            seed=self.ar_seed if text.temperature else 0,
        )


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA by its file's path or hub name, how much of it, and on which of two transformers
    (Wan 2.2), empty where there is one. Without a file: none on this one.
    """

    file: str
    weight: float = 1.0
    on: str = ""

    def __str__(self) -> str:
        where = f"{self.on}=" if self.on else ""
        return f"{where}{self.file or 'none'}" + ("" if self.weight == 1 else f"@{self.weight:g}")


@dataclass(frozen=True, slots=True)
class VideoJob:
    """One `t2v` or `i2v` video. `size` in pixels and `num_frames` are what the file will hold.

    `images` are paths of the first frame of an `i2v`, or of its first and its last; `fit` is how
    they become frames of `size`, None without images. `scheduler`: one that stands in for the
    checkpoint's. `negative_prompt` is only used where `guidance_scale` is not 1. `guidance_scale_2`
    is for models of two transformers (Wan 2.2), None elsewhere. `camera`: the path that it follows,
    a file of poses or keys, empty for a model that follows none.
    """

    custom_id: str
    task: VideoTask
    prompt: str
    negative_prompt: str
    model: str
    seed: int
    size: Size
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float
    guidance_scale_2: float | None = None
    images: tuple[str, ...] = ()
    fit: Fit | None = None
    lora: tuple[Lora, ...] = ()
    scheduler: Literal["euler"] | None = None
    camera: str = ""
    step_cache: StepCache | None = None
    file_name: str = BY_ID
    metadata_json: str = "null"
    extra_json: str = "{}"
    source_line: str = ""
    user_fields: frozenset[str] = frozenset()

    @property
    def branch_count(self) -> int:
        """Forwards in a denoise step: at scale 1 the unconditional branch would not count.

        Scales below 1 that a model takes for none are refused with the line.
        """
        return 1 if self.guidance_scale == 1 else 2

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that are embedded for it."""
        return (self.prompt,) if self.branch_count == 1 else (self.prompt, self.negative_prompt)

    @property
    def camera_files(self) -> tuple[str, ...]:
        """Paths of the camera's poses and of its intrinsics beside them; none of keys."""
        if not self.camera.endswith(POSES_SUFFIX):
            return ()
        folder, slash, _ = self.camera.rpartition("/")
        return self.camera, f"{folder}{slash}{INTRINSICS}"


Job = ImageJob | VideoJob
