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
# Settings of earlier versions, and their names in a resume key; of those without one, none.
REMOVED = {
    "vae_channels_last": "vae_layout",
    "batched_decode": "decode_attention",
    "kv_by_slot": "kv_layout",
    "pass_graphs": None,
}
