"""Turn flags, variables and files into settings, and settings into a run's configuration.

Precedence is decided here alone: flag > environment > recipe file > hyimg.toml > the
user's own > default. A
manifest line overrides all of them; the job's checkpoint is below them: `manifest.resolve`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hyimg_cli.errors import UsageError
from hyimg_cli.settings.run import InKey, JobKind, RunConfig
from hyimg_cli.settings.table import PARTS, SETTINGS, Declaration
from hyimg_cli.settings.values import BadValue
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.model_name import with_components
from hyimg_cli.spec.options import CHECKPOINT
from hyimg_cli.spec.step_cache import StepCache

Origin = Literal[
    "line",
    "flag",
    "RunConfig",
    "record",
    "environment",
    "recipe",
    "hyimg.toml",
    "user's hyimg.toml",
    "model",
    "default",
]


@dataclass(frozen=True)
class Setting:
    """A value and its origin. `model` with None: the checkpoint's own value, known per job."""

    name: str
    value: Any
    origin: Origin


def settle(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    recipe: Mapping[str, Any],
    folders_own: Mapping[str, Any] | None = None,
    *,
    users_own: Mapping[str, Any] | None = None,
    origin: Literal["flag", "RunConfig"] = "flag",
    record: Mapping[str, Any] | None = None,
) -> dict[str, Setting]:
    """Return every setting and its origin.

    Order: flag (None: unset) > `record` of a file that is made again > HYIMG_<NAME> > recipe >
    the settings of the working folder's `hyimg.toml` > those of the user's own > default.
    `origin`: of values given as flags. Raises UsageError for a bad value, and for settings that
    contradict each other.
    """
    assert flags.keys() <= SETTINGS.keys(), f"no settings: {flags.keys() - SETTINGS.keys()}"

    def settle_one(row: Declaration) -> Setting:
        """Return the setting from the strongest origin that has it."""
        name = row.name
        if (flag := flags.get(name)) is not None:
            where = as_given(Setting(name, flag, origin))
            return Setting(name, _typed(row, flag, where=where), origin)
        if record and record.get(name) is not None:
            return Setting(name, _typed(row, record[name], where=f"record: {name}"), "record")
        for variable in (row.variable, row.also_variable):
            if text := environ.get(variable):
                return Setting(name, _typed(row, text, where=variable), "environment")
        if name in recipe:
            return Setting(name, recipe[name], "recipe")
        if folders_own and name in folders_own:
            return Setting(name, folders_own[name], "hyimg.toml")
        if users_own and name in users_own:
            return Setting(name, users_own[name], "user's hyimg.toml")
        if row.default is CHECKPOINT:
            return Setting(name, None, "model")
        return Setting(name, row.default, "default")

    settled = {name: settle_one(row) for name, row in SETTINGS.items()}
    _keep_by_region(settled)
    model, parts = settled["model"], settled["components"].value
    settled["model"] = replace(model, value=with_components(model.value, parts))
    _refuse_conflicts(settled)
    return settled


def _keep_by_region(settled: dict[str, Setting]) -> None:
    """Turn keep_outside on for a region, unless a stronger origin turned it off.

    Raises UsageError if both come from the same origin and contradict each other.
    """
    region, keep = settled["region"], settled["keep_outside"]
    order = get_args(Origin)
    if not region.value or keep.value or order.index(keep.origin) < order.index(region.origin):
        return
    if keep.origin == region.origin:
        raise _conflict(region, keep, "a region needs keep_outside", "region")
    settled[keep.name] = Setting(keep.name, True, region.origin)


def _refuse_conflicts(settings: Mapping[str, Setting]) -> None:
    """Raise UsageError if two settings cannot both hold.

    For example, reuse is required and turned off, or replicas cannot get a GPU each.
    """
    required, reuse = settings["require_kv_reuse"], settings["kv_reuse"]
    if required.value and not reuse.value:
        raise _conflict(required, reuse, "every job would fail", "kv-reuse")
    ranks, tiling = settings["vae_patch_parallel_size"], settings["vae_use_tiling"]
    if tiling.value is False and ranks.value > 1:
        raise _conflict(ranks, tiling, "it shares tiles, and tiling is off", "vae-tiling")
    count, device = settings["replicas"].value, settings["device"].value
    if count > 1 and (device == "balanced" or device.startswith("cuda:")):
        what = f"--replicas {count} and --device {device} cannot be used together"
        hint = "use --device cuda, which gives each replica its own GPUs"
        raise UsageError(what, hint=hint, code="usage.replicas")


