"""The one place of precedence: flag > environment > recipe file > hyimg.toml > default.

A manifest line stands above all of them, the checkpoint of its job below: `manifest.resolve`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hyimg_cli.errors import UsageError
from hyimg_cli.settings.option import PREFIX, Declaration
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import BadValue, nearest, shown
from hyimg_cli.spec.declare import CHECKPOINT
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.step_cache import StepCache

Origin = Literal[
    "line", "flag", "RunConfig", "environment", "recipe", "hyimg.toml", "model", "default"
]


@dataclass(frozen=True)
class Setting:
    """A value and what set it. `model` with None: the checkpoint's own, known per job."""

    name: str
    value: Any
    origin: Origin


def settle(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    recipe: Mapping[str, Any],
    folders_own: Mapping[str, Any] | None = None,
    *,
    origin: Literal["flag", "RunConfig"] = "flag",
) -> dict[str, Setting]:
    """Every setting and what set it: flag (None: unset) > HYIMG_<NAME> > recipe > the settings of
    the working folder's `hyimg.toml` > default. `origin`: of what is given as flags.

    Raises UsageError for a bad value and for a HYIMG_ variable that looks like a typing error.
    """
    for name in flags:
        assert name in SETTINGS, f"no setting is called {name}"
    _refuse_misspelt(environ)

    def candidates(row: Declaration) -> Iterator[Setting]:
        """The setting by each origin that says it, the strongest first."""
        name = row.name
        if (flag := flags.get(name)) is not None:
            where = row.flag if origin == "flag" else row.field
            yield Setting(name, _typed(row, flag, where=where), origin)
        for variable in (row.variable, row.also_variable):
            if text := environ.get(variable):
                yield Setting(name, _typed(row, text, where=variable), "environment")
        if name in recipe:
            yield Setting(name, recipe[name], "recipe")
        if folders_own and name in folders_own:
            yield Setting(name, folders_own[name], "hyimg.toml")
        if row.default is CHECKPOINT:
            yield Setting(name, None, "model")
        yield Setting(name, row.default, "default")

    settled = {name: next(candidates(row)) for name, row in SETTINGS.items()}
    _keep_by_region(settled)
    return settled


def _keep_by_region(settled: dict[str, Setting]) -> None:
    """Turn keep_outside on for a region, unless a stronger origin turned it off.

    Raises UsageError where both come from the same place and contradict each other.
    """
    region, keep = settled["region"], settled["keep_outside"]
    order = get_args(Origin)
    if not region.value or keep.value or order.index(keep.origin) < order.index(region.origin):
        return
    if keep.origin == region.origin:
        what = f"{as_given(region)} does not go with {as_given(keep)}: it needs keep_outside"
        raise UsageError(what, hint="give one of the two", code="usage.region")
    settled[keep.name] = Setting(keep.name, True, region.origin)


def _typed(row: Declaration, value: Any, *, where: str) -> Any:
    """`value` typed: text and paths are parsed, anything else is checked."""
    if isinstance(value, SizeRequest | StepCache | tuple):  # of a RunConfig, or recorded
        return value
    try:
        is_text = isinstance(value, str | Path)
        return row.kind.parse(str(value)) if is_text else row.kind.read(value)
    except BadValue as bad:
        code = f"usage.{bad.slug}"
        raise UsageError(bad.what, where=where, hint=bad.hint, code=code) from None


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    # Other variables with this prefix may belong to others; only a near miss is refused.
    known = {row.variable for row in SETTINGS.values()}
    aliases = {alias: row.name for row in SETTINGS.values() for alias in row.aliases}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            name = variable[len(PREFIX) :].lower()
            close = aliases.get(name) or nearest(name, SETTINGS, cutoff=0.75)
            if close:
                raise UsageError(
                    f"{shown(variable)} is not known",
                    where="environment",
                    hint=f"did you mean {SETTINGS[close].variable}?",
                    code="usage.unknown-variable",
                )


def as_given(setting: Setting) -> str:
    """The setting as the user wrote it: the flag, the variable, or the recipe's key."""
    row = SETTINGS[setting.name]
    if setting.origin == "RunConfig":
        return row.field
    if setting.origin == "environment":
        return row.variable
    if setting.origin in ("recipe", "hyimg.toml"):
        return f"{setting.name} of {'the ' * (setting.origin == 'recipe')}{setting.origin}"
    return row.off_flag if setting.value is False else row.flag
