"""`hyimg think`: run only the text stage, and write a manifest whose texts people can edit."""

import os
from pathlib import Path

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.cli.progress import show_run
from hyimg_cli.cli.request import request_of
from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.errors import UsageError
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.options import MODEL, RUN, SAMPLING

# The settings of a run, without those that only drawing or the output folder uses.
_SETTINGS = tuple(
    row.name
    for row in SETTINGS.values()
    if row.panel in (RUN, MODEL, SAMPLING)
    and row.concerns("pictures")
    and row.table not in ("output", "reuse")
    and row.name not in ("vae_use_tiling", "vae_dtype", "prewarm")
)


@o.takes(*_SETTINGS)
def think(
    ctx: typer.Context,
    output: Path = o.output(
        "File to write; lines it already has are skipped.",
        default=...,
        is_basic=True,
    ),
    inputs: list[str] | None = o.INPUTS,
    prompt: list[str] | None = o.PROMPT,
    recursive: bool = o.RECURSIVE,
    recipe: Path | None = o.RECIPE,
    force: bool = o.FORCE,
    select: list[str] | None = o.SELECT,
    limit: int | None = o.LIMIT,
    shard: str | None = o.SHARD,
    progress: str = o.PROGRESS,
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
    verbose: int = o.VERBOSE,
    help_all: bool = o.HELP_ALL,
) -> None:
    """Write the text of each job in a manifest, and draw nothing.

    The file is a manifest with one line per job. Edit its cot_text, then run it with generate;
    unedited, it gives the same pixels as a run without this step. Run the same command again to
    resume. Jobs that fail have no line, and the exit code is then 1.
    """
    render.log_to_stderr(verbose)
    style = render.style_of(ctx.params)
    for name in inputs or ():
        there = name != "-" and os.path.exists(output) and os.path.exists(name)
        if there and output.samefile(name):
            what, hint = "the texts would be written into the manifest itself", "choose another -o"
            raise UsageError(what, where=output, hint=hint, code="usage.same-file")
    again = render.command_line(ctx, without=["--force"])
    run = ManifestRun(request_of(ctx, output.parent))
    raise typer.Exit(show_run(run, style, again=again, retry=again, texts=output))
