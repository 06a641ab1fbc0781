"""A rank beside rank 0: `python -m hyimg_cli.parallel.member FD`, started by `ranks.RankPool`.

It reads tasks from its pipe and answers each. The pipe is read by a thread of its own, so that the
end of rank 0 ends this process at once, whatever it computes or waits for. Signals for stopping are
rank 0's to answer: it finishes the step, and needs its ranks for that.
"""

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from hyimg_cli.parallel.launch import send
from hyimg_cli.parallel.ranks import Rank, form_group
from hyimg_cli.parallel.wire import Failed, Numerics


def main(descriptor: int) -> None:
    """Join the group, then work until the pipe ends; every way out is `os._exit`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(descriptor)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    _send(pipe, "up")
    join: tuple[str, Rank, Numerics] = pickle.loads(inbox.get())
    store, rank, numerics = join
    try:
        numerics.apply()
        form_group(store, rank)
        _send(pipe, "joined")
        while True:
            work, args = pickle.loads(inbox.get())
            _send(pipe, work(rank, *args))
    except BaseException as error:
        # The group's other members wait for this one: the end of its sockets tells them.
        _send(pipe, _failed(rank, error))
        os._exit(1)


def _read(pipe: Connection, inbox: "SimpleQueue[bytes]") -> None:
    while True:
        try:
            inbox.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _send(pipe: Connection, message: object) -> None:
    try:
        send(pipe, message)
    except OSError:
        os._exit(0)


def _failed(rank: Rank, error: BaseException) -> Failed:
    failed = Failed.by(rank.number, error)
    try:
        pickle.loads(pickle.dumps(failed))
    except Exception:  # an error whose constructor wants more than its text
        return Failed(failed.rank, failed.what, failed.at)
    return failed


if __name__ == "__main__":
    main(int(sys.argv[1]))
