"""A replica as a process beside the run: `python -m hyimg_cli.engine.replicas.process`, started by
`local.LocalProcesses`.
"""

import os
import pickle
import sys
from collections.abc import Callable
from queue import SimpleQueue

from hyimg_cli.engine.replicas.messages import Assign, PieceDone, Ready, Setup, Stop
from hyimg_cli.engine.replicas.pieces import PieceWorker
from hyimg_cli.parallel.child import Parent
from hyimg_cli.parallel.watch import Beat


def main() -> None:
    """Work until the line ends."""
    inbox: SimpleQueue[Setup | Assign] = SimpleQueue()
    beat: list[Callable[[], Beat]] = [Beat]
    stops: list[Callable[[int], None]] = []

    def heard(data: bytes) -> None:
        message: Setup | Assign | Stop = pickle.loads(data)
        if not isinstance(message, Stop):
            inbox.put(message)
        elif stops:
            stops[0](message.signal_number)

    parent = Parent(sys.argv[1:], heard, lambda: beat[0]())
    setup = inbox.get()
    assert isinstance(setup, Setup), "a replica is told first how it works"
    worker = PieceWorker(setup)
    beat[0] = worker.steps.beat
    stops.append(worker.stop)
    parent.send(Ready(worker.facts))
    while True:
        given = inbox.get()
        assert isinstance(given, Assign), "a replica is set up once"
        for message in worker.run(given):
            parent.send(message)
            if isinstance(message, PieceDone) and (message.error or message.trace):
                os._exit(1)


if __name__ == "__main__":
    main()
