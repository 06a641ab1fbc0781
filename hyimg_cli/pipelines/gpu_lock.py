"""Pools of ranks take turns: a process is in one group of ranks at a time.

Whoever loses its turn has lost what its ranks held; its next turn starts them anew.
"""

from weakref import WeakSet

from hyimg_cli.parallel.ranks import RankPool

_POOLS: WeakSet[RankPool] = WeakSet()


def enter(pool: RankPool) -> None:
    """Have a pool take turns with the others."""
    _POOLS.add(pool)


def take(pool: RankPool) -> None:
    """From here on the turn is this pool's."""
    for other in list(_POOLS):
        if other is not pool:
            other.stop()


def end(pool: RankPool) -> None:
    """End a pool's ranks, and let rank 0's parts go."""
    pool.stop()
    pool.here.parts.clear()
