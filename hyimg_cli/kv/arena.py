"""Keys and values of every sequence: one tensor of slots a layer and side, handed out in pages.

    arena     pages, who holds them (`pages`)       rank 0 alone
    storage   tensors [S, K, D] by layer, and rows   every rank: it repeats the leader's `changes`
              in main memory, by number
    tables    of sequences and of prefixes in the tree (`buffer`): a token at position p is in row
              p % page of the table's page p // page

A storage grows and shrinks layer by layer, so that only one layer is in memory twice.
"""

# Legend: S slot, K kv head, D head width
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Literal, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from hyimg_cli.errors import RankError
from hyimg_cli.kv.pages import Pages
from hyimg_cli.kv.slices import Slice

# Rows of a page. A prefix that ends within a page takes all of it; small models are run on CPUs.
# Flash attention reads pages of 256 rows, or multiples.
CPU_PAGE, GPU_PAGE = 4, 256
# A storage grows by at least one part in so many.
_GROWTH = 16
# More runs than this are read by an index.
_MOST_RUNS = 8
# Slots [start, stop), one after another.
Runs = Sequence[tuple[int, int]]


def page_rows(device: torch.device) -> int:
    """Return the rows of a page on a device."""
    return GPU_PAGE if device.type == "cuda" else CPU_PAGE


