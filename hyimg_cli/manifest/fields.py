"""The fields a manifest line may hold: one table of names, aliases, types and ranges."""

from dataclasses import dataclass

from hyimg_cli.settings.kinds import (
    MAX_SEED,
    MAX_SIDE,
    MIN_SIDE,
    AnyText,
    Anything,
    Choice,
    CustomId,
    Integer,
    Integers,
    Kind,
    Number,
    Paths,
    SizeText,
    Text,
    Truth,
)
from hyimg_cli.spec.job import BOT_TASKS, TASKS, VIDEO_TASKS

SYSTEM_PROMPTS = (
    "None",
    "en_vanilla",
    "en_recaption",
    "en_think_recaption",
    "en_unified",
    "dynamic",
    "custom",
)


# About seven minutes at 24 a second: beyond any model, so a slip of the pen.
MAX_FRAMES = 10001
MAX_FPS = 240


@dataclass(frozen=True)
class Field:
    """A field of a manifest line."""

    name: str
    kind: Kind
    aliases: tuple[str, ...] = ()


FIELDS = (
    Field("custom_id", CustomId(), ("id", "request_id")),
    Field("task", Choice((*TASKS, *VIDEO_TASKS))),
    Field("prompt", Text("prompt")),
    Field("negative_prompt", AnyText("negative prompt")),
    Field("images", Paths(), ("image", "image_path")),
    Field("model", Text("model")),
    Field("seed", Integer(0, MAX_SEED)),
    Field("n", Integer(1, 1000), ("num_outputs_per_prompt",)),
    Field("seeds", Integers(1000, MAX_SEED, is_distinct=True)),
    Field("size", SizeText()),
    Field("width", Integer(MIN_SIDE, MAX_SIDE)),
    Field("height", Integer(MIN_SIDE, MAX_SIDE)),
    Field("num_frames", Integer(1, MAX_FRAMES)),
    Field("fps", Integer(1, MAX_FPS)),
    Field("num_inference_steps", Integer(1, 1000), ("steps",)),
    Field("guidance_scale", Number(0, 100)),
    Field("guidance_scale_2", Number(0, 100)),
    Field("flow_shift", Number(0, 100, above_low=True)),
    Field("bot_task", Choice(BOT_TASKS, (("image", "none"),))),
    Field("cot_text", Text("text")),
    Field("cot_token_ids", Integers(65536, 2**31 - 1)),
    Field("drop_think", Truth()),
    Field("infer_align_image_size", Truth()),
    Field("use_system_prompt", Choice(SYSTEM_PROMPTS)),
    Field("system_prompt", Text("system prompt")),
    Field("ar_seed", Integer(0, MAX_SEED)),
    Field("temperature", Number(0, 100)),
    Field("top_k", Integer(0, 2**31 - 1)),
    Field("top_p", Number(0, 1, above_low=True)),
    Field("max_new_tokens", Integer(1, 65536)),
    Field("metadata", Anything()),
)
BY_NAME = {name: field for field in FIELDS for name in (field.name, *field.aliases)}
AR_FIELDS = ("ar_seed", "temperature", "top_k", "top_p", "max_new_tokens")
# Of them, what only a choice by chance looks at.
SAMPLED_FIELDS = ("ar_seed", "top_k", "top_p")
COT_FIELDS = ("cot_text", "cot_token_ids")
VIDEO_FIELDS = ("negative_prompt", "num_frames", "fps", "guidance_scale_2")
IMAGE_FIELDS = (
    *("images", "bot_task", "drop_think", "use_system_prompt", "system_prompt"),
    *COT_FIELDS,
    *AR_FIELDS,
)
_OF_VIDEOS = "it belongs to t2v"
# Fields that a line of each kind of task may not hold, with the reason.
NOT_IN_PICTURES = dict.fromkeys(VIDEO_FIELDS, _OF_VIDEOS) | {
    "negative_prompt": "HunyuanImage-3 has no negative prompt; its unconditional branch uses <cfg>"
}
NOT_IN_VIDEOS = dict.fromkeys(IMAGE_FIELDS, "it belongs to it2i and t2i") | {
    "images": "t2v makes a video from its prompt alone"
}
