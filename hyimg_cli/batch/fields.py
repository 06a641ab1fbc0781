"""The fields a manifest line may hold: one table of names, aliases, types and ranges."""

from dataclasses import dataclass

from hyimg_cli.batch.kinds import (
    MAX_SEED,
    MAX_SIDE,
    MIN_SIDE,
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
from hyimg_cli.spec.job import BOT_TASKS, TASKS

SYSTEM_PROMPTS = (
    "None",
    "en_vanilla",
    "en_recaption",
    "en_think_recaption",
    "en_unified",
    "dynamic",
    "custom",
)


@dataclass(frozen=True)
class Field:
    """A field of a manifest line."""

    name: str
    kind: Kind
    aliases: tuple[str, ...] = ()


FIELDS = (
    Field("custom_id", CustomId(), ("id", "request_id")),
    Field("task", Choice(TASKS)),
    Field("prompt", Text("prompt")),
    Field("images", Paths(), ("image", "image_path")),
    Field("model", Text("model")),
    Field("seed", Integer(0, MAX_SEED)),
    Field("n", Integer(1, 1000), ("num_outputs_per_prompt",)),
    Field("seeds", Integers(1000, MAX_SEED, is_distinct=True)),
    Field("size", SizeText()),
    Field("width", Integer(MIN_SIDE, MAX_SIDE)),
    Field("height", Integer(MIN_SIDE, MAX_SIDE)),
    Field("num_inference_steps", Integer(1, 1000), ("steps",)),
    Field("guidance_scale", Number(0, 100)),
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
FOREIGN = {
    "negative_prompt": "HunyuanImage-3 has no negative prompt; its unconditional branch uses <cfg>",
    "num_frames": "it belongs to t2v, which is not yet supported",
    "fps": "it belongs to t2v, which is not yet supported",
}
