"""Values derived from the declarations, compared with a second list here."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli.recipe import read_recipe
from hyimg_cli.errors import UsageError
from hyimg_cli.journal import keys
from hyimg_cli.models import registry
from hyimg_cli.settings.config import build_run_config, read_key, settle
from hyimg_cli.settings.run import InKey, RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.card import ChunkRule

# Where in RunConfig each setting goes, with a value off its default.
FILLS: dict[str, tuple[str, Any]] = {
    "model": ("model.model", "other"),
    "revision": ("model.revision", "v2"),
    "dtype": ("model.dtype", "bfloat16"),
    "device": ("model.device", "cuda:1"),
    "vae_use_tiling": ("model.vae_use_tiling", True),
    "vae_dtype": ("model.vae_dtype", "float16"),
    "offload_experts": ("model.offloads_experts", True),
    "cpu_offload": ("model.cpu_offload", "group"),
    "attention_backend": ("model.attention_backend", "_native_math"),
    "compile_blocks": ("model.compile_blocks", True),
    "quantization": ("model.quantization", "nf4"),
    "video_components": ("model.components", "wan"),
    "clips_together": ("batch.clips", 2),
    "decode_graphs": ("model.decode_graphs", "off"),
    "decode_tiles": ("model.decode_tiles", "half"),
    "deterministic": ("model.deterministic", True),
    "kv_reuse": ("reuse.kv_reuse", False),
    "require_kv_reuse": ("reuse.required", True),
    "prompt_cache": ("reuse.prompt_cache", False),
    "batching_max_size": ("batch.max_size", 7),
    "batch_invariant": ("batch.is_invariant", False),
    "prefix_cache_mb": ("batch.prefix_cache_mb", 8),
    "prefix_cache_host_mb": ("batch.prefix_cache_host_mb", 9),
    "prewarm": ("batch.prewarm", False),
    "background_pass": ("batch.background_pass", 3),
    "tokens_between_steps": ("batch.tokens_between_steps", 2),
    "memory_gb": ("batch.memory_gb", 25.8),
    "gpu_memory_utilization": ("batch.gpu_memory_utilization", 0.5),
    "disk_cache_mb": ("cache.budget_mb", 11),
    "keep_quantized": ("cache.keeps_weights", True),
    "vae_patch_parallel_size": ("parallel.vae_ranks", 3),
    "cfg_parallel_size": ("parallel.cfg_ranks", 2),
    "context_parallel_size": ("parallel.context_ranks", 4),
    "tensor_parallel_size": ("parallel.tensor_ranks", 4),
    "replicas": ("parallel.replicas", 5),
    "ray_address": ("parallel.ray_address", "10.0.0.1:6379"),
    "metadata": ("output.metadata", False),
    "keep_gps": ("output.keep_gps", True),
    "frames": ("output.frames", "png"),
    "checkpoint_every": ("output.checkpoint_every", 6),
    "fail_fast": ("failure.fail_fast", True),
    "max_consecutive_errors": ("failure.max_consecutive_errors", 13),
    "max_retries": ("failure.max_retries", 12),
    "video_model": ("model.video_model", "other"),
    "disk_cache": ("cache.disk_cache", False),
    "report": ("output.report", False),
    "skip_invalid": ("failure.skip_invalid", True),
    "allow_model": ("model.allow_model", ("other",)),
    "name": ("output.name", "{stem}-{seed}"),
    "draft_steps": ("candidates.draft_steps", 6),
    "score": ("candidates.score", ("outside", "text")),
    "score_python": ("candidates.score_python", ("clip=python",)),
    "score_timeout": ("candidates.score_timeout", 5.0),
    "judge_url": ("candidates.judge_url", "http://localhost:8000/v1"),
    "rubric": ("candidates.rubric", "rubric.txt"),
    "keep": ("candidates.keep", 2),
    "min": ("candidates.least", ("judge.follows=7",)),
    "max": ("candidates.most", ("outside=3",)),
}
# Folders, which depend on more than their setting, and another spelling of one.
BEFORE: dict[str, Any] = {
    "cache_dir": "other",
    "output_dir": "other",
    "enable_cpu_offload": True,
}
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
# The settings of a job: each off its default, with what else makes a stage read it.
OF_THE_JOB: dict[str, dict[str, Any]] = {
    "size": {"size": "96x160"},
    "num_inference_steps": {"num_inference_steps": 3},
    "guidance_scale": {"guidance_scale": 2.5},
    "flow_shift": {"flow_shift": 1.5},
    "seed": {"seed": 77},
    "bot_task": {"bot_task": "think"},
    "drop_think": {"drop_think": True},
    "use_system_prompt": {"use_system_prompt": "en_unified"},
    "system_prompt": {"system_prompt": "Be bold."},
    "ar_seed": {"ar_seed": 5},
    "temperature": {"temperature": 0.1},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "max_new_tokens": {"max_new_tokens": 9},
    "infer_align_image_size": {"infer_align_image_size": True},
    "negative_prompt": {"negative_prompt": "blur"},
    "num_frames": {"num_frames": 5},
    "fps": {"fps": 3},
    "scheduler": {"scheduler": "euler"},
    "step_cache": {"step_cache": "taylor:interval=4", "num_inference_steps": 20},
    "format": {"format": "webp"},
    "quality": {"quality": 50, "format": "jpeg"},
    "lossless": {"lossless": True, "format": "webp"},
    "keep_outside": {"keep_outside": True},
}
# What is done behind a drawing: in the key of that, and not of the drawing.
OF_THE_FINISHING: dict[str, dict[str, Any]] = {
    "region": {"region": "1,2,30,40"},
    "region_mode": {"region_mode": "instead"},
    "on_global": {"on_global": "fail"},
    "max_outside_change": {"max_outside_change": 2.5},
    "max_edited_area": {"max_edited_area": 0.5},
    "max_spill": {"max_spill": 0.25},
}
# What decides which jobs a line becomes, and so is in no job.
OF_THE_LINE: dict[str, dict[str, Any]] = {"n": {"n": 2}, "vary": {"vary": "picture"}}
# The embedded video model has one transformer, and so no second scale; BAGEL's own are not read by
# the embedded picture model.
NOT_OF_TINY: dict[str, dict[str, Any]] = {
    "guidance_scale_2": {"guidance_scale_2": 1.5},
    "fit": {"fit": "crop"},
    "lora": {"lora": "style.safetensors@0.5"},
    "image_guidance_scale": {"image_guidance_scale": 1.5},
    "guidance_interval": {"guidance_interval": [0.2, 0.9]},
    "guidance_renorm": {"guidance_renorm": "channel"},
    "guidance_renorm_min": {"guidance_renorm_min": 0.5},
    # Nor has the edit a second source.
    "kept_source": {"kept_source": 2},
}
OF_THE_CHECKPOINT = {"model", "video_model", "video_components", "revision"}
EVERY_JOBS = OF_THE_JOB | OF_THE_FINISHING | OF_THE_LINE | NOT_OF_TINY
OFF_DEFAULT = (
    {name: value for name, (_, value) in FILLS.items()}
    | BEFORE
    | {name: values[name] for name, values in EVERY_JOBS.items()}
)
# The device decides the precision, which is in the key.
WITHOUT_PIXELS = [n for n, row in SETTINGS.items() if row.pixels is None and n != "device"]


def test_every_setting_has_an_answer_here() -> None:
    of_the_job = {name for name, row in SETTINGS.items() if row.pixels == "job"}
    assert SETTINGS.keys() == FILLS.keys() | BEFORE.keys() | of_the_job
    assert of_the_job == EVERY_JOBS.keys()
    assert {name for name, row in SETTINGS.items() if row.in_line} == of_the_job | {"name"}
    in_key = {name for name, row in SETTINGS.items() if isinstance(row.pixels, InKey)}
    assert in_key == {name for name, _ in (*IN_KEY, *IN_VIDEO_KEY, *OF_CHUNKS)}
    by_checkpoint = {name for name, row in SETTINGS.items() if row.pixels == "checkpoint"}
    assert by_checkpoint == OF_THE_CHECKPOINT


@pytest.mark.parametrize("name", FILLS)
def test_a_setting_fills_its_own_field_and_no_other(name: str) -> None:
    place, value = FILLS[name]
    plain = build_run_config(settle({}, {}, {}), Path("out"), None)
    config = build_run_config(settle({name: value}, {}, {}), Path("out"), None)
    differ = [p for p, _ in FILLS.values() if attrgetter(p)(plain) != attrgetter(p)(config)]
    assert differ == [place]
    assert attrgetter(place)(config) == value


def test_every_field_is_some_settings() -> None:
    config = build_run_config(settle({}, {}, {}), Path("out"), Path("cache"))
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    places = {f"{name}.{field.name}" for name, part in parts.items() for field in fields(part)}
    declared = {name: f"{row.table}.{row.attribute}" for name, row in SETTINGS.items()}
    assert {name: declared[name] for name in FILLS} == {n: place for n, (place, _) in FILLS.items()}
    assert {*declared.values()} == places - NO_SETTING
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
    settings, (edit, video) = under({name: OFF_DEFAULT[name]})
    config = build_run_config(settings, Path("out"), None)
    assert keys.pixel_settings(edit, config) == PLAIN
    assert keys.pixel_settings(video, config) == {"dtype": "float32"}


@pytest.mark.parametrize("name", OF_THE_JOB)
def test_what_is_of_the_job_changes_its_key(under: Callable[..., Any], name: str) -> None:
    def key(environ: dict[str, Any]) -> str:
        settings, jobs = under(environ)
        config = build_run_config(settings, Path("out"), None)
        # The picture's model takes no negative prompt.
        is_of_video = SETTINGS[name].only == "videos" or name == "negative_prompt"
        job = jobs[1 if is_of_video else 0]
        return keys.key_of(job, ["a source"], config)

    assert key(OF_THE_JOB[name]) != key({})


@pytest.mark.parametrize("name", OF_THE_FINISHING)
def test_what_is_of_the_finishing_changes_its_key_alone(
    under: Callable[..., Any], name: str
) -> None:
    def both(environ: dict[str, Any]) -> tuple[str, str]:
        settings, (job, _) = under({"keep_outside": True} | environ)
        config = build_run_config(settings, Path("out"), None)
        return keys.key_of(job, ["a source"], config), keys.finishing_key(job, config.output)

    (drawing, finishing), plain = both(OF_THE_FINISHING[name]), both({})
    assert drawing == plain[0]
    assert finishing != plain[1]


@pytest.mark.parametrize("name", sorted(OF_THE_CHECKPOINT))
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
    row, path, value = SETTINGS[name], tmp_path / "run.toml", OFF_DEFAULT[name]
    path.write_text(f"[{row.table}]\n{name} = {json.dumps(value)}\n")
    assert read_recipe(path) == {name: row.kind.read(value)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_or_a_variable_says_it(name: str) -> None:
    row, value = SETTINGS[name], OFF_DEFAULT[name]
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
