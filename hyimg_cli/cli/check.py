"""`hyimg check`: every fault of a manifest and of the files it names, without loading a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hyimg_cli.cli import inputs, render
from hyimg_cli.cli import options as o
from hyimg_cli.cli.selection import resume_policy_of, selection_of
from hyimg_cli.engine import runner
from hyimg_cli.engine.sources import (
    SourcesSeen,
    faults,
    probe_sources,
    refuse_hopeless,
    turned_sizes,
)
from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.settings.precedence import Setting
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.units import counted

FAULTY_MANIFEST, FAULTY_FILES = 2, 1


def check(ctx: typer.Context) -> None:
    """Name every fault of the lines, then of the pictures that they name."""
    render.log_to_stderr(ctx.params["verbose"])
    style, settings = render.style_of(ctx.params), o.settings_of(ctx.params)
    selection = selection_of(ctx.params)
    manifest = inputs.manifest_of(ctx.params, settings)
    jobs, in_lines = runner.examine(manifest, settings)
    _show(in_lines, style)
    if not in_lines:  # a faulty line may be of the other kind
        render.remarks(without_effect(settings, jobs), style)
    # A pattern that matches no job ends here, behind the faults that may be why.
    chosen = selection.of(jobs, settings["revision"].value).jobs
    config = o.run_config(settings, o.output_folder(ctx.params, settings, manifest.name))
    tell = str if style.is_quiet else render.note
    found = probe_sources(chosen, config.cache, fetches=True, tell=tell)
    in_files = faults(found, chosen)
    _show(in_files, style)
    if not (style.as_json or style.is_quiet):
        render.remarks(turned_sizes(found, chosen), style)
        for text in found.sentences():
            render.note(text)
    in_folder = [] if in_lines else _refused(chosen, found, config, settings, ctx.params)
    _show(in_folder, style)
    _close(len(chosen), len(in_lines) + len(in_files) + len(in_folder), style)
    is_refused = in_lines or in_folder
    raise typer.Exit(FAULTY_MANIFEST if is_refused else FAULTY_FILES if in_files else 0)


def _refused(
    jobs: Sequence[Job],
    found: SourcesSeen,
    config: RunConfig,
    settings: Mapping[str, Setting],
    given: Mapping[str, Any],
) -> list[HyimgError]:
    """Why the run would not begin, if so: there are no sources, or the folder which is named for
    the results holds others by the same ids.
    """
    run = run_folder(config.output.folder)
    try:
        refuse_hopeless(found, jobs, run.results())
        if settings["output_dir"].value is not None:
            runner.sift(run, jobs, config, resume_policy_of(given))
    except UsageError as error:
        return [error]
    return []


def _show(faults: Sequence[HyimgError], style: render.Style) -> None:
    """Each fault: on stdout as JSON, or on stderr as a message."""
    if not style.as_json:
        render.errors(faults)
        return
    for fault in faults:
        render.json_line({"fault": render.fault_as_json(fault)})


def _close(job_count: int, fault_count: int, style: render.Style) -> None:
    """The counts behind the faults."""
    if style.as_json:
        render.json_line({"summary": {"jobs": job_count, "faults": fault_count}})
    elif not style.is_quiet:
        render.note(f"{counted(job_count, 'job')}, {counted(fault_count, 'fault')}")
