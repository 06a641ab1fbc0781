"""Recipe files: settings in TOML tables, read into values by name."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.errors import RecipeError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.settings.kinds import BadValue, nearest
from hyimg_cli.settings.table import TABLES


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe file by name, typed. Raises RecipeError at the first fault."""
    try:
        text = text_of(path, SETTINGS_BYTES, encoding="utf-8-sig", or_stream=True)
        tables = tomllib.loads(text)
    except OSError as error:
        what = f"the recipe cannot be read: {error.strerror}"
        raise RecipeError(what, where=str(path), code="recipe.unreadable") from None
    except UnicodeDecodeError:
        raise RecipeError("not UTF-8", where=path.name, code="recipe.not-toml") from None
    except tomllib.TOMLDecodeError as error:
        what = f"not valid TOML: {error}"
        raise RecipeError(what, where=path.name, code="recipe.not-toml") from None
    return dict(_recipe_settings(tables, path.name))


def _recipe_settings(tables: Mapping[str, Any], title: str) -> Iterator[tuple[str, Any]]:
    for table, entries in tables.items():
        if table not in TABLES or not isinstance(entries, dict):
            raise _unknown(f"[{table}]", table, TABLES, where=title)
        known = TABLES[table]
        for name, value in entries.items():
            where = f"{title}: {table}.{name}"
            if name not in known:
                raise _unknown(name, name, known, where=where)
            try:
                yield name, known[name].kind.read(value)
            except BadValue as bad:
                code = f"recipe.{bad.slug}"
                raise RecipeError(bad.what, where=where, hint=bad.hint, code=code) from None


def _unknown(shown_name: str, name: str, known: Iterable[str], *, where: str) -> RecipeError:
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else f"known here: {', '.join(known)}"
    return RecipeError(f"{shown_name} is not known", where=where, hint=hint, code="recipe.unknown")
