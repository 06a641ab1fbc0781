"""A replica's process: it takes pieces of the run's folder and works on them in its own session.

Its session, with the loaded model, lives from piece to piece. A piece belongs to it while it holds
the piece's lock; files and lines are written as by a run in one process. Only the latest progress
of each job is reported, once a second.
"""

import importlib
import logging
import os
import pickle
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from hyimg_cli.addresses import address_of
from hyimg_cli.engine.replicas.messages import Begin, Ended, EventBatch, Ready, Setup, Stop
from hyimg_cli.engine.replicas.pieces import in_order, model_of, with_jobs
from hyimg_cli.errors import HyimgError, Interrupted, OutputFolderError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import PLAN, RunFolder
from hyimg_cli.journal.keys import by_graphs, precision, source_digest
from hyimg_cli.journal.pieces import BegunJobs
from hyimg_cli.journal.provenance import versions
from hyimg_cli.models import registry
from hyimg_cli.parallel.launch import Parent
from hyimg_cli.parallel.watch import AwakeClock, Steps
from hyimg_cli.pipelines.failures import FailureLimit, failed_job, isolate, replicas_died
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobEnded,
    JobStarted,
    Outcome,
    Progress,
    Readiness,
)
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.printed import log_printable

# Seconds between attempts to take pieces that other processes hold, also in an object store.
_AGAIN_S, _AGAIN_STORE_S = 0.2, 2.0


def main(parent: Parent) -> None:
    """Run a replica that `local.LocalProcesses` launched, until it has ended."""
    worker, begins = Worker(pickle.loads(parent.inbox.get())), SimpleQueue[Begin]()

    def on_message(data: bytes) -> None:
        message: Begin | Stop = pickle.loads(data)
        if isinstance(message, Stop):
            worker.stop(message.signal_number)
        else:
            begins.put(message)

    parent.heard, parent.beat = on_message, worker.steps.beat
    parent.send(Ready(worker.facts))
    begins.get()
    for message in worker.run():
        parent.send(message)
    # Nothing is left to clean up: files and lines are on disk, and the lock is free.
    os._exit(0)


def replica_facts(config: RunConfig, plan: Plan) -> dict[str, object]:
    """Return the facts that must be equal wherever results of one folder are made, by name.

    The facts are those of this machine, or of the place that `config` names: settings that
    determine keys and pixels of jobs, the digest of the first source picture, fingerprints of
    models, and versions of packages. Raises CheckpointError.
    """
    choice, parallel = config.model, config.parallel
    device, dtype = precision(choice)
    source = next((path for job in plan.jobs for path in job.images), None)
    return {
        "device": device,
        "dtype": dtype,
        "decode_graphs": by_graphs(choice, parallel.picture_ranks),
        "tensor ranks": parallel.tensor_ranks,
        **({} if source is None else {f"source picture {source}": source_digest(source)}),
        **{one.model: registry.fingerprint(one.model, choice.revision) for one in plan.groups},
        **versions(),
    }


def folder_fact(folder: RunFolder, place: Path) -> dict[str, object]:
    """Return whether the run's folder can be seen from here, in the form of `replica_facts`."""
    is_there = folder.read_note(PLAN)
    return {f"output folder {place}": "visible" if is_there else "not visible"}


