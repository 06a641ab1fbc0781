"""One picture or one video to make, fully resolved: nothing is left to a default further down."""

import json
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from hyimg_cli.spec import options as o

Task = Literal["it2i", "t2i"]
VideoTask = Literal["t2v", "i2v"]
AnyTask = Literal[Task, VideoTask]
Format = Literal["png", "jpeg", "webp"]
TASKS: tuple[Task, ...] = ("it2i", "t2i")
VIDEO_TASKS: tuple[VideoTask, ...] = get_args(VideoTask)
FORMATS: tuple[Format, ...] = get_args(Format)
# Read by some models only.
GUIDANCE_FIELDS = tuple(one.name for one in fields(o.PictureOptions) if "guidance" in one.name)
# Of a file of camera poses, and the name of the file beside it.
POSES_SUFFIX = ".npy"
INTRINSICS = f"intrinsics{POSES_SUFFIX}"
# Its name is its id.
BY_ID = "{custom_id}"


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
class Encoding:
    """How pixels become a file. `quality`: 1 to 100, None where nothing of them is lost."""

    format: Format = "png"
    quality: int | None = None

    @property
    def suffix(self) -> str:
        return ".jpg" if self.format == "jpeg" else f".{self.format}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which line a candidate is one of several results of, and of which job a draft is.

    `candidate`: its number in the line, from 0; `round`: of draws, from 1. `draft_of`: the id of
    the job in full. Empty: a job of its own, in full.
    """

    candidate_of: str = ""
    candidate: int = 0
    round: int = 1
    draft_of: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields of a resolved line and of a result line; those that say nothing are absent."""
        found: dict[str, Any] = {}
        if self.candidate_of:
            found = {"candidate_of": self.candidate_of, "candidate": self.candidate}
        if self.round > 1:
            found["round"] = self.round
        return found | ({"draft_of": self.draft_of} if self.draft_of else {})


ALONE = Lineage()
LINEAGE = tuple(one.name for one in fields(Lineage))


@dataclass(frozen=True, kw_only=True)
class _Line(o.JobOptions):
    """What a job of either kind has of its line.

    `images` are paths, from the working folder. `file_name`: a template, see `settings.file_names`.
    `user_fields` names the manifest fields that the user set for this job: one that no stage
    consumes is an error.
    """

    __slots__ = ()

    custom_id: str
    prompt: str
    model: str
    images: tuple[str, ...] = ()
    file_name: str = BY_ID
    metadata_json: str = "null"
    extra_json: str = "{}"
    source_line: str = ""
    user_fields: frozenset[str] = frozenset()
    lineage: Lineage = ALONE

    def copied(self) -> dict[str, Any]:
        """Return the fields of a result line that are the job's own, whatever its end."""
        own = {"metadata": json.loads(self.metadata_json), "extra": json.loads(self.extra_json)}
        return own | self.lineage.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageJob(o.PictureOptions, _Line):
    """One `it2i` or `t2i` picture.

    `cot_text` or `cot_token_ids` replace the AR stage's writing; `written_json` is what was noted
    of these ids when they were written, empty where nothing was. `outside`: it is put back on its
    source.
    """

    task: Task
    size: SizeRequest
    text: o.TextSampling
    ar_seed: int = 0
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    written_json: str = ""
    drop_think: bool = False
    use_system_prompt: o.SystemPrompt = "None"
    outside: o.KeepOutside | None = None
    encoding: Encoding = Encoding()

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
        assert self.outside is not None, "the job keeps the source outside the edit"
        return self.images[self.outside.kept_source - 1]

    @property
    def text_inputs(self) -> Hashable | None:
        """All of the job that decides the text it writes, but its bucket and what is in its files;
        None where it writes none. A greedy text has neither a seed nor what only a choice by chance
        looks at.
        """
        if not self.writes_text:
            return None
        text, is_greedy = self.text, not self.text.temperature
        return (
            self.model,
            self.prompt,
            self.images,
            self.infer_align_image_size and bool(self.images),
            self.use_system_prompt,
            self.system_prompt,
            self.bot_task,
            self.size.is_auto,
            o.TextSampling(0.0, 0, 1.0, text.max_new_tokens) if is_greedy else text,
            0 if is_greedy else self.ar_seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoJob(o.VideoOptions, _Line):
    """One `t2v` or `i2v` video. `size` in pixels and `num_frames` are what the file will hold.

    `images` are paths of the first frame of an `i2v`, or of its first and its last. `camera`: the
    path that it follows, a file of poses or keys, empty for a model that follows none.
    """

    task: VideoTask
    size: Size
    camera: str = ""

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
