"""`hyimg pull`: fetch a model from the hub, and only what hyimg reads of it."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import CheckpointError, Interrupted, UsageError
from hyimg_cli.spec.units import bytes_text, counted

if TYPE_CHECKING:
    from hyimg_cli.doctor.offer import Offer
    from hyimg_cli.settings.run import RunConfig

# The exit code if a person says no.
DECLINED = 1


@o.takes("revision", "cache_dir")
def pull(
    ctx: typer.Context,
    model: str = typer.Argument(
        metavar="MODEL", help="Hub id, for example Qwen/Qwen-Image-Edit-2511."
    ),
    file: str | None = typer.Argument(
        None,
        metavar="FILE",
        show_default=False,
        help="Fetch only this .gguf or .safetensors file of it, for --model FILE --components ID.",
    ),
    yes: bool = o.switch("Fetch without asking.", "-y", "--yes"),
    dry_run: bool = o.switch("Show what would be fetched, and exit.", "--dry-run"),
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Fetch a model from the hub: only the files that hyimg reads.

    hyimg pull Qwen/Qwen-Image-Edit-2511

    Shows their sizes, the licence and whether this machine can run it, then asks. Run the same
    command again after a kill: it continues where it stopped. HF_HOME moves the hub's cache, and
    HF_TOKEN gives access to gated models. Exit code 1: you said no; 3: it cannot be fetched.
    """
    from hyimg_cli.loading import hub

    config = o.run_config(o.settings_of(ctx.params), Path("runs"))
    tell = render.note_unless(quiet)
    if file is None and _is_here(model, config):
        if not hub.is_id(model):
            tell(f"{model} is on this machine, so there is nothing to fetch")
            return
        if not hub.may_fetch():
            tell("HF_HUB_OFFLINE is set: the hub is not asked for newer files")
            _verify(model, config, quiet)
            return
    # Imported here: help pages do not need it.
    from hyimg_cli.doctor.offer import offer, offer_file, refuse_full_disk
    from hyimg_cli.loading.single_file import read_single_file
    from hyimg_cli.models.architectures import architecture_of

    revision = config.model.revision
    found = offer_file(model, file, revision) if file else offer(model, revision, config)
    if as_json:
        render.json_line(_facts(found))
    elif not quiet:
        _show(found)
    if dry_run:
        return
    if found.missing:
        refuse_full_disk(found)
        if not (yes or _agrees(found)):
            tell("nothing was fetched")
            raise typer.Exit(DECLINED)
        try:
            with hub.bars(shown=not quiet and sys.stderr.isatty()):
                hub.fetch(found.listing, found.names)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
    if file is None:
        _verify(model, config, quiet)
    else:
        architecture_of(read_single_file(hub.place_of(found.listing, file)))
    if not (as_json or quiet):
        render.line(f"run: {found.example}")


def _is_here(model: str, config: "RunConfig") -> bool:
    """Return True for a model of this machine. Raises CheckpointError for what cannot be one."""
    from hyimg_cli.loading import hub
    from hyimg_cli.models import registry

    try:
        with hub.stays_local():
            registry.resolve_model(model, config.model.revision, with_weights=False)
    except CheckpointError:
        if hub.is_id(model) and hub.may_fetch():
            return False
        raise
    return True


def _verify(model: str, config: "RunConfig", is_quiet: bool) -> None:
    """Compare the headers of what came with its configuration. Raises CheckpointError."""
    from hyimg_cli.cache.disk import DiskStore
    from hyimg_cli.loading import hub
    from hyimg_cli.models import registry

    store = DiskStore(config.cache.folder, config.cache.budget_bytes)
    with hub.stays_local():
        registry.check_complete(model, config.model, store)
    render.note_unless(is_quiet)(f"{model} is complete: its weights fit its configuration")


def _agrees(found: "Offer") -> bool:
    """Ask whether to fetch. Raises UsageError where nobody can answer."""
    size = bytes_text(found.to_fetch)
    if not sys.stdin.isatty():
        what = f"pull asks before it fetches {size}, but standard input is not a terminal"
        raise UsageError(what, hint="add --yes", code="usage.not-confirmed")
    return typer.confirm(f"Fetch {size}?", err=True)


def _facts(found: "Offer") -> dict[str, Any]:
    listing = found.listing
    return {
        "model": listing.model,
        "commit": listing.commit,
        "makes": found.makes,
        "licence": found.licence,
        "gated": listing.is_gated,
        "parts": dict(found.parts),
        "files": list(found.names),
        "to_fetch": found.to_fetch,
        "left_out": dict(found.left_out),
        "memory": {"status": found.memory.status, "found": found.memory.found},
        "example": found.example,
    }


def _show(found: "Offer") -> None:
    from hyimg_cli.loading import hub

    listing = found.listing
    gated = "gated" if listing.is_gated else "not gated"
    render.line(f"{listing.model} at {listing.commit[:12]}: licence {found.licence}, {gated}")
    for part, size in found.parts.items():
        render.line(f"  {part:<16}{bytes_text(size):>10}")
    if left := found.left_out:
        unread = bytes_text(sum(left.values()))
        render.line(f"left out: {counted(len(left), 'file')} that hyimg does not read ({unread})")
    render.line(f"memory: {found.memory.found}")
    if found.memory.status != "ok":
        render.line(f"  hint: {found.memory.hint}")
    total, rest = bytes_text(found.total), bytes_text(found.to_fetch)
    of = f" of {total}" if rest != total else ""
    free = f"{bytes_text(hub.free_bytes())} free in {hub.cache_folder()}"
    render.line(
        f"to fetch: {rest}{of}; {free}" if found.missing else f"to fetch: nothing of {total}"
    )
