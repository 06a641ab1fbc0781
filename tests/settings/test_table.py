"""What follows from the declarations of settings, at a value of each that only they give."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from settings.examples import EXAMPLES

from hyimg_cli.cli.recipe import read_recipe
from hyimg_cli.errors import UsageError
from hyimg_cli.journal import keys
from hyimg_cli.models import registry
from hyimg_cli.settings.config import build_run_config, in_config, read_key, settle
from hyimg_cli.settings.run import InKey, RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.card import ChunkRule
from hyimg_cli.spec.options import FINISHING

# Fields that are no user's to set.
NO_SETTING = {
    *("output.only_texts", "batch.prefetches_sources", "model.machine"),
    *("model.weights_cache", "model.expert_room"),
}
# How each setting that changes pixels stands in the resume key: the words of folders that exist.
PLAIN = {"dtype": "float32", "kv_reuse": "reuse"}
IN_KEY: dict[tuple[str, Any], dict[str, str]] = {
    ("dtype", "bfloat16"): {"dtype": "bfloat16"},
    ("kv_reuse", False): {"kv_reuse": "recompute"},
    ("vae_use_tiling", True): {"vae": "tiled"},
    ("vae_dtype", "float32"): {"vae_dtype": "float32"},
    ("vae_dtype", "float16"): {"vae_dtype": "float16"},
    ("quantization", "fp8"): {"experts": "fp8"},
    ("quantization", "nf4"): {"experts": "nf4"},
    ("decode_graphs", "on"): {"text": "graphs"},
    ("deterministic", True): {"algorithms": "deterministic"},
    ("tensor_parallel_size", 2): {"layers": "2 ranks"},
    ("tensor_parallel_size", 64): {"layers": "64 ranks"},
    ("batch_invariant", False): {"batch": "variant"},
}
# The same of videos whose model works in chunks.
OF_CHUNKS = {("clips_together", 2): {"clips": "2 together"}}
IN_VIDEO_KEY: dict[tuple[str, Any], dict[str, str]] = {
    ("dtype", "bfloat16"): {"dtype": "bfloat16"},
    ("vae_use_tiling", False): {"vae": "whole"},
    ("quantization", "fp8"): {"transformer": "fp8"},
    ("quantization", "nf4"): {"transformer": "nf4"},
    ("attention_backend", "_native_math"): {"attention": "_native_math"},
    ("attention_backend", "sage"): {"attention": "sage"},
    ("compile_blocks", True): {"blocks": "compiled"},
    ("decode_tiles", "own"): {"decode": "own"},
    ("decode_tiles", "half"): {"decode": "half"},
    ("deterministic", True): {"algorithms": "deterministic"},
    ("context_parallel_size", 2): {"context": "2 ranks"},
}
# What else makes a stage read an option of a job.
BESIDE: dict[str, dict[str, Any]] = {
    "drop_think": {"bot_task": "think"},
    "system_prompt": {"use_system_prompt": "custom"},
    "step_cache": {"num_inference_steps": 20},
    "quality": {"format": "jpeg"},
    "lossless": {"format": "webp"},
    **{name: {"keep_outside": True} for name in FINISHING},
}
# What decides which jobs a line becomes, or what they draw of a source, and so is in no job.
OF_THE_LINE = {"n", "vary", "region_size", "region_context", "region_pixels"}
# The edit has one source, none is inpainted, no video starts from a picture, no LoRA file is here.
UNUSED = {"kept_source", "strength", "fit", "lora"}
OF_THE_JOB = [
    name
    for name, row in SETTINGS.items()
    if row.pixels == "job" and name not in OF_THE_LINE | UNUSED
]
OF_THE_CHECKPOINT = {"model", "components", "video_model", "video_components", "revision"}
# Folders, which depend on more than their setting, and another spelling of one.
# `cpu_offload` also says that no other one is taken: see `tests/memory/test_fit.py`.
APART = {"cache_dir", "output_dir", "enable_cpu_offload", "cpu_offload"}
FILLS = [name for name, row in SETTINGS.items() if row.pixels != "job" and name not in APART]
# The device decides the precision, which is in the key.
WITHOUT_PIXELS = [n for n, row in SETTINGS.items() if row.pixels is None and n != "device"]


def test_every_setting_has_an_answer_here() -> None:
    of_the_job = {name for name, row in SETTINGS.items() if row.pixels == "job"}
    assert {name for name, row in SETTINGS.items() if row.in_line} == of_the_job | {"name"}
    in_key = {name for name, row in SETTINGS.items() if isinstance(row.pixels, InKey)}
    assert in_key == {name for name, _ in (*IN_KEY, *IN_VIDEO_KEY, *OF_CHUNKS)}
    by_checkpoint = {name for name, row in SETTINGS.items() if row.pixels == "checkpoint"}
    assert by_checkpoint == OF_THE_CHECKPOINT


@pytest.mark.parametrize("name", FILLS)
def test_a_setting_fills_its_own_field_and_no_other(name: str) -> None:
    value = SETTINGS[name].kind.read(EXAMPLES[name])
    plain = build_run_config(settle({}, {}, {}), Path("out"), None)
    config = build_run_config(settle({name: EXAMPLES[name]}, {}, {}), Path("out"), None)
    differ = [one for one in FILLS if in_config(one, plain) != in_config(one, config)]
    assert differ == [name]
    assert in_config(name, config) == value


def test_every_field_is_some_settings() -> None:
    config = build_run_config(settle({}, {}, {}), Path("out"), Path("cache"))
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    places = {f"{name}.{field.name}" for name, part in parts.items() for field in fields(part)}
    declared = {f"{row.table}.{row.attribute}" for row in SETTINGS.values()}
    assert declared == places - NO_SETTING
    assert (config.output.folder, config.cache.folder) == (Path("out"), Path("cache"))


def test_defaults_are_those_of_a_configuration_made_by_hand() -> None:
    by_hand = {"output": build_run_config(settle({}, {}, {}), Path("out"), None).output}
    assert build_run_config(settle({}, {}, {}), Path("out"), None) == RunConfig(**by_hand)


@pytest.mark.parametrize(("name", "value"), IN_KEY | IN_VIDEO_KEY)
def test_what_changes_pixels_is_in_the_key(
    under: Callable[..., Any], name: str, value: Any
) -> None:
    settings, (edit, video) = under({name: value})
    config = build_run_config(settings, Path("out"), None)
    assert keys.pixel_settings(edit, config) == PLAIN | IN_KEY.get((name, value), {})
    of_video = {"dtype": "float32"} | IN_VIDEO_KEY.get((name, value), {})
    assert keys.pixel_settings(video, config) == of_video


@pytest.mark.parametrize(("name", "value"), OF_CHUNKS)
def test_what_changes_chunks_is_in_their_key_alone(
    under: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    settings, (_, video) = under({name: value})
    config = build_run_config(settings, Path("out"), None)
    assert keys.pixel_settings(video, config) == {"dtype": "float32"}
    card = registry.video_card(video.model)
    in_chunks = replace(card, chunks=ChunkRule(3, 1))
    monkeypatch.setattr(registry, "video_card", lambda *model: in_chunks)
    words = keys.pixel_settings(video, config)
    assert words == {"dtype": "float32"} | OF_CHUNKS[name, value]
    assert read_key(words, "videos")[0][name] == value


@pytest.mark.parametrize("name", WITHOUT_PIXELS)
def test_what_changes_none_is_not(under: Callable[..., Any], name: str) -> None:
    settings, (edit, video) = under({name: EXAMPLES[name]})
    config = build_run_config(settings, Path("out"), None)
    assert keys.pixel_settings(edit, config) == PLAIN
    assert keys.pixel_settings(video, config) == {"dtype": "float32"}


@pytest.mark.parametrize("name", OF_THE_JOB)
def test_what_is_of_the_job_changes_its_key(under: Callable[..., Any], name: str) -> None:
    """The drawing's, or the finishing's behind it: of a model that follows everything."""

    def both(environ: dict[str, Any]) -> tuple[str, str]:
        settings, jobs = under(environ, follows_all=True)
        config = build_run_config(settings, Path("out"), None)
        job = jobs[0 if SETTINGS[name].concerns("pictures", denoises_latents=True) else 1]
        return keys.key_of(job, ["a source"], config), keys.finishing_key(job, config.output)

    beside = BESIDE.get(name, {})
    (drawing, finishing), plain = both(beside | {name: EXAMPLES[name]}), both(beside)
    assert (drawing != plain[0], finishing != plain[1]) == (
        name not in FINISHING,
        name in (*FINISHING, "keep_outside"),
    )


# Other parts change the key of a model that is one file: tests/models/diffusers_image/test_files.py
@pytest.mark.parametrize("name", sorted(OF_THE_CHECKPOINT - {"components"}))
def test_another_checkpoint_has_keys_of_its_own(
    under: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(registry, "fingerprint", lambda *parts: "@".join(map(str, parts)))
    found = []
    for environ in ({}, {name: "another"}):
        settings, jobs = under(environ)
        config = build_run_config(settings, Path("out"), None)
        found.append(keys.key_of(jobs[name.startswith("video_")], ["a source"], config))
    assert found[0] != found[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_says_it_in_its_table(name: str, tmp_path: Path) -> None:
    row, path, value = SETTINGS[name], tmp_path / "run.toml", EXAMPLES[name]
    path.write_text(f"[{row.table}]\n{name} = {json.dumps(value)}\n")
    assert read_recipe(path) == {name: row.kind.read(value)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_or_a_variable_says_it(name: str) -> None:
    row, value = SETTINGS[name], EXAMPLES[name]
    said = ",".join(value) if isinstance(value, tuple) else str(value)
    by_variable = settle({}, {f"HYIMG_{name.upper()}": said}, {})[name]
    by_flag = settle({name: value}, {}, {})[name]
    assert by_flag.value == by_variable.value == row.kind.read(value) != row.default
    assert (by_flag.origin, by_variable.origin) == ("flag", "environment")


@pytest.mark.parametrize(("name", "value"), [*IN_KEY, ("kv_reuse", True)])
def test_a_recorded_word_gives_its_setting_back(name: str, value: Any) -> None:
    words = PLAIN | IN_KEY.get((name, value), {})
    plain = read_key(PLAIN, "pictures")[0]
    assert read_key(words, "pictures")[0] == plain | {name: value}
    assert plain["dtype"] == "float32"
    assert plain["vae_use_tiling"] is None


@pytest.mark.parametrize(("name", "value"), IN_VIDEO_KEY)
def test_a_video_s_word_gives_its_setting_back(name: str, value: Any) -> None:
    plain = read_key({}, "videos")[0]
    assert plain == {name: SETTINGS[name].default for name, _ in (*IN_VIDEO_KEY, *OF_CHUNKS)}
    assert read_key(IN_VIDEO_KEY[name, value], "videos")[0] == plain | {name: value}


def test_the_librarys_own_variable_says_its_backend() -> None:
    environ = {"DIFFUSERS_ATTN_BACKEND": "flash"}
    found = settle({}, environ, {"attention_backend": "sage"})["attention_backend"]
    assert (found.value, found.origin) == ("flash", "environment")
    both = environ | {"HYIMG_ATTENTION_BACKEND": "flex"}
    assert settle({}, both, {})["attention_backend"].value == "flex"
    with pytest.raises(UsageError, match="DIFFUSERS_ATTN_BACKEND"):
        settle({}, {"DIFFUSERS_ATTN_BACKEND": "flesh"}, {})


@pytest.mark.parametrize(
    ("given", "offload"),
    [
        ({"enable_cpu_offload": True}, "model"),
        ({"enable_cpu_offload": True, "cpu_offload": "group"}, "group"),
        ({"enable_cpu_offload": False}, "none"),
        ({}, "none"),
    ],
)
def test_the_older_flag_of_offload_is_the_model_s(given: dict[str, Any], offload: str) -> None:
    found = build_run_config(settle(given, {}, {}), Path("out"), None)
    assert found.model.cpu_offload == offload
