"""Which pages of an arena are free, and how many hold each; no torch.

    page       0    1    2    3    4           of 4 rows each
    users      3    2    1    1    0           tables that hold it
    filled     4    4    2    3    -           rows that were ever written in it

The lowest free page is taken first, so most tables are runs of neighbours, and the end of the arena
becomes free. A page that several hold is never written where one of them may read: see `writable`.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence


class Pages:
    """Pages by number. Any thread may drop tables; one thread does everything else."""

    def __init__(self, rows: int) -> None:
        """`rows`: of a page."""
        self.rows = rows
        self.users: list[int] = []
        self.filled: list[int] = []
        self.peak = 0
        self._free: list[int] = []
        # Appended to wherever the garbage collector runs: a deque needs no lock.
        self._dropped: deque[Sequence[int]] = deque()

    def __len__(self) -> int:
        return len(self.users)

    @property
    def used(self) -> int:
        """Return the number of pages that are held."""
        self._collect()
        return len(self.users) - len(self._free)

    @property
    def free(self) -> int:
        """Return the number of pages that can be taken."""
        self._collect()
        return len(self._free)

    def add(self, count: int) -> None:
        """Append free pages."""
        for page in range(len(self.users), len(self.users) + count):
            heapq.heappush(self._free, page)
        self.users += [0] * count
        self.filled += [0] * count

    def compact(self) -> dict[int, int]:
        """Remove all free pages; return the new numbers of the last pages, which took their places.

        No table may be dropped meanwhile.
        """
        self._collect()
        count = len(self.users) - len(self._free)
        moved = [page for page in range(count, len(self.users)) if self.users[page]]
        moves = dict(zip(moved, sorted(self._free), strict=False))
        for page, place in moves.items():
            self.users[place], self.filled[place] = self.users[page], self.filled[page]
        del self.users[count:], self.filled[count:]
        self._free.clear()
        return moves

    def take(self, count: int) -> list[int]:
        """Return empty pages, held once."""
        assert count <= self.free, "pages are added before they are taken"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self.users[page], self.filled[page] = 1, 0
        self.peak = max(self.peak, len(self.users) - len(self._free))
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """Hold pages once more."""
        self._collect()  # or else a page that was dropped too early would still look held
        shared = list(pages)
        for page in shared:
            assert self.users[page], "only a page that is held can be shared"
            self.users[page] += 1
        return shared

    def drop(self, pages: Sequence[int]) -> None:
        """Hold pages once less, soon: at the next change."""
        self._dropped.append(pages)

    def writable(self, page: int, row: int) -> bool:
        """True if a holder that has the first `row` rows of a page may write the others.

        It holds the page alone, or nobody has written there.
        """
        self._collect()
        return self.users[page] == 1 or self.filled[page] <= row

    def clear_after(self, page: int, row: int) -> None:
        """Forget what was written after the first `row` rows of a page that one alone holds."""
        self._collect()
        if self.users[page] == 1:
            self.filled[page] = row

    def _collect(self) -> None:
        while self._dropped:
            for page in self._dropped.popleft():
                assert self.users[page], "a page is dropped once for each holder"
                self.users[page] -= 1
                if not self.users[page]:
                    heapq.heappush(self._free, page)