class Span:
    """Rows of a sequence: the slots that have them, in order."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._index: dict[torch.device, Tensor] = {}

    def __add__(self, after: "Span") -> "Span":
        """Return these rows, then others; neighbours are one run."""
        runs = list(self.runs)
        for start, stop in after.runs:
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return Span(runs)

    def index(self, device: torch.device) -> Tensor:
        """Return the slots as a tensor, made once on each device."""
        if device not in self._index:
            runs = self.runs or [(0, 0)]
            parts = [torch.arange(start, stop, device=device) for start, stop in runs]
            self._index[device] = torch.cat(parts)
        return self._index[device]


class Change(NamedTuple):
    """A change of a storage apart from forwards, as ranks repeat it; pickled.

    `resize`: to a number of slots; `copy`: the rows of each run to those of the next; `spill`: rows
    to main memory as a number; `restore`: back; `cut`: rows of a number as another one's; `forget`:
    a number.
    """

    kind: Literal["resize", "copy", "spill", "restore", "cut", "forget"]
    runs: Runs = ()
    numbers: tuple[int, ...] = ()


class Storage:
    """The rows of one rank: by layer on the layer's device."""

    def __init__(
        self, *, kv_heads: int, head_dim: int, dtype: torch.dtype, devices: Sequence[torch.device]
    ) -> None:
        """`devices` has one entry a layer."""

        def empty(device: torch.device) -> Tensor:
            return torch.empty(0, kv_heads, head_dim, dtype=dtype, device=device)

        self.keys_SKD = [empty(device) for device in devices]
        self.values_SKD = [empty(device) for device in devices]
        # Bytes of a row in all layers.
        self.row_bytes = 2 * len(devices) * kv_heads * head_dim * dtype.itemsize
        # How often the tensors have been replaced.
        self.resized = 0
        self._on_host: dict[int, Slice] = {}

    @property
    def slots(self) -> int:
        """Return the slots that every layer has."""
        return min(len(side) for side in (*self.keys_SKD, *self.values_SKD))

    @property
    def host_bytes(self) -> int:
        """Return the bytes of rows in main memory."""
        return sum(rows.nbytes for rows in self._on_host.values())

    def resize(self, slots: int) -> None:
        """Keep the first slots, and have as many as asked for.

        Raises torch.OutOfMemoryError; every layer then has at least the smaller number.
        """
        for sides in (self.keys_SKD, self.values_SKD):
            for layer, old_SKD in enumerate(sides):
                if len(old_SKD) == slots:
                    continue
                new_SKD = old_SKD.new_empty(slots, *old_SKD.shape[1:])
                kept = min(slots, len(old_SKD))
                new_SKD[:kept] = old_SKD[:kept]
                sides[layer] = new_SKD
                self.resized += 1
                del old_SKD

    def write(self, layer: int, span: Span, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        """Write rows of a layer, in the storage's dtype."""
        for sides, rows_TKD in ((self.keys_SKD, keys_TKD), (self.values_SKD, values_TKD)):
            at = 0
            for start, stop in span.runs:
                sides[layer][start:stop] = rows_TKD[at : at + stop - start]
                at += stop - start

    def read(
        self, layer: int, span: Span, more: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows, [S, K, D] each, and `more` rows after them.

        A view if they are neighbours and no more follow.
        """
        more_keys, more_values = more or (None, None)
        keys = _gathered(self.keys_SKD[layer], span, more_keys)
        return keys, _gathered(self.values_SKD[layer], span, more_values)

    def make(self, change: Change) -> None:
        """Make a change; after torch.OutOfMemoryError it can be made again."""
        runs, numbers, held = change.runs, change.numbers, self._on_host
        match change.kind:
            case "resize":
                self.resize(*numbers)
            case "copy":
                source, target = (Span(runs[half::2]) for half in (0, 1))
                for side in (*self.keys_SKD, *self.values_SKD):
                    moved_SKD = side.index_select(0, source.index(side.device))
                    side.index_copy_(0, target.index(side.device), moved_SKD)
            case "spill":
                span, layers = Span(runs), range(len(self.keys_SKD))
                read = [self.read(layer, span) for layer in layers]
                sides = (tuple(rows[None] for rows in side) for side in zip(*read, strict=True))
                held[numbers[0]] = Slice(*sides).to_host()
            case "restore":
                # A copy from pinned memory is queued, ahead of all later work.
                rows = held[numbers[0]].to_devices([side.device for side in self.keys_SKD])
                for layer, both in enumerate(zip(rows.keys, rows.values, strict=True)):
                    self.write(layer, Span(runs), *(side[0] for side in both))
            case "cut":
                number, made, start, stop = numbers
                held[made] = held[number].cut(start, stop)
            case "forget":
                held.pop(numbers[0], None)


def _gathered(side_SKD: Tensor, span: Span, more_TKD: Tensor | None) -> Tensor:
    if len(span.runs) > _MOST_RUNS:
        parts = [side_SKD.index_select(0, span.index(side_SKD.device))]
    else:
        parts = [side_SKD[start:stop] for start, stop in span.runs]
    if more_TKD is not None:
        parts.append(more_TKD.to(side_SKD.dtype))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else side_SKD[:0]


class Table(Protocol):
    """What holds pages, by their numbers."""

    pages: list[int]


class Arena:
    """All K/V of a model: a storage, and who holds its pages."""

    def __init__(
        self,
        storage: Storage,
        page: int,
        *,
        is_led: bool = False,
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        """`is_led`: other ranks repeat the `changes`. `generation`: how often they have ended."""
        self.storage, self.pages, self.generation = storage, Pages(page), generation
        self.tables: WeakSet[Table] = WeakSet()
        # How often pages have got other numbers.
        self.moves = 0
        self._is_led = is_led
        # What the ranks of `_known` are still to repeat.
        self._changes: list[Change] = []
        self._known = generation()
        self._numbers = count(1)
        # Appended to wherever the garbage collector runs: a deque needs no lock.
        self._forgotten: deque[int] = deque()

    @property
    def page(self) -> int:
        """Return the rows of a page."""
        return self.pages.rows

    @property
    def slots(self) -> int:
        """Return the slots of all pages, held or free."""
        return len(self.pages) * self.page

    def take(self, count: int) -> list[int]:
        """Return empty pages; the arena grows if too few are free.

        Raises torch.OutOfMemoryError.
        """
        lacking = count - self.pages.free
        if lacking > 0:
            try:
                self.reserve(max(lacking, len(self.pages) // _GROWTH))
            except torch.OutOfMemoryError:
                self.reserve(lacking)
        return self.pages.take(count)

    def reserve(self, count: int) -> None:
        """Add free pages. Raises torch.OutOfMemoryError; there are none more then."""
        self._resize(len(self.pages) + count)
        self.pages.add(count)

    def shrink(self) -> None:
        """Give back the memory of all free pages; the last pages in use take their places."""
        tables = [*self.tables]  # none is dropped while numbers change
        if moves := self.pages.compact():
            pairs = [(self._run(page), self._run(place)) for page, place in moves.items()]
            self._change(Change("copy", [*chain(*pairs)]))
            self.moves += 1
        for table in tables:
            table.pages[:] = [moves.get(page, page) for page in table.pages]
        self._resize(len(self.pages))

    def copied(self, page: int) -> int:
        """Return a page with another one's rows."""
        (made,) = self.take(1)
        self.pages.filled[made] = self.pages.filled[page]
        self._change(Change("copy", [self._run(page), self._run(made)]))
        return made

    def span(self, pages: Sequence[int], start: int, stop: int) -> Span:
        """Return the rows `[start, stop)` of a table."""
        runs: list[tuple[int, int]] = []
        while start < stop:
            number, row = divmod(start, self.page)
            slot, rows = pages[number] * self.page + row, min(self.page - row, stop - start)
            first = runs.pop()[0] if runs and runs[-1][1] == slot else slot
            runs.append((first, slot + rows))
            start += rows
        return Span(runs)

    def spilled(self, pages: Sequence[int], rows: int) -> int:
        """Copy the first rows of a table to main memory; return their number there."""
        number = next(self._numbers)
        self._change(Change("spill", self.span(pages, 0, rows).runs, (number,)))
        return number

    def restored(self, number: int, rows: int) -> list[int]:
        """Return pages with rows of main memory."""
        pages = self.take(-(-rows // self.page))
        self.fill(pages, rows)
        self._change(Change("restore", self.span(pages, 0, rows).runs, (number,)))
        return pages

    def fill(self, pages: Sequence[int], stop: int) -> None:
        """Record that the rows of a table are written up to `stop`."""
        filled = self.pages.filled
        for number in range(len(pages)):
            rows = min(self.page, stop - number * self.page)
            filled[pages[number]] = max(filled[pages[number]], rows)

    def cut(self, number: int, start: int, stop: int) -> int:
        """Copy rows in main memory; return the number of the copy."""
        made = next(self._numbers)
        self._change(Change("cut", (), (number, made, start, stop)))
        return made

    def forget(self, number: int) -> None:
        """Free rows in main memory, soon: at the next change. Any thread may do so."""
        self._forgotten.append(number)

    def changes(self) -> tuple[Change, ...]:
        """Return the changes since the last call; for new ranks, what they begin with."""
        self._settle()
        made, self._changes = self._changes, []
        return tuple(made)

    def confirm(self, generation: int) -> None:
        """Raise RankError if the ranks of that generation have ended, and rows with them."""
        if generation != self.generation():
            raise RankError(
                "keys and values of this job were lost with the ranks that held them",
                hint="run the same command again with --retry-failed, or add --max-retries",
                code="rank.lost",
                retryable=True,
            )

    def _resize(self, pages: int) -> None:
        self._change(Change("resize", (), (pages * self.page,)))

    def _run(self, page: int) -> tuple[int, int]:
        return page * self.page, (page + 1) * self.page

    def _change(self, change: Change) -> None:
        self._settle()
        self._make(change)

    def _settle(self) -> None:
        if self._known != self.generation():
            self._known, self._changes = self.generation(), []
            self._changes.append(Change("resize", (), (self.slots,)))
        while self._forgotten:
            self._make(Change("forget", (), (self._forgotten.popleft(),)))

    def _make(self, change: Change) -> None:
        self.storage.make(change)
        if self._is_led:
            self._changes.append(change)
