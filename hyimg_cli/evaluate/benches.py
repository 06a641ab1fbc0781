"""Bench folders: where the pictures of two variants already stand side by side."""

from pathlib import Path

BENCH = "bench.json"
VARIANTS = ("A", "B")
# Here, in a folder, in a folder of folders such as runs/.
_PLACES = (BENCH, f"*/{BENCH}", f"*/*/{BENCH}")


def newest_bench(folder: Path) -> Path | None:
    """The bench folder in or under `folder` that was written last; None where there is none.

    One without pictures of both variants (`A/`, `B/`) does not count.
    """
    found = (path for place in _PLACES for path in folder.glob(place))
    complete = [p for p in found if all((p.parent / name).is_dir() for name in VARIANTS)]
    newest = max(complete, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if newest is None else newest.parent
