"""The tree of prefixes that a run's jobs share."""

from collections.abc import Callable

from hyimg_cli.kv.buffer import Slice
from hyimg_cli.kv.tree import Host, KVTree
from hyimg_cli.settings.run import BatchConfig

_MB = 1_000_000


def new_prefix_tree(batch: BatchConfig, restore: Callable[[Slice], Slice]) -> KVTree[Slice]:
    """Return a tree for these settings; `restore` moves rows from main memory to the device."""
    host = Host[Slice](
        batch.prefix_cache_host_mb * _MB, spill=lambda rows: rows.to_host(), restore=restore
    )
    return KVTree[Slice](
        batch.prefix_cache_mb * _MB,
        splits_text=not batch.is_invariant,
        host=host if batch.prefix_cache_host_mb else None,
    )
