"""A manifest's jobs through a session and into a folder, shown while they go: what `generate` and
`replay` have in common.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.cli import render
from hyimg_cli.cli.progress import Report
from hyimg_cli.cli.stopping import Stopper, stoppable
from hyimg_cli.engine import runner
from hyimg_cli.engine.choice import RunsPlans, session_for
from hyimg_cli.engine.sources import SourcesSeen, refuse_hopeless, seen, turned_sizes
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import run_info
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.settings.precedence import Setting
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.run import RunConfig

logger = logging.getLogger(__name__)


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
    found = look_at_sources(order.selection.of(accepted.jobs), config, style)
    with stoppable() as stopper, RunFolder(config.output.folder) as folder:
        run = runner.prepare(
            folder,
            accepted,
            config=config,
            selection=order.selection,
            policy=order.policy,
            found=found,
        )
        counts = runner.Summary.before(run)
        place = str(config.output.folder)
        with Report(counts, style, place=place, again=order.again, retry=order.retry) as report:
            report.outcomes((*run.invalid, *run.untried))
            if run.plan.jobs and not (run.untried and config.failure.fail_fast):
                folder.write_run(run_info(manifest, settings, run.plan))
                with (
                    _session(config, stopper) as session,
                    closing(session.run(run.plan, folder)) as events,
                ):
                    for event in events:
                        report.show(event)
        with _told("after the last job"):
            folder.confirm()
        if settings["report"].value:
            stopper.session = None  # from here on a signal stops at once
            with _told("no contact sheet", then=f"to have one: {order.again}"):
                _write_sheet(config.output.folder, style)
    return 1 if counts.failed or counts.invalid else 0


def look_at_sources(jobs: Sequence[Job], config: RunConfig, style: render.Style) -> SourcesSeen:
    """What there is of the jobs' sources; what there is not is told.

    Raises UsageError where no job has its sources, and the folder holds no result of any.
    """
    found = seen(jobs)
    if found.errors and not style.is_quiet:
        for text in found.named():
            render.note(render.printable(text))
    render.remarks(turned_sizes(found, jobs), style)
    refuse_hopeless(found, jobs, RunFolder(config.output.folder).results())
    return found


@contextmanager
def _session(config: RunConfig, stopper: Stopper) -> Iterator[RunsPlans]:
    """One that a signal stops."""
    session = stopper.session = session_for(config)
    try:
        yield session
    finally:
        with _told("the session did not close in order"):
            session.close()


@contextmanager
def _told(what: str, then: str = "") -> Iterator[None]:
    """What comes behind the jobs: it changes no exit code, so its failure is one line, with -v its
    traceback.
    """
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        is_ours = isinstance(error, HyimgError)
        why = str(error) if is_ours else f"{type(error).__name__}: {error}".rstrip(": ")
        render.note(" ".join("; ".join(filter(None, (f"{what}: {why}", then))).splitlines()))
        logger.info(what, exc_info=error)


def _write_sheet(folder: Path, style: render.Style) -> None:
    """The run's contact sheet, unless the one that is there shows the same."""
    from hyimg_cli.report.contact import is_current, write_contact_sheet

    if is_current(folder):
        return
    began = time.perf_counter()
    path = write_contact_sheet(folder)
    if not style.is_quiet:
        render.note(f"contact sheet: {path} (made in {time.perf_counter() - began:.1f} s)")
