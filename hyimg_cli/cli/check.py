"""`hyimg check`: find all faults of a manifest and of its files, without loading a model."""

from collections.abc import Sequence

import typer

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.cli import render
from hyimg_cli.cli.request import request_of
from hyimg_cli.engine import runner
from hyimg_cli.engine.sources import faults, probe_sources, refuse_hopeless, turned_sizes
from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.resume import resume
from hyimg_cli.models import registry
from hyimg_cli.spec.units import counted

FAULTY_MANIFEST, FAULTY_FILES = 2, 1


def check(ctx: typer.Context) -> None:
    """Check a manifest and report every error. Exit code 2: it would not run; 1: some source images
    are unreadable.
    """
    render.log_to_stderr(ctx.params["verbose"])
    style, request = render.style_of(ctx.params), request_of(ctx.params)
    config, settings = request.config, request.settings
    jobs, in_lines = runner.examine(request.manifest, settings)
    _show(in_lines, style)
    if not in_lines:  # a faulty line may be of the kind that the setting affects
        render.remarks(runner.remarks(settings, jobs), style)
    store = DiskStore(config.cache.folder, config.cache.budget_bytes)
    render.remarks(registry.check_headers((job.model for job in jobs), config.model, store), style)
    # A pattern that matches no job is an error; the faults shown before it may explain why.
    chosen, _ = request.selection.of(jobs, config.model.revision)
    tell = render.note_unless(style.is_quiet)
    found = probe_sources(chosen, config.cache, fetches=True, tell=tell)
    in_files = faults(found, chosen)
    _show(in_files, style)
    if not style.as_json:
        render.remarks(turned_sizes(found, chosen), style)
        for text in found.sentences():
            tell(text)
    in_folder = list[HyimgError]()
    if not in_lines:
        # Reasons why the run would not start: every source is missing, or the output folder that
        # was given has other results with the same ids.
        run = run_folder(config.output.folder)
        try:
            refuse_hopeless(found, chosen, run)
            if settings["output_dir"].value is not None:
                resume(run, chosen, config, request.policy)
        except UsageError as error:
            in_folder.append(error)
    _show(in_folder, style)
    fault_count = len(in_lines) + len(in_files) + len(in_folder)
    if style.as_json:
        render.json_line({"summary": {"jobs": len(chosen), "faults": fault_count}})
    else:
        tell(f"{counted(len(chosen), 'job')}, {counted(fault_count, 'fault')}")
    is_refused = in_lines or in_folder
    raise typer.Exit(FAULTY_MANIFEST if is_refused else FAULTY_FILES if in_files else 0)


def _show(faults: Sequence[HyimgError], style: render.Style) -> None:
    """Print each fault, as JSON on stdout or as a message on stderr."""
    if not style.as_json:
        render.errors(faults)
        return
    for one in faults:
        facts = {"code": one.code, "message": one.what, "where": one.where, "hint": one.hint}
        render.json_line({"fault": facts})