def _conflict(one: Setting, other: Setting, why: str, slug: str) -> UsageError:
    what = f"{as_given(one)} and {as_given(other)} cannot be used together: {why}"
    return UsageError(what, hint="remove one of the two", code=f"usage.{slug}")


def _typed(row: Declaration, value: Any, *, where: str) -> Any:
    """Return `value` typed: text and paths are parsed, anything else is checked."""
    if isinstance(value, SizeRequest | StepCache | tuple):  # from a RunConfig, or recorded
        return value
    try:
        is_text = isinstance(value, str | Path)
        return row.kind.parse(str(value)) if is_text else row.kind.read(value)
    except BadValue as bad:
        code = f"usage.{bad.slug}"
        raise UsageError(bad.what, where=where, hint=bad.hint, code=code) from None


def as_given(setting: Setting) -> str:
    """Return the setting's name as the user wrote it: flag, field, variable or recipe key."""
    row = SETTINGS[setting.name]
    if setting.origin == "RunConfig":
        return f"{row.table}.{row.attribute}"
    if setting.origin == "record":
        return f"{setting.name} of the file's record"
    if setting.origin == "environment":
        return row.variable
    if setting.origin in ("recipe", "hyimg.toml", "user's hyimg.toml"):
        return f"{setting.name} of {'the ' * (setting.origin != 'hyimg.toml')}{setting.origin}"
    return row.spelled[-1].partition("/")[2] if setting.value is False else row.flag


def build_run_config(
    settings: Mapping[str, Setting], folder: Path, cache_folder: Path | None
) -> RunConfig:
    """Return the run that the settings describe, with results in `folder`.

    Without a cache folder, there is no disk cache.
    """
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, row in SETTINGS.items():
        parts[row.table][row.attribute] = settings[name].value
    if settings["cpu_offload"].origin == "default" and settings["enable_cpu_offload"].value:
        parts["model"]["cpu_offload"] = "model"
    parts["output"]["folder"] = folder
    parts["cache"]["folder"] = cache_folder
    return RunConfig(**{part: PARTS[part](**values) for part, values in parts.items()})


def settings_of(config: RunConfig) -> dict[str, Setting]:
    """Return the settings of a configuration made in Python, checked like flags.

    Raises UsageError for a bad value.
    """
    values = {name: in_config(name, config) for name in SETTINGS}
    given = {name: value for name, value in values.items() if value != SETTINGS[name].default}
    return settle(given, {}, {}, origin="RunConfig")


def in_config(name: str, config: RunConfig) -> Any:
    """Return a setting's value in a run's configuration."""
    row = SETTINGS[name]
    return getattr(getattr(config, row.table), row.attribute)


def in_key(
    config: RunConfig, kind: JobKind, decided: Mapping[str, Any], *, denoises_latents: bool = False
) -> dict[str, str]:
    """Return the part of a job's resume key that has the settings that change its pixels.

    `decided` has the values that the machine chooses for "auto".
    """
    return {
        name: word_of[value]
        for row, name, word_of in _key_parts(kind)
        if row.concerns(kind, denoises_latents=denoises_latents)
        if (value := decided.get(row.name, in_config(row.name, config))) in word_of
    }


def read_key(words: Mapping[str, str], kind: JobKind) -> tuple[dict[str, Any], list[str]]:
    """Read that part of a key back.

    Returns the settings by name, with defaults for those without a word, and the values in it that
    this version does not have.
    """
    values, unknown = dict[str, Any](), list[str]()
    for row, name, word_of in _key_parts(kind):
        word = words.get(name, row.default)
        values[row.name] = next((v for v, own in word_of.items() if own == word), row.default)
        if word not in (*word_of.values(), row.default):
            unknown.append(f"{row.name} {word}")
    return values, unknown


def _key_parts(kind: JobKind) -> Iterator[tuple[Declaration, str, Mapping[Any, str]]]:
    """Yield the settings in a resume key, each with its name there and its words by value."""
    for row in SETTINGS.values():
        if isinstance(row.pixels, InKey) and row.concerns(kind, denoises_latents=True):
            name = (row.pixels.of_videos if kind == "videos" else "") or row.pixels.name
            each_its_own = {value: value for value in row.kind.choices if value != row.default}
            yield row, name, row.pixels.words or each_its_own
