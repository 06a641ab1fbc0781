"""A rank beside rank 0, started by `ranks.RankPool`.

It reads tasks from its line and answers each. Rank 0 finishes its step before it stops, and needs
its ranks for that.
"""

import os
import pickle

from hyimg_cli.parallel.child import Parent
from hyimg_cli.parallel.ranks import Rank, form_group
from hyimg_cli.parallel.wire import Failed, Numerics


def main(parent: Parent) -> None:
    """Join the group, then work until the line ends; every way out is `os._exit`."""
    parent.send("up")
    join: tuple[str, Rank, Numerics] = pickle.loads(parent.inbox.get())
    store, rank, numerics = join
    try:
        numerics.apply()
        form_group(store, rank)
        parent.send("joined")
        while True:
            work, args = pickle.loads(parent.inbox.get())
            parent.send(work(rank, *args))
    except BaseException as error:
        # The group's other members wait for this one: the end of its sockets tells them.
        parent.send(_failed(rank, error))
        os._exit(1)


def _failed(rank: Rank, error: BaseException) -> Failed:
    failed = Failed.by(rank.number, error)
    try:
        pickle.loads(pickle.dumps(failed))
    except Exception:  # an error whose constructor wants more than its text
        return Failed(failed.rank, failed.what, failed.at)
    return failed
