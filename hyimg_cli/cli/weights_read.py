"""How much of a checkpoint has been read, by whatever library: pages of files in this process.

Weights are read through the pages of their files. The system counts a file's pages as they enter
the process. Closing a file lowers the count, so only increases are added up.
"""

from contextlib import suppress


class WeightsRead:
    """Bytes read since creation, by this process or, with `of_children`, by its children."""

    def __init__(self, *, of_children: bool = False) -> None:
        self.nbytes = 0
        self._of_children = of_children
        self._before = self._in_memory()

    def look(self) -> None:
        """Count the bytes read since the last look; a few looks a second miss little."""
        for process, nbytes in self._in_memory().items():
            self.nbytes += max(0, nbytes - self._before.get(process, nbytes))
            self._before[process] = nbytes

    def _in_memory(self) -> dict[int, int]:
        """Return bytes of files in memory by process; 0 if the system does not report it."""
        import psutil

        here, found = psutil.Process(), dict[int, int]()
        for process in here.children() if self._of_children else [here]:
            with suppress(psutil.Error):
                found[process.pid] = getattr(process.memory_info(), "shared", 0)
        return found
