"""`hyimg generate`: the main job. Translates the command line; the engine does the work."""

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.batch.consumed import without_effect
from hyimg_cli.batch.journal import RunFolder
from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.cli.plan import show_plan
from hyimg_cli.cli.run_options import takes_run_options
from hyimg_cli.cli.stopping import Stopper, stoppable
from hyimg_cli.engine import runner
from hyimg_cli.engine.choice import RunsPlans, session_for
from hyimg_cli.engine.provenance import run_info
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.spec.run import RunConfig

NOT_AGAIN = ("--force", "--no-resume", "--retry-failed")


@takes_run_options
def generate(ctx: typer.Context) -> None:
    """Make the pictures and videos of a manifest. A run that stopped goes on where it was."""
    render.log_to_stderr(ctx.params["verbose"])
    if ctx.params["dry_run"]:
        show_plan(ctx.params)
    else:
        raise typer.Exit(_carry_out(ctx.params, ctx.obj or ()))


def _carry_out(given: Mapping[str, Any], arguments: Sequence[str]) -> int:
    """Runs what is left of a manifest, shows it, and returns the exit code."""
    style = render.style_of(given)
    settings = o.settings_of(given)
    selection, policy = o.selection_of(given), o.resume_policy_of(given)
    manifest = packaged.read(given["manifest"])
    accepted = runner.accept(manifest, settings)
    if not accepted.invalid:  # a faulty line may be of the other kind
        render.remarks(without_effect(settings, accepted.jobs), style)
    config = o.run_config(settings, o.output_folder(given, settings, manifest.name))
    with stoppable() as stopper, RunFolder(config.output.folder) as folder:
        run = runner.prepare(folder, accepted, config=config, selection=selection, policy=policy)
        counts = runner.Summary.before(run)
        place = str(config.output.folder)
        with render.Report(counts, style, place=place, again=_again(arguments, place)) as report:
            report.outcomes(run.invalid)
            if run.plan.jobs:
                folder.write_run(run_info(manifest, settings, run.plan))
                with (
                    closing(_session(config, stopper)) as session,
                    closing(session.run(run.plan, folder)) as events,
                ):
                    for event in events:
                        report.show(event)
        if settings["report"].value:
            stopper.session = None  # from here on a signal stops at once
            _write_sheet(config.output.folder, style)
    return 1 if counts.failed or counts.invalid else 0


def _session(config: RunConfig, stopper: Stopper) -> RunsPlans:
    """One that a signal stops."""
    session = session_for(config)
    stopper.session = session
    return session


def _write_sheet(folder: Path, style: render.Style) -> None:
    """The run's contact sheet. Pictures are made by then: that it cannot be written is told."""
    from hyimg_cli.report.contact import is_current, write_contact_sheet

    if is_current(folder):
        return
    began = time.perf_counter()
    try:
        path = write_contact_sheet(folder)
    except Interrupted:
        raise
    except HyimgError as error:
        render.note(f"no contact sheet: {error}")
        return
    if not style.is_quiet:
        render.note(f"contact sheet: {path} (made in {time.perf_counter() - began:.1f} s)")


def _again(arguments: Sequence[str], place: str) -> str:
    """The command line that goes on with this run."""
    kept = [argument for argument in arguments if argument not in NOT_AGAIN]
    has_folder = any(a.startswith(("-o", "--output-dir")) for a in kept)
    return shlex.join(["hyimg", *kept, *([] if has_folder else ["-o", place])])
