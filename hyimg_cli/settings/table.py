"""All settings, by table of a recipe and by name; each is declared in a part of `RunConfig`."""

from dataclasses import fields
from typing import Any

from hyimg_cli.settings.option import Declaration, declarations
from hyimg_cli.settings.run import RunConfig

_output, *_parts, _failure = fields(RunConfig)
PARTS: dict[str, Any] = {part.name: part.type for part in (*_parts, _output, _failure)}
TABLES: dict[str, dict[str, Declaration]] = {
    table: {row.name: row for row in declarations(part, table)} for table, part in PARTS.items()
}
SETTINGS = {name: row for rows in TABLES.values() for name, row in rows.items()}
