"""Recipes: files of settings in TOML tables; `hyimg.toml` in the working folder and the user's own
are read without a flag.
"""

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hyimg_cli.errors import RecipeError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.settings.kinds import FOLDER, RUN_FOLDER
from hyimg_cli.settings.other_names import field_of
from hyimg_cli.settings.table import BY_NAME, TABLES
from hyimg_cli.settings.values import BadValue, nearest

FOLDERS_OWN = Path("hyimg.toml")


def users_own() -> Path | None:
    """Return the path of the user's own settings, whether it exists; None without a home."""
    shared = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        # The XDG specification says to ignore a relative path.
        return (shared if shared.is_absolute() else Path.home() / ".config") / FOLDERS_OWN
    except RuntimeError:  # a user without a home
        return None


def read_recipe(path: Path, *, is_named: bool = True, title: str = "") -> dict[str, Any]:
    """Return the settings in a recipe file by name, with typed values.

    Messages call the file `title`, or else by its name. Raises RecipeError at the first fault. A
    file that was found rather than named must also not set which weights are loaded, which scorers
    run, or which folders are written.
    """
    title = title or path.name
    try:
        tables = tomllib.loads(text_of(path, SETTINGS_BYTES, encoding="utf-8-sig", or_stream=True))
    except OSError as error:
        what = f"the recipe cannot be read: {error.strerror}"
        hint = "give the path of a .toml file"
        raise RecipeError(what, where=path, hint=hint, code="recipe.unreadable") from None
    # Also for bytes that are not UTF-8, numbers with too many digits, and too many brackets.
    except (ValueError, RecursionError) as error:
        what = f"not valid TOML: {error}"
        hint = 'write settings below their table, and texts in quotes: time_limit = "8h"'
        raise RecipeError(what, where=title, hint=hint, code="recipe.not-toml") from None
    settings: dict[str, Any] = {}
    for table, entries in tables.items():
        if table not in TABLES or not isinstance(entries, dict):
            raise _unknown(table, TABLES, where=title)
        for name, value in entries.items():
            where = f"{title}: {table}.{name}"
            if (row := TABLES[table].get(name)) is None:
                raise _unknown(name, TABLES[table], where=where)
            decides = row.pixels == "checkpoint" or row.table == "candidates"
            if not is_named and (decides or row.kind in (FOLDER, RUN_FOLDER)):
                what = f"hyimg.toml in the working folder cannot set {name}"
                hint = f"use --recipe {path.name} to allow it, or --no-config to ignore the file"
                raise RecipeError(what, where=where, hint=hint, code="recipe.not-by-itself")
            try:
                settings[name] = row.kind.read(value)
            except BadValue as bad:
                code = f"recipe.{bad.slug}"
                raise RecipeError(bad.what, where=where, hint=bad.hint, code=code) from None
    return settings


def _unknown(name: str, known: Iterable[str], *, where: str) -> RecipeError:
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else f"allowed here: {', '.join(known)}"
    if meant := BY_NAME.get(name) or BY_NAME.get(field_of(name) or ""):
        hint = f"write {meant.name} below [{meant.table}]"
    return RecipeError(f"{name} is not known", where=where, hint=hint, code="recipe.unknown")
