"""One picture or one video to make, fully resolved: later stages add no defaults."""

import json
from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal, Self, get_args

from hyimg_cli.spec import digest
from hyimg_cli.spec import options as o

Task = Literal["it2i", "t2i"]
TextTask = Literal["i2t", "t2t"]
VideoTask = Literal["t2v", "i2v"]
AnyTask = Literal[Task, TextTask, VideoTask]
Format = Literal["png", "jpeg", "webp"]
TASKS: tuple[Task, ...] = ("it2i", "t2i")
TEXT_TASKS: tuple[TextTask, ...] = get_args(TextTask)
VIDEO_TASKS: tuple[VideoTask, ...] = get_args(VideoTask)
FORMATS: tuple[Format, ...] = get_args(Format)
# Only some models read these.
GUIDANCE_FIELDS = tuple(one.name for one in fields(o.PictureOptions) if "guidance" in one.name)
# The suffix of a file of camera poses, and the name of the intrinsics file next to it.
POSES_SUFFIX = ".npy"
INTRINSICS = f"intrinsics{POSES_SUFFIX}"
# Extra files that an edit with `keep_outside` writes, by their keys in the line's `edit`. Of each
# drawing, the redraw and its reference.
EDIT_SUFFIXES = {
    "mask": ".mask.png",
    "plain": ".redraw.png",
    "shown": ".reference.png",
    "plain-2": ".redraw-2.png",
    "shown-2": ".reference-2.png",
    "touched": ".touched.png",
}
DRAWN_FILES = (("plain", "shown"), ("plain-2", "shown-2"))
# Crops of one source at most, each of which is a drawing.
MOST_CROPS = len(DRAWN_FILES)
ANSWER_SUFFIX = ".txt"
# The end of a layer's name, with its number, before the suffix.
LAYER_MARK = ".layer-{}"
# Named after its id.
BY_ID = "{custom_id}"


@dataclass(frozen=True, slots=True)
class Size:
    """Height and width in pixels, in this order."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class View:
    """What the model sees of a picture: all of it, or a crop that is resized to `size`.

    `crop`: left, top, right and bottom in pixels of the upright picture.
    """

    path: str
    crop: o.Box | None = None
    size: Size | None = None

    def __str__(self) -> str:
        return self.path if self.crop is None else f"{self.path} {self._part}"

    def digest_of(self, picture: str) -> str:
        """Return the digest of this view of the picture that has the digest `picture`."""
        return picture if self.crop is None else digest.of_bytes(f"{self._part} {picture}".encode())

    @property
    def _part(self) -> str:
        return f"crop {o.box_text(self.crop or ())} drawn at {self.size} of"


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """A size as a job asks for it: `auto` (the model chooses), or a height and width to match.

    A `W:H` ratio is kept as height and width; the model's bucket with the nearest ratio replaces
    both. A video's pixels are used as given, so `is_ratio` distinguishes `16:32` from `16x32`
    there.
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
    """How pixels become a file. `quality`: 1 to 100; None for a lossless format."""

    format: Format = "png"
    quality: int | None = None

    @property
    def suffix(self) -> str:
        return ".jpg" if self.format == "jpeg" else f".{self.format}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Origin of a candidate or a draft: its line, or the job in full.

    `candidate_of`: the line of which it is one of several results. `candidate`: its number in the
    line, from 0. `draft_of`: the id of the full job. Empty: an independent full job.
    """

    candidate_of: str = ""
    candidate: int = 0
    draft_of: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return its fields of a resolved line and of a result line; defaults are left out."""
        found: dict[str, Any] = {}
        if self.candidate_of:
            found = {"candidate_of": self.candidate_of, "candidate": self.candidate}
        return found | ({"draft_of": self.draft_of} if self.draft_of else {})


@dataclass(frozen=True, slots=True)
class Link:
    """The result of another job as a source. `key`: of all that shapes its pixels."""

    custom_id: str
    key: str


ALONE = Lineage()
LINEAGE = tuple(one.name for one in fields(Lineage))


