"""A replica as a process beside the run, started by `local.LocalProcesses`."""

import os
import pickle
from queue import SimpleQueue

from hyimg_cli.engine.replicas.messages import Assign, PieceDone, Ready, Setup, Stop
from hyimg_cli.engine.replicas.pieces import PieceWorker
from hyimg_cli.parallel.child import Parent


def main(parent: Parent) -> None:
    """Work until the line ends."""
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
