"""From settled settings to the configuration of a run, and back to a setting's value in it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from hyimg_cli.errors import UsageError
from hyimg_cli.settings.precedence import Setting, as_given
from hyimg_cli.settings.table import SETTINGS, Declaration, InKey, JobKind
from hyimg_cli.spec.run import RunConfig

_PARTS: Mapping[str, type] = get_type_hints(RunConfig)


def _filled(row: Declaration) -> tuple[str, str] | None:
    """Part and field of RunConfig that a setting fills, where it does."""
    name, part = row.fills or row.name, _PARTS.get(row.table)
    is_there = part is not None and name in {field.name for field in fields(part)}
    return (row.table, name) if is_there else None


# Part and field of RunConfig by setting; some settings are read before there is a run.
FILLED = {row.name: place for row in SETTINGS.values() if (place := _filled(row))}


def configured(
    settings: Mapping[str, Setting], folder: Path, cache_folder: Path | None
) -> RunConfig:
    """The run that the settings describe: results in `folder`; without a cache's, no disk cache."""
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, (part, field) in FILLED.items():
        parts[part][field] = settings[name].value
    if settings["cpu_offload"].origin == "default" and settings["enable_cpu_offload"].value:
        parts["model"]["cpu_offload"] = "model"
    parts["output"]["folder"] = folder
    parts["cache"]["folder"] = cache_folder
    return RunConfig(**{part: _PARTS[part](**values) for part, values in parts.items()})


def in_config(name: str, config: RunConfig) -> Any:
    """The value that a run's configuration holds of a setting."""
    part, field = FILLED[name]
    return getattr(getattr(config, part), field)


def in_key(config: RunConfig, kind: JobKind, decided: Mapping[str, Any]) -> dict[str, str]:
    """The settings' part of the resume key of a job: each that changes its pixels, by its word.

    `decided` has the values that a machine decides for "auto".
    """
    words: dict[str, str] = {}
    for name, part in _key_parts(kind):
        value = decided[name] if name in decided else in_config(name, config)
        if value in part.words:
            words[part.name] = part.words[value]
    return words


def values_in_key(words: Mapping[str, str], kind: JobKind) -> dict[str, Any]:
    """Back from that part of the key: the settings by name, their defaults where it has no word."""
    values: dict[str, Any] = {}
    for name, part in _key_parts(kind):
        of_word = {word: value for value, word in part.words.items()}
        values[name] = of_word.get(words.get(part.name, ""), SETTINGS[name].default)
    return values


def _key_parts(kind: JobKind) -> Iterator[tuple[str, InKey]]:
    for name, row in SETTINGS.items():
        if isinstance(row.pixels, InKey) and row.only in (None, kind):
            other = row.pixels.of_videos if kind == "videos" else ""
            yield name, replace(row.pixels, name=other) if other else row.pixels


def refuse_conflicts(settings: Mapping[str, Setting]) -> None:
    """Raises UsageError where two settings cannot both hold: reuse that is required and switched
    off, or replicas that cannot get a GPU each.
    """
    if settings["require_kv_reuse"].value and not settings["kv_reuse"].value:
        off, required = as_given(settings["kv_reuse"]), as_given(settings["require_kv_reuse"])
        what = f"{required} does not go with {off}: every job would fail"
        raise UsageError(what, hint="give one of the two", code="usage.kv-reuse")
    ranks = settings["vae_patch_parallel_size"]
    if settings["vae_use_tiling"].value is False and ranks.value > 1:
        what = (
            f"{as_given(ranks)} shares tiles, and {as_given(settings['vae_use_tiling'])} cuts none"
        )
        raise UsageError(what, hint="give one of the two", code="usage.vae-tiling")
    count = settings["replicas"].value
    if count == 1:
        return
    device = settings["device"].value
    if device == "balanced" or device.startswith("cuda:"):
        what = f"--replicas {count} does not go with --device {device}"
        hint = "give --device cuda: GPUs of its own for each"
        raise UsageError(what, hint=hint, code="usage.replicas")
