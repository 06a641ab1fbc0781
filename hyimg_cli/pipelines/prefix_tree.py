"""The tree of prefixes that a run's jobs share."""

from collections.abc import Callable
from typing import Any

from hyimg_cli.kv.tree import Host, KVTree
from hyimg_cli.settings.run import BatchConfig

_MB = 1_000_000


def new_prefix_tree(batch: BatchConfig, restore: Callable[[Any], Any]) -> KVTree[Any]:
    """Return a tree for these settings; `restore` moves rows from main memory to the device."""
    host = Host[Any](
        batch.prefix_cache_host_mb * _MB, spill=lambda rows: rows.to_host(), restore=restore
    )
    return KVTree[Any](
        batch.prefix_cache_mb * _MB,
        splits_text=not batch.is_invariant,
        host=host if batch.prefix_cache_host_mb else None,
    )
