"""`hyimg check`: every fault of a manifest and of the files it names, without loading a model."""

from collections.abc import Sequence

import typer

from hyimg_cli.batch.recipe import resolve_jobs
from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.engine import runner
from hyimg_cli.errors import HyimgError

FAULTY_MANIFEST, FAULTY_FILES = 2, 1


def check(
    ctx: typer.Context,
    manifest: o.ManifestPath,
    recipe: o.Recipe = None,
    model: o.Model = None,
    revision: o.Revision = None,
    bot_task: o.BotTaskName = None,
    size: o.SizeText = None,
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
) -> None:
    """Name every fault of a manifest. Exit code 2: faulty lines; 1: only unreadable pictures."""
    render.log_to_stderr(verbose)
    settings = o.settings_of(ctx.params)
    book = packaged.read(manifest)
    jobs, unresolved = resolve_jobs(book, settings, runner.cards(settings["revision"].value))
    in_lines = [*book.faults, *unresolved]
    in_files = runner.source_faults(jobs)
    _show([*in_lines, *in_files], job_count=len(jobs), as_json=as_json, is_quiet=quiet)
    raise typer.Exit(FAULTY_MANIFEST if in_lines else FAULTY_FILES if in_files else 0)


def _show(faults: Sequence[HyimgError], *, job_count: int, as_json: bool, is_quiet: bool) -> None:
    """Each fault, then the counts: on stdout as JSON, or on stderr as messages."""
    for fault in faults:
        if as_json:
            render.json_line({"fault": render.fault_as_json(fault)})
        else:
            render.error(fault)
    if as_json:
        render.json_line({"summary": {"jobs": job_count, "faults": len(faults)}})
    elif not is_quiet:
        render.note(f"{job_count} good jobs, {len(faults)} faults")
