"""One replica: `python -m hyimg_cli.engine.replicas.process FD`, started by `run.Replicas`.

It runs the pieces of a plan that it is given in a session of its own. Its files go into the run's
folder, its lines through the pipe: the one journal is the parent's. The pipe is read by a thread,
so that a stop reaches the session at once, and the parent's end ends this process whatever it
computes. Signals for stopping are the parent's to answer.
"""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from hyimg_cli.engine.replicas.messages import (
    Dispatch,
    FromReplica,
    OutcomeLine,
    PieceDone,
    Ready,
    Recorded,
    SessionEvent,
    Setup,
    Stop,
    ToReplica,
)
from hyimg_cli.errors import HyimgError, Interrupted
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.parallel.launch import received, send
from hyimg_cli.spec.events import Event, Outcome
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.printed import log_printable
from hyimg_cli.spec.run import RunConfig


class RunsPieces(Protocol):
    """The part of a session that a replica needs."""

    def request_stop(self, signal_number: int) -> None: ...

    def run(
        self, plan: Plan, folder: JobFolder, *, whole: Plan
    ) -> Generator[Event, None, None]: ...


class Channel:
    """The pipe to the parent: its end, in either direction, ends this process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._work: SimpleQueue[Setup | Dispatch] = SimpleQueue()
        self._recorded: SimpleQueue[Recorded] = SimpleQueue()
        self.session: RunsPieces | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def work(self) -> Setup | Dispatch:
        """The next thing to do; waits for it."""
        return self._work.get()

    def send(self, message: FromReplica) -> None:
        try:
            send(self._pipe, message)
        except OSError:
            os._exit(0)

    def record(self, outcome: Outcome) -> None:
        """Returns when the outcome's line is on disk."""
        self.send(OutcomeLine(outcome))
        self._recorded.get()

    def _read(self) -> None:
        while True:
            try:
                message: FromReplica | ToReplica = received(self._pipe)
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, Recorded):
                self._recorded.put(message)
            elif isinstance(message, Setup | Dispatch):
                self._work.put(message)
            elif isinstance(message, Stop) and self.session is not None:
                self.session.request_stop(message.signal_number)


class RemoteFolder(JobFolder):
    """The run's folder as a replica sees it: files are written here, lines by the parent."""

    def __init__(self, folder: Path, channel: Channel, attempts: dict[str, int]) -> None:
        super().__init__(folder)
        self._channel = channel
        self._attempts = attempts

    def attempts(self) -> dict[str, int]:
        return self._attempts

    def append(self, outcome: Outcome) -> None:
        self._channel.record(outcome)


def serve(pipe: Connection, ready: Callable[[], Callable[[RunConfig], RunsPieces]]) -> None:
    """Work until the pipe ends. `ready` imports what makes a session, and returns that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(pipe)
    make = ready()
    channel.send(Ready())
    setup = channel.work()
    assert isinstance(setup, Setup), "a replica is told first how it works"
    log_printable()
    log_format = f"%(levelname)s replica {setup.number} %(name)s: %(message)s"
    logging.basicConfig(level=setup.log_level, format=log_format)
    channel.session = make(setup.config)
    while True:
        given = channel.work()
        assert isinstance(given, Dispatch), "a replica is set up once"
        ended = _done(given, setup, channel, channel.session)
        channel.send(ended)
        if ended.error or ended.trace:
            os._exit(1)


def _done(given: Dispatch, setup: Setup, channel: Channel, session: RunsPieces) -> PieceDone:
    """How a piece ended. The session's own failure is the parent's to judge."""
    folder = RemoteFolder(setup.folder, channel, given.attempts)
    try:
        with closing(session.run(given.piece, folder, whole=setup.whole)) as events:
            for event in events:
                channel.send(SessionEvent(event))
    except Interrupted:
        return PieceDone()
    except HyimgError as error:
        return PieceDone(error)
    except Exception:
        return PieceDone(trace=traceback.format_exc())
    return PieceDone()


def _session() -> Callable[[RunConfig], RunsPieces]:
    from hyimg_cli.engine.session import Session

    return Session


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), _session)