class Worker:
    """Works on one piece after another, as long as there are free ones."""

    def __init__(self, setup: Setup) -> None:
        """Import the session."""
        log_format = f"%(levelname)s replica {setup.number} %(name)s: %(message)s"
        log_printable()
        logging.basicConfig(level=setup.log_level, format=log_format)
        self._setup = setup
        # Facts of this machine; if they differ from the run's, the run rejects this replica.
        self._config = replace(setup.config, model=replace(setup.config.model, machine=None))
        whole = run_folder(setup.place, setup.shard, local=setup.local)
        self.facts = replica_facts(self._config, setup.whole) | folder_fact(whole, setup.place)
        self.steps = Steps(AwakeClock(most_s=3 * setup.beat_s))
        module, name = setup.session.split(":")
        self._session = getattr(importlib.import_module(module), name)(self._config)
        self._limit = FailureLimit(self._config.failure)
        self._stopped_by, self._stopped = 0, threading.Event()
        self._group = ""
        # Events to send: the latest progress by job, and any other event under None.
        self._events: dict[str | None, Event] = {}
        self._reported_at = 0.0

    def stop(self, signal_number: int) -> None:
        """Stop after the current step, and take no more pieces."""
        self._stopped_by = signal_number
        self._stopped.set()
        self._session.request_stop(signal_number)

    def run(self) -> Iterator[EventBatch | Ended]:
        """Yield events until no piece is left; the last message says how it ended."""
        ended = Ended()
        try:
            for event in self._take_pieces():
                self.steps.begin()  # the receiver may take a while to read it
                yield from self._report(event)
                self.steps.begin(self._next_step(event))
        except Interrupted:
            pass
        except HyimgError as error:
            ended = Ended(error)
        except Exception:
            ended = Ended(trace=traceback.format_exc())
        self.steps.begin()
        if self._events:
            yield EventBatch(tuple(self._events.values()))
        yield ended

    def _take_pieces(self) -> Iterator[Event]:
        """Take free pieces and yield their events, until all of their jobs have ended."""
        setup, loaded = self._setup, None
        left = dict(enumerate(setup.work.pieces))
        while left:
            for number in in_order(left.items(), setup.share, loaded):
                try:
                    folder = run_folder(setup.place, setup.shard, number, setup.local)
                    with folder:
                        ended = self._ended_jobs(left[number], folder)
                        if any(job.custom_id not in ended for job in left[number].jobs):
                            loaded = model_of(left[number])
                            yield from self._work(folder, left[number], ended)
                            if not self._limit.is_over:
                                del left[number]
                            break  # choose the next one among all
                        del left[number]
                except OutputFolderError as error:
                    if error.code != "output.in-use":
                        raise
                if self._limit.is_over:
                    return
            else:
                # What others hold becomes free if their process dies.
                self.steps.begin()
                self._stopped.wait(_AGAIN_STORE_S if address_of(setup.place) else _AGAIN_S)
            if self._limit.is_over:
                return
            if self._stopped_by:
                raise Interrupted(self._stopped_by)

    def _ended_jobs(self, piece: Plan, folder: RunFolder) -> set[str]:
        """Return the jobs of a piece that have ended in this run."""
        is_left = self._setup.work.is_left
        return {job.custom_id for job in piece.jobs if not is_left(job, folder.attempts)}

    def _work(self, folder: RunFolder, piece: Plan, ended: set[str]) -> Iterator[Event]:
        """Work on what is left of a piece; jobs at which a process died come last, each alone."""
        setup, before = self._setup, self._setup.work
        begun = BegunJobs(folder, setup.process, ended)
        left = [job for job in piece.jobs if job.custom_id not in ended]
        names = {job.custom_id for job in left}
        folder.attempts = Counter({name: before.attempts.get(name, 0) for name in names})
        folder.supersede({name: before.former[name] for name in names & before.former.keys()})
        folder.sign = lambda outcome: self._sign(outcome, begun)
        batches, given_up = isolate(left, begun.deaths)
        for job in given_up:
            attempt = folder.attempts[job.custom_id] + 1
            error = replicas_died(begun.deaths[job.custom_id])
            yield JobEnded(folder.append(failed_job(job, self._config, attempt, error)))
        try:
            for jobs in filter(None, batches):
                run = self._session.run(with_jobs(piece, jobs), folder, whole=setup.whole)
                with closing(run) as events:
                    for event in events:
                        yield self._note_event(event, begun)
                if self._limit.is_over:
                    return
        except Interrupted:
            begun.clear()  # nothing died
            raise

    def _note_event(self, event: Event, begun: BegunJobs) -> Event:
        """Return an event of the session with this replica's number; note begun jobs."""
        self._limit.add(event)
        if isinstance(event, JobStarted):
            begun.begin(event.custom_id)
        elif isinstance(event, JobEnded):
            begun.end(event.outcome.custom_id)
        elif isinstance(event, Readiness):
            return replace(event, replica=self._setup.number)
        return event

    def _sign(self, outcome: Outcome, begun: BegunJobs) -> Outcome:
        """Return an outcome with this replica's number, and with the deaths before it."""
        is_given_up = outcome.error is not None and outcome.error.code == "replica.died"
        deaths = () if is_given_up else begun.deaths.get(outcome.custom_id, ())
        repeats = (f"{who} died while running this job, which was started again" for who in deaths)
        warnings = (*outcome.warnings, *repeats)
        return replace(outcome, replica=self._setup.number, warnings=warnings)

    def _report(self, event: Event) -> Iterator[EventBatch]:
        now, job = time.monotonic(), event.custom_id if isinstance(event, Progress) else None
        # A job's next progress includes everything that this one reports.
        self._events[job] = event
        if job is None or now - self._reported_at >= self._setup.progress_s:
            yield EventBatch(tuple(self._events.values()))
            self._events, self._reported_at = {}, now

    def _next_step(self, event: Event) -> str:
        """Return the kind of step after an event; empty if it loads, compiles or captures."""
        match event:
            case GroupStarted():
                self._group = f"{event.model} {event.size_class}"
                kind = "start"
            case JobStarted() | JobEnded():
                kind = "job"
            case Progress(phase="denoise") if event.done == event.total:
                kind = "decode"
            case Progress() if event.custom_id:
                kind = event.phase
            case _:
                return ""
        return f"{kind} of {self._group}"
