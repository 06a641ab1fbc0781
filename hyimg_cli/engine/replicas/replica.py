"""Run a replica over any transport: it works on pieces of a plan in its own session.

Its files are in the replica's folder when a message names them; the run moves them to their final
places. Only the latest progress of each job is sent, once a second, because a run may read messages
from a thousand replicas.
"""

import importlib
import logging
import os
import pickle
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from hyimg_cli.engine.replicas.messages import Assign, EventBatch, PieceDone, Ready, Setup, Stop
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.journal import OUTPUTS, FinishedJob, JobFolder
from hyimg_cli.journal.keys import by_graphs, precision, source_digest
from hyimg_cli.journal.provenance import versions
from hyimg_cli.models import registry
from hyimg_cli.parallel.launch import Parent
from hyimg_cli.parallel.watch import AwakeClock, Steps
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, GroupStarted, JobEnded, JobStarted, Progress
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.printed import log_printable


def main(parent: Parent) -> None:
    """Run a replica that `local.LocalProcesses` launched, until its connection ends."""
    setup: Setup = pickle.loads(parent.inbox.get())
    worker, inbox = PieceWorker(setup), SimpleQueue[Assign]()

    def heard(data: bytes) -> None:
        message: Assign | Stop = pickle.loads(data)
        if isinstance(message, Stop):
            worker.stop(message.signal_number)
        else:
            inbox.put(message)

    parent.heard, parent.beat = heard, worker.steps.beat
    parent.send(Ready(worker.facts))
    while True:
        for message in worker.run(inbox.get()):
            parent.send(message)
            if isinstance(message, PieceDone) and (message.error or message.trace):
                os._exit(1)


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


class ReplicaFolder(JobFolder):
    """`OUT/.replica-N`, with files named as in OUT.

    The latents of unfinished videos are in OUT. The run writes the lines once it has the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, run=folder.parent)
        (folder / OUTPUTS).mkdir(parents=True, exist_ok=True)

    def store(self, finished: Sequence[FinishedJob]) -> None:
        """Do nothing: the job's event carries its line and names its files."""


class PieceWorker:
    """Works on one piece after another."""

    def __init__(self, setup: Setup) -> None:
        """Import the session."""
        log_format = f"%(levelname)s replica {setup.number} %(name)s: %(message)s"
        log_printable()
        logging.basicConfig(level=setup.log_level, format=log_format)
        self._whole = setup.whole
        # Facts of this machine; if they differ from the run's, the run rejects this replica.
        config = replace(setup.config, model=replace(setup.config.model, machine=None))
        self.facts = replica_facts(config, setup.whole)
        self._folder = ReplicaFolder(setup.folder)
        self.steps = Steps(AwakeClock(most_s=3 * setup.beat_s))
        module, name = setup.session.split(":")
        self._session = getattr(importlib.import_module(module), name)(config)
        self._group = ""
        # Events to send: the latest progress by job, and any other event under None.
        self._events: dict[str | None, Event] = {}
        self._progress_s, self._told_at = setup.progress_s, 0.0

    def stop(self, signal_number: int) -> None:
        self._session.request_stop(signal_number)

    def run(self, given: Assign) -> Iterator[EventBatch | PieceDone]:
        """Yield the messages of a piece as it runs; the last one says how it ended."""
        ended = PieceDone()
        try:
            self._folder.attempts.update(given.attempts)
            run = self._session.run(given.piece, self._folder, whole=self._whole)
            with closing(run) as events:
                for event in events:
                    self.steps.begin()  # the receiver may take a while to read it
                    yield from self._report(event)
                    self.steps.begin(self._next_step(event))
        except Interrupted:
            pass
        except HyimgError as error:
            ended = PieceDone(error)
        except Exception:
            ended = PieceDone(trace=traceback.format_exc())
        self.steps.begin()
        yield ended

    def _report(self, event: Event) -> Iterator[EventBatch]:
        now, job = time.monotonic(), event.custom_id if isinstance(event, Progress) else None
        # A job's next progress includes everything that this one reports.
        self._events[job] = event
        if job is None or now - self._told_at >= self._progress_s:
            yield EventBatch(tuple(self._events.values()))
            self._events, self._told_at = {}, now

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
