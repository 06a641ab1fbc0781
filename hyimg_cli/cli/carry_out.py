"""A manifest's jobs through a session and into a folder, shown while they go: what `generate` and
`replay` have in common.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.cli import render
from hyimg_cli.cli.progress import Report
from hyimg_cli.cli.stopping import Stopper, stoppable
from hyimg_cli.engine import runner
from hyimg_cli.engine.choice import RunsPlans, session_for
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import run_info
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.settings.precedence import Setting
from hyimg_cli.spec.run import RunConfig


@dataclass(frozen=True)
class Order:
    """What is to be run: a manifest's jobs under settings, and what earlier results mean.

    `again` is the command line that goes on with this run, `retry` the one that tries its failed
    jobs again.
    """

    manifest: Manifest
    settings: Mapping[str, Setting]
    config: RunConfig
    selection: runner.Selection
    policy: runner.ResumePolicy
    again: str
    retry: str


def carry_out(order: Order, style: render.Style) -> int:
    """Runs what is left of the manifest, shows it, and returns the exit code."""
    manifest, settings, config = order.manifest, order.settings, order.config
    accepted = runner.accept(manifest, settings)
    if not accepted.invalid:  # a faulty line may be of the other kind
        render.remarks(without_effect(settings, accepted.jobs), style)
    with stoppable() as stopper, RunFolder(config.output.folder) as folder:
        run = runner.prepare(
            folder, accepted, config=config, selection=order.selection, policy=order.policy
        )
        counts = runner.Summary.before(run)
        place = str(config.output.folder)
        with Report(counts, style, place=place, again=order.again, retry=order.retry) as report:
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
