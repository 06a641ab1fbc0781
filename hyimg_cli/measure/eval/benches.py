"""Bench folders: where the pictures of two variants already stand side by side."""

import json
from pathlib import Path

from hyimg_cli.files import TABLE_BYTES, text_of

BENCH = "bench.json"
VARIANTS = ("A", "B")
COMPARISON = "kv-reuse"
# Here, in a folder, in a folder of folders such as runs/.
_PLACES = (BENCH, f"*/{BENCH}", f"*/*/{BENCH}")


def newest_bench(folder: Path) -> Path | None:
    """The folder of a kv-reuse bench in or under `folder` that was written last; None where there
    is none.

    One without pictures of both variants (`A/`, `B/`) does not count.
    """
    found = (path for place in _PLACES for path in folder.glob(place))
    complete = [p for p in found if all((p.parent / name).is_dir() for name in VARIANTS)]
    of_reuse = [path for path in complete if _name(path) == COMPARISON]
    newest = max(of_reuse, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if newest is None else newest.parent


def _name(path: Path) -> str | None:
    """What a bench.json compares; None where it is none."""
    try:
        entry = json.loads(text_of(path, TABLE_BYTES))
    except (OSError, ValueError):
        return None
    return entry.get("name") if isinstance(entry, dict) else None