@dataclass(frozen=True, kw_only=True)
class _Line(o.JobOptions):
    """The part that pictures and videos have of their line.

    `images` are paths relative to the working folder. `links`: for each of them, the job of the
    same run that makes the file, or None; empty if no job makes one. `file_name`: a
    `settings.name_template`. `part`: the number of the only one of several drawings that this job
    is; 0 if it is all of them. `user_fields` names the manifest fields that the user set for this
    job; it is an error if no stage uses one.
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
    links: tuple[Link | None, ...] = ()
    part: int = 0

    @property
    def parts(self) -> tuple[Self, ...]:
        """The jobs that are drawn for this one: itself, if it is drawn at once."""
        return (self,)

    @property
    def files(self) -> tuple[str, ...]:
        """The images that are not results of other jobs of the run."""
        return tuple(path for path, link in zip_longest(self.images, self.links) if link is None)

    @property
    def made_from(self) -> tuple[Link, ...]:
        """The links to the results that are among its images."""
        return tuple(filter(None, self.links))

    def copied(self) -> dict[str, Any]:
        """Return the fields of a result line that are the job's own, however it ends."""
        own = {"metadata": json.loads(self.metadata_json), "extra": json.loads(self.extra_json)}
        return own | self.lineage.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageJob(o.PictureOptions, _Line):
    """One `it2i` or `t2i` picture.

    `crops`: the parts of the kept source that are drawn, each at `size`; empty if the whole is.
    `finds_region`: a draft of the whole must find the region first; `draft`: what one found.

    `cot_text` or `cot_token_ids` replace the AR stage's writing. `written_json`: the note of these
    ids from when they were written; empty if there was none. `outside`: how the picture is put back
    on its source.
    """

    task: Task | TextTask
    size: SizeRequest
    text: o.TextSampling
    ar_seed: int = 0
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    written_json: str = ""
    drop_think: bool = False
    use_system_prompt: o.SystemPrompt = "None"
    outside: o.KeepOutside | None = None
    crops: tuple[o.Box, ...] = ()
    finds_region: bool = False
    draft: str = ""
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
    def draws(self) -> bool:
        """True if the job ends with a picture."""
        return True

    @property
    def suffix(self) -> str:
        """The end of its file's name."""
        return self.encoding.suffix

    @property
    def asked_size(self) -> Size | None:
        """The size in pixels that the job asks for; None if a ratio, a source or the model decides.

        Most models make only some sizes, so the picture may have another one.
        """
        asks = not (self.size.is_auto or self.size.is_ratio or self.outside)
        follows = self.infer_align_image_size and bool(self.images)
        return Size(self.size.height, self.size.width) if asks and not follows else None

    @property
    def parts(self) -> tuple[Self, ...]:
        """The jobs that are drawn for this one: one per crop, or the job itself."""
        if len(self.crops) < 2:
            return (self,)
        return tuple(replace(self, crops=(one,), part=n) for n, one in enumerate(self.crops, 1))

    @property
    def inpaints(self) -> bool:
        """True if the model draws only in the region."""
        return self.outside is not None and self.outside.region_mode == "inpaint"

    @property
    def skipped_steps(self) -> int:
        """The denoise steps before the first one that inpainting takes, as the library counts."""
        if self.outside is None or not self.inpaints:
            return 0
        steps = self.num_inference_steps
        return min(int(steps - steps * self.outside.strength), steps - 1)

    @property
    def taken_steps(self) -> int:
        """The denoise steps of a drawing."""
        return self.num_inference_steps - self.skipped_steps

    @property
    def kept_image(self) -> str:
        """The path of the source that stays equal outside the edit."""
        assert self.outside is not None, "the job keeps the source outside the edit"
        return self.images[self.outside.kept_source - 1]

    @property
    def kept_link(self) -> Link | None:
        """The job that makes that source; None if it is a file."""
        assert self.outside is not None, "the job keeps the source outside the edit"
        return self.links[self.outside.kept_source - 1] if self.links else None

    @property
    def kept_view(self) -> View:
        """What the model sees of the source that stays equal outside the edit; see `parts`."""
        assert self.outside is not None, "the job keeps the source outside the edit"
        return self.views[self.outside.kept_source - 1]

    @property
    def views(self) -> tuple[View, ...]:
        """What the model sees of each image, in order."""
        views = [*map(View, self.images)]
        if self.outside is not None and self.crops:
            size = Size(self.size.height, self.size.width)
            views[self.outside.kept_source - 1] = View(self.kept_image, self.crops[0], size)
        return tuple(views)

    @property
    def text_inputs(self) -> Hashable | None:
        """Everything in the job that determines the text it writes; None if it writes none.

        Except its bucket and the contents of its files. A greedy text has neither a seed nor
        sampling options.
        """
        if not self.writes_text:
            return None
        text, is_greedy = self.text, not self.text.temperature
        return (
            self.model,
            self.prompt,
            self.views,
            self.infer_align_image_size and bool(self.images),
            self.use_system_prompt,
            self.system_prompt,
            self.bot_task,
            self.size.is_auto,
            o.TextSampling(0.0, 0, 1.0, text.max_new_tokens) if is_greedy else text,
            0 if is_greedy else self.ar_seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob(ImageJob):
    """An `i2t` or `t2t` answer by a model that also draws: a job of pictures up to its text.

    `prompt`: the question. `choices`: the only answers; empty if the answer is written freely.
    Options of pictures have no effect; there are no denoise steps. `streams`: the answer is told
    while it is written, which does not change it.
    """

    choices: tuple[str, ...] = ()
    streams: bool = False

    @property
    def draws(self) -> bool:
        return False

    @property
    def suffix(self) -> str:
        return ANSWER_SUFFIX

    @property
    def writes_text(self) -> bool:
        return not self.choices


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoJob(o.VideoOptions, _Line):
    """One `t2v` or `i2v` video. `size` (pixels) and `num_frames` are those of the file.

    `images` are paths of the first frame of an `i2v`, or of its first and last. `camera`: the path
    that it follows, as a file of poses or as keys; empty for a model that follows none.
    """

    task: VideoTask
    size: Size
    camera: str = ""

    @property
    def branch_count(self) -> int:
        """Return the forwards in a denoise step: at scale 1 the unconditional branch has no effect.

        Scales below 1 that a model treats as no guidance are refused with the line.
        """
        return 1 if self.guidance_scale == 1 else 2

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts that are embedded for it."""
        return (self.prompt,) if self.branch_count == 1 else (self.prompt, self.negative_prompt)

    @property
    def camera_files(self) -> tuple[str, ...]:
        """Return the paths of the camera's poses and of its intrinsics file; empty for keys."""
        if not self.camera.endswith(POSES_SUFFIX):
            return ()
        folder, slash, _ = self.camera.rpartition("/")
        return self.camera, f"{folder}{slash}{INTRINSICS}"


Job = ImageJob | VideoJob
