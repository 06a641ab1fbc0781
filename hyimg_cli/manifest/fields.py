"""The fields of a manifest line: settings that a job can set, and fields of the line alone."""

from typing import Annotated

from annotated_types import Interval

from hyimg_cli.manifest.written import NOTE
from hyimg_cli.settings.kinds import (
    ANYTHING,
    CHOICES,
    CROP,
    CUSTOM_ID,
    LINKS,
    MATRIX,
    Side,
    numbers,
    plain,
    text,
)
from hyimg_cli.settings.paths import CAMERA, MODEL_NAME, SOURCES, PathKind
from hyimg_cli.settings.run import JobKind
from hyimg_cli.settings.table import SETTINGS, TABLES, Field
from hyimg_cli.spec.job import LINEAGE, TASKS, TEXT_TASKS, AnyTask
from hyimg_cli.spec.options import PICTURE_OPTIONS, TEXT_OPTIONS, VIDEO_OPTIONS, Seed

_SIDE = plain(Side)
_TOKENS = numbers(Annotated[int, Interval(ge=0, le=2**31 - 1)], 1, 65536)
_RATIO = plain(Annotated[int, Interval(ge=0, le=999)])
_COUNT = plain(Annotated[int, Interval(ge=0, le=10**6)])
_IMAGE = ("image", "image_path")
_OWN = (
    Field("custom_id", CUSTOM_ID, "Id of the job, and name of its file.", ("id", "request_id")),
    Field(
        "task",
        plain(AnyTask),
        "Task. Default: it2i with images, t2i without. i2t and t2t ask for a text.",
    ),
    Field("prompt", text("prompt"), "What to show, or to change in the images."),
    Field("images", SOURCES, "Source images, in order; for i2v the first and last frame.", _IMAGE),
    Field("links", LINKS, "For each of images, the result of the run that it is, or empty."),
    Field("choices", CHOICES, "Answers of i2t or t2t, of which one is chosen.", only="text"),
    Field("model", MODEL_NAME, "Checkpoint for this job: folder, file or hub id."),
    Field(
        "components",
        MODEL_NAME,
        "Folder or hub id with all other parts of a model that is one file.",
        only="pictures",
    ),
    Field("seeds", numbers(Seed, 1, 1000, is_distinct=True), "Make one result per seed."),
    Field(
        "matrix", MATRIX, "Make one job for each combination of these values, as lists by field."
    ),
    Field("width", _SIDE, "Width, used with height instead of size."),
    Field("height", _SIDE, "Height, used with width instead of size."),
    Field(
        "crop",
        CROP,
        "Part of the kept source to draw, LEFT,TOP,RIGHT,BOTTOM. Default: by region_size.",
        only="pictures",
    ),
    Field("cot_text", text("text"), "Use this text instead of writing one.", only="text"),
    Field("cot_token_ids", _TOKENS, "The same text as token ids.", only="text"),
    Field("ratio_index", _RATIO, "Size that goes with a given text.", only="text"),
    Field("written", NOTE, "Record that hyimg think keeps of its text.", only="text"),
    Field("camera", CAMERA, "Camera path for i2v: poses.npy, or keys.", only="camera"),
    Field("candidate_of", CUSTOM_ID, "Line that this job is a candidate of."),
    Field("candidate", _COUNT, "Number of the candidate in its line, from 0."),
    Field("draft_of", CUSTOM_ID, "Job that this is a draft of."),
    Field("metadata", ANYTHING, "Copy this object to the result."),
)
FIELDS: tuple[Field, ...] = (*_OWN, *(row for row in SETTINGS.values() if row.in_line))
BY_NAME = {name: field for field in FIELDS for name in (field.name, *field.aliases)}
# Fields that contain paths.
PATH_FIELDS = {field.name: field.kind for field in FIELDS if isinstance(field.kind, PathKind)}
# Fields that a matrix may combine.
IN_MATRIX = {
    name: field
    for name, field in BY_NAME.items()
    if field.name in TABLES["sampling"] or field.name == "model"
}
AR_FIELDS = ("ar_seed", "temperature", "top_k", "top_p", "max_new_tokens")
# Text options that only sampling uses.
SAMPLED_FIELDS = ("ar_seed", "top_k", "top_p")
COT_FIELDS = ("cot_text", "cot_token_ids")


# Options of jobs that only some models follow, and fields of the line alone that only some read.
OF_MODELS = tuple(
    field
    for field in FIELDS
    if field.name in PICTURE_OPTIONS | TEXT_OPTIONS | VIDEO_OPTIONS
    or field.only not in (None, "pictures", "videos")
)


def _not_for(kind: JobKind, tasks: str) -> dict[str, str]:
    return {
        field.name: f"it is only for {tasks}"
        for field in FIELDS
        if not field.concerns(kind, denoises_latents=True)
    }


# Fields of a line that asks for a text.
TEXT_FIELDS = frozenset(
    {"custom_id", "task", "prompt", "images", "links", "choices", "model", "bot_task", "name"}
    | {"system_prompt", "use_system_prompt", "seed", "seeds", "n", "matrix", "metadata"}
    | {*AR_FIELDS, *LINEAGE} - {"draft_of"}
)
_OF_DRAWINGS = {
    field.name: "it is not for i2t and t2t, which draw nothing"
    for field in FIELDS
    if field.name not in TEXT_FIELDS
}
_OF_PICTURES, _OF_VIDEOS = _not_for("videos", "it2i and t2i"), _not_for("pictures", "t2v and i2v")
# Fields that a task does not allow, with the reason.
NOT_IN: dict[str, dict[str, str]] = {
    **dict.fromkeys(TASKS, _OF_VIDEOS | {"choices": "it is only for i2t and t2t"}),
    **dict.fromkeys(TEXT_TASKS, _OF_DRAWINGS),
    "t2v": _OF_PICTURES
    | {"images": "t2v makes a video from a prompt only", "fit": "t2v has no start image to fit"},
    "i2v": _OF_PICTURES,
}
