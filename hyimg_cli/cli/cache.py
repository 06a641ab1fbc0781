"""`hyimg cache`: list, measure and clear what is kept on disk between runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hyimg_cli.cache.disk import KINDS, DiskStore, Entry
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.cli.completion import among
from hyimg_cli.cli.help import Command
from hyimg_cli.errors import UsageError

commands = typer.Typer(add_completion=False, rich_markup_mode=None)


@commands.callback()
def cache() -> None:
    """Show or clear the disk cache."""


@commands.command("list", cls=Command)
@o.takes("cache_dir")
def list_kinds(ctx: typer.Context, as_json: bool = o.AS_JSON) -> None:
    """List entries and bytes by kind."""
    entries = _store(ctx.params).entries()
    for kind in sorted({*KINDS, *(entry.kind for entry in entries)}):
        of_kind = [entry for entry in entries if entry.kind == kind]
        _show({"kind": kind}, of_kind, as_json=as_json)


@commands.command(cls=Command)
@o.takes("cache_dir")
def size(ctx: typer.Context, as_json: bool = o.AS_JSON) -> None:
    """Show the cache folder, its number of entries and their size."""
    folder = str(o.cache_folder(o.settings_of(ctx.params)) or "")
    _show({"folder": folder}, _store(ctx.params).entries(), as_json=as_json)


@commands.command(cls=Command)
@o.takes("cache_dir")
def clear(
    ctx: typer.Context,
    kind: str | None = o.option(
        f"Remove only one kind: {', '.join(KINDS)}.",
        panel="Selection",
        autocompletion=among(KINDS),
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Remove all entries, or those of one kind. A run in progress encodes what it needs again."""
    if kind is not None and kind not in KINDS:
        raise UsageError(f"--kind {kind!r} is not known", hint=f"allowed: {', '.join(KINDS)}")
    _show({"removed": kind or "all"}, _store(ctx.params).clear(kind), as_json=as_json)


def _store(given: Mapping[str, Any]) -> DiskStore:
    """Return the configured store for reading; its budget does not matter."""
    return DiskStore(o.cache_folder(o.settings_of(given)), budget_bytes=1)


def _show(named: Mapping[str, str], entries: Sequence[Entry], *, as_json: bool) -> None:
    """Print the number of entries and their size, as a JSON object or in columns."""
    count, nbytes = len(entries), sum(entry.nbytes for entry in entries)
    if as_json:
        render.json_line({**named, "entries": count, "bytes": nbytes})
    else:
        render.line(f"{' '.join(named.values())}  {count} entries  {nbytes} bytes")
