"""Pools of ranks take turns: a process is in one group of ranks at a time.

Whoever loses its turn has lost what its ranks held; its next turn starts them anew.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet, finalize

from hyimg_cli.errors import MachineError, RankError
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.spec.events import ParallelReport

_POOLS: WeakSet[RankPool] = WeakSet()


def take(pool: RankPool) -> None:
    """From here on the turn is this pool's."""
    for other in list(_POOLS):
        if other is not pool:
            other.stop()


class ModelRanks(ABC):
    """The ranks that work with one loaded model. They end with `stop`, at the latest when this
    object is let go or the process ends.
    """

    def __init__(self, pool: RankPool) -> None:
        """The processes start at once, beside what comes before `load`."""
        self._pool = pool
        self.stop = finalize(self, _end, pool)
        _POOLS.add(pool)
        pool.launch()

    @property
    def member_pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..; empty where none runs."""
        return self._pool.member_pids

    def revive(self) -> None:
        """Ranks that an earlier job has lost, or that left for another pool's, start again, each
        with what it had. Raises MachineError where one does not come up.
        """
        take(self._pool)
        self._pool.revive()

    @abstractmethod
    def report(self) -> ParallelReport:
        """How the last job was spread."""

    @contextmanager
    def _loading(self, remedy: str) -> Iterator[None]:
        """The turn, for as long as each rank reads its own part of the model."""
        take(self._pool)
        try:
            yield
        except RankError as error:
            raise MachineError(
                f"the ranks did not load the model: {error.what}", hint=remedy, code="machine.ranks"
            ) from error


def _end(pool: RankPool) -> None:
    """End a pool's ranks, and let rank 0's parts go."""
    pool.stop()
    pool.here.parts.clear()
