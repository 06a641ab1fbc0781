"""A manifest's jobs through a session and into a folder, shown while they go: what `generate` and
`replay` have in common.
"""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hyimg_cli.addresses import address_of, shown_place
from hyimg_cli.cli import render
from hyimg_cli.cli.progress import Report
from hyimg_cli.cli.sentences import UNMARKED, toys
from hyimg_cli.cli.stopping import Stopper, stoppable
from hyimg_cli.cli.views import view_of
from hyimg_cli.engine import runner
from hyimg_cli.engine.choice import placed, refuse_missing_device, replicas_of, session_for
from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.sources import SourcesSeen, refuse_hopeless, seen, turned_sizes
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import here
from hyimg_cli.journal.provenance import run_info
from hyimg_cli.manifest.consumed import without_effect
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.report.follower import Follower
from hyimg_cli.settings.precedence import Setting
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """An order to run: a manifest's jobs under settings, and what earlier results mean.

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
    order = replace(order, config=placed(order.config))
    manifest, settings, config = order.manifest, order.settings, order.config
    accepted = runner.accept(manifest, settings)
    # Of a million lines none is needed any more: the jobs are.
    manifest = replace(manifest, lines=())
    order = replace(order, manifest=manifest)
    if not accepted.invalid:  # a faulty line may be of the other kind
        render.remarks(without_effect(settings, accepted.jobs), style)
    refuse_missing_device(config)
    if not settings["metadata"].value:
        render.remarks([UNMARKED], style)
    jobs = order.selection.of(accepted.jobs, config.model.revision).jobs
    found = look_at_sources(jobs, config, style)
    with stoppable() as stopper, run_folder(config.output.folder) as folder:
        run = runner.prepare(
            folder,
            accepted,
            jobs,
            config=config,
            policy=order.policy,
            found=found,
        )
        render.remarks(toys(run.plan.jobs, settings), style)
        counts = runner.Summary.before(run)
        with (
            _keep_rates(run.plan, config, style) as eta,
            _page(settings, config.output.folder, style) as follow,
        ):
            with _report(order, eta, run.plan, counts, style) as report:
                report.outcomes((*run.invalid, *run.untried))
                if run.to_finish:
                    from hyimg_cli.engine.again import finished_again  # imports scipy

                    outcomes = finished_again(folder, run.to_finish, config)
                    report.finished_again(stopper.between(outcomes), follow)
                if run.plan.jobs and not run.is_over:
                    place = asdict(config.model.place or here())
                    folder.write_run(run_info(manifest, settings, run.plan) | {"place": place})
                    run_plan(run.plan, folder, config, stopper, (eta.add, report.show, follow))
            folder.confirm()
            stopper.session = None  # from here on a signal stops at once
    return 1 if counts.failed or counts.invalid or counts.gated else 0


def look_at_sources(
    jobs: Sequence[Job], config: RunConfig, style: render.Style, *, fetches: bool = False
) -> SourcesSeen:
    """The jobs' sources that can be read; those that cannot are told. `fetches`: see `seen`.

    Raises UsageError where no job has its sources, and the folder holds no result of any.
    """
    tell = str if style.is_quiet else render.note
    found = seen(jobs, config.cache, fetches=fetches, tell=tell)
    if not style.is_quiet:
        for text in found.named():
            render.note(text)
    render.remarks(turned_sizes(found, jobs), style)
    refuse_hopeless(found, jobs, run_folder(config.output.folder).results())
    return found


def run_plan(
    plan: Plan,
    folder: JobFolder,
    config: RunConfig,
    stopper: Stopper,
    readers: Sequence[Callable[[Event], None]],
) -> None:
    """Run a plan in a session that a signal stops; each event goes to every reader, in order."""
    session = stopper.session = session_for(config)
    try:
        with closing(session.run(plan, folder)) as events:
            for event in events:
                for read in readers:
                    read(event)
    finally:
        with _told("the session did not close in order"):
            session.close()


@contextmanager
def _told(what: str, then: str = "") -> Iterator[None]:
    """Work behind the jobs: it changes no exit code, so its failure is one line, with -v its
    traceback.
    """
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        is_ours = isinstance(error, HyimgError)
        why = str(error) if is_ours else f"{type(error).__name__}: {error}".rstrip(": ")
        render.note("; ".join(filter(None, (f"{what}: {why}", then))))
        logger.info(what, exc_info=error)


def _report(
    order: Order, eta: Eta, plan: Plan, counts: runner.Summary, style: render.Style
) -> Report:
    """Display of the run, with the time that is left of it."""
    config = order.config
    view = view_of(style, counts.left, eta, replicas=replicas_of(plan, config))
    place = shown_place(config.output.folder)
    return Report(counts, style, view, place=place, again=order.again, retry=order.retry)


@contextmanager
def _keep_rates(plan: Plan, config: RunConfig, style: render.Style) -> Iterator[Eta]:
    """Estimate of the time left, by earlier runs; what this one took is kept, however it ends."""
    kept = KeptRates(config)
    # The processor's seconds stand for the age of a process that has only read its manifest.
    eta = Eta(plan, config, kept.read(plan), age_s=time.process_time())
    try:
        yield eta
    finally:
        with _told("no rates are kept of this run"):
            kept.keep(plan, eta.rates())
            render.remarks(kept.take_notes(), style)


@contextmanager
def _page(
    settings: Mapping[str, Setting], folder: Path, style: render.Style
) -> Iterator[Callable[[Event], None]]:
    """Keep the run's page up to date, event by event; whatever ends the run, the page says
    what was done.
    """
    address = address_of(folder)
    if address and settings["report"].value and not style.is_quiet:
        bring = shlex.join(["hyimg", "merge", address, "-o", "FOLDER"])
        render.note(f"no report.html at an address; {bring} brings all of it here")
    if address or not settings["report"].value:
        yield lambda event: None
        return
    follower = Follower(folder)
    try:
        yield follower.look
    finally:
        again = shlex.join(["hyimg", "report", str(folder)])
        with _told("no report", then=f"to have one: {again}"):
            if follower.close() and not style.is_quiet:
                render.note(f"report: {folder / 'report.html'}")
