"""How much of a checkpoint has been read, by whatever library: pages of files in this process.

Weights are read through the pages of their files. As a file's pages come into a process the system
counts them; where a file is let go they leave again, so what counts is every rise.
"""

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class WeightsRead:
    """Bytes read since it was made, by this process or, with `of_children`, by those it started."""

    def __init__(self, *, of_children: bool = False) -> None:
        self.nbytes = 0
        self._of_children = of_children
        self._before = dict(self._pages())

    def look(self) -> int:
        """Count what was read since the last look; several a second miss little."""
        for process, pages in self._pages():
            self.nbytes += max(0, pages - self._before.get(process, pages)) * _PAGE
            self._before[process] = pages
        return self.nbytes

    def _pages(self) -> Iterable[tuple[str, int]]:
        """Pages of files in memory, by process; none where the system does not tell."""
        for process in self._children() if self._of_children else ["self"]:
            try:
                yield process, int((_PROC / process / "statm").read_text().split()[2])
            except (OSError, IndexError, ValueError):
                continue

    def _children(self) -> list[str]:
        try:
            lists = [path.read_text() for path in (_PROC / "self/task").glob("*/children")]
        except OSError:
            return []
        return [process for text in lists for process in text.split()]
