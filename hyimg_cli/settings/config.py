"""From settled settings to the configuration of a run, and back to a setting's value in it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.settings.option import Declaration, InKey, JobKind
from hyimg_cli.settings.precedence import Setting, as_given, settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.settings.table import PARTS, REMOVED, SETTINGS


def build_run_config(
    settings: Mapping[str, Setting], folder: Path, cache_folder: Path | None
) -> RunConfig:
    """The run that the settings describe: results in `folder`; without a cache's, no disk cache."""
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, row in SETTINGS.items():
        parts[row.table][row.attribute] = settings[name].value
    if settings["cpu_offload"].origin == "default" and settings["enable_cpu_offload"].value:
        parts["model"]["cpu_offload"] = "model"
    parts["output"]["folder"] = folder
    parts["cache"]["folder"] = cache_folder
    return RunConfig(**{part: PARTS[part](**values) for part, values in parts.items()})


def settings_of(config: RunConfig) -> dict[str, Setting]:
    """The settings that a configuration made by hand stands for, checked as flags are.

    Raises UsageError for a bad value.
    """
    values = {name: in_config(name, config) for name in SETTINGS}
    given = {name: value for name, value in values.items() if value != SETTINGS[name].default}
    settled = settle(given, {}, {}, origin="RunConfig")
    refuse_conflicts(settled)
    return settled


def in_config(name: str, config: RunConfig) -> Any:
    """The value that a run's configuration holds of a setting."""
    row = SETTINGS[name]
    return getattr(getattr(config, row.table), row.attribute)


def in_key(config: RunConfig, kind: JobKind, decided: Mapping[str, Any]) -> dict[str, str]:
    """The settings' part of the resume key of a job: each that changes its pixels, by its word.

    `decided` has the values that a machine decides for "auto".
    """
    words: dict[str, str] = {}
    for row, part in _key_parts(kind):
        value = decided[row.name] if row.name in decided else in_config(row.name, config)
        word = part.words.get(value) if part.words else value if value != row.default else None
        if word is not None:
            words[part.name] = word
    return words


def values_in_key(words: Mapping[str, str], kind: JobKind) -> dict[str, Any]:
    """Back from that part of the key: the settings by name, their defaults where it has no word."""
    values: dict[str, Any] = {}
    for row, part in _key_parts(kind):
        own = part.words or {value: value for value in row.kind.choices}
        of_word = {word: value for value, word in own.items()}
        values[row.name] = of_word.get(words.get(part.name, ""), row.default)
    return values


def removed_in_key(words: Mapping[str, str], kind: JobKind) -> list[str]:
    """Settings and values in that part of a key which this version no longer has."""
    removed = [name for name, part in REMOVED.items() if part in words]
    for row, part in _key_parts(kind):
        known = part.words.values() if part.words else row.kind.choices
        if known and words.get(part.name, row.default) not in (*known, row.default):
            removed.append(f"{row.name} {words[part.name]}")
    return removed


def _key_parts(kind: JobKind) -> Iterator[tuple[Declaration, InKey]]:
    for row in SETTINGS.values():
        if isinstance(row.pixels, InKey) and row.only in (None, kind):
            other = row.pixels.of_videos if kind == "videos" else ""
            yield row, replace(row.pixels, name=other) if other else row.pixels


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
