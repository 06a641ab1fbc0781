"""Tables: which pages of an arena have the K/V of a sequence, or of a part of one.

    sequence   s0 s1 s2 s3 | s4 s5 s6 s7 | s8 s9
    tree       [ Rows 0-6       ][ Rows 6-9     ]     a node: the pages that have its tokens
    context    [ Buffer, length 10               ]    shares them, and writes after them
    branch     [ Buffer, length 8 ] + canvas          shares them; the canvas is in no page

What shares a page may write behind its own rows if nobody has; otherwise it gets a copy of that
page. `length` counts committed tokens only; positions for RoPE are a separate matter and never
derived from it.
"""

from hyimg_cli.kv.arena import Arena, Span


class _Table:
    """Pages that something holds, from page `first` of the sequence on; dropped with it."""

    def __init__(self, arena: Arena, first: int = 0) -> None:
        self.arena, self.first = arena, first
        self.pages: list[int] = []
        self._generation = arena.generation()
        arena.tables.add(self)

    def __del__(self) -> None:
        self.arena.pages.drop(self.pages)

    def confirm(self) -> None:
        """Raise RankError if the ranks that held the rows have ended."""
        self.arena.confirm(self._generation)

    def share(self, other: "_Table", start: int, stop: int) -> None:
        """Hold the pages with another table's rows `[start, stop)`, counted in the sequence.

        They follow this table's own; a page that both begin with or end in is the other's then.
        """
        other.confirm()
        page = self.arena.page
        first, last = start // page, -(-stop // page)
        shared = self.arena.pages.share(other.pages[first - other.first : last - other.first])
        at = first - self.first
        self.arena.pages.drop(self.pages[at:])
        self.pages[at:] = shared


class Buffer:
    """K/V of one sequence: rows shared with others, then its own."""

    def __init__(self, arena: Arena, home: int | None = None) -> None:
        """`home`: the one set of ranks that computes its rows; None: all of them."""
        self.arena, self.home = arena, home
        self.length = 0
        self._table = _Table(arena)
        self._prefix = -1, -1, Span([])

    @property
    def pages(self) -> list[int]:
        """Return the pages of the sequence, in order."""
        return self._table.pages

    def reserve(self, stop: int) -> None:
        """Have pages for rows up to `stop`, which may be written after the prefix.

        Raises torch.OutOfMemoryError.
        """
        table, page = self._table, self.arena.page
        table.confirm()
        number, row = divmod(self.length, page)
        if row and not self.arena.pages.writable(table.pages[number], row):
            copied = self.arena.copied(table.pages[number])
            self.arena.pages.drop([table.pages[number]])
            table.pages[number] = copied
            self._prefix = -1, -1, Span([])
        if (lacking := -(-stop // page) - len(table.pages)) > 0:
            table.pages += self.arena.take(lacking)
        self.arena.fill(table.pages[number:], stop - number * page)

    def span(self, start: int, stop: int) -> Span:
        """Return the slots of the rows `[start, stop)`, for all layers of a forward."""
        self._table.confirm()
        return self.arena.span(self.pages, start, stop)

    @property
    def prefix(self) -> Span:
        """Return the slots of the committed rows; the same until they change or move."""
        moves, length, span = self._prefix
        if (moves, length) != (self.arena.moves, self.length):
            span = self.span(0, self.length)
            self._prefix = self.arena.moves, self.length, span
        self._table.confirm()
        return span

    def commit(self, length: int) -> None:
        """Make `[0, length)` the prefix."""
        assert self.length <= length <= len(self.pages) * self.arena.page, "a prefix only grows"
        self.length = length

    def truncate(self, length: int) -> None:
        """Shorten the prefix to `length`; rows after it are void."""
        assert 0 <= length <= self.length, "only what is committed can be cut off"
        self.length = length
        self._trim()

    def _trim(self) -> None:
        """Drop what was reserved after the prefix: a forward may have failed."""
        full, row = divmod(self.length, self.arena.page)
        last = full + (row > 0)
        self.arena.pages.drop(self.pages[last:])
        del self.pages[last:]
        if row:
            self.arena.pages.clear_after(self.pages[full], row)

    def rows(self, start: int, stop: int) -> "Rows":
        """Return the committed tokens `[start, stop)`, which share this buffer's pages."""
        assert stop <= self.length, "only committed tokens can be shared"
        self._trim()
        return Rows(self._table, start, stop)

    def extend(self, rows: "Rows") -> None:
        """Append rows to the prefix, which share their pages."""
        assert rows.start == self.length, "rows stay in their places"
        self._table.share(rows.table, rows.start, rows.stop)
        self.length = rows.stop

    def share_prefix(self, other: "Buffer", prefix: int) -> None:
        """Make another buffer's first `prefix` tokens the prefix of this empty one."""
        assert self.length == 0, "a prefix stands at the front"
        self.extend(other.rows(0, prefix))


class Rows:
    """The tokens `[start, stop)` of a sequence in pages: what the tree keeps of it."""

    def __init__(self, table: _Table, start: int, stop: int) -> None:
        """Share the pages of a table of the same sequence."""
        self.start, self.stop = start, stop
        self.table = _Table(table.arena, start // table.arena.page)
        self.table.share(table, start, stop)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.table.arena.storage.row_bytes

    def split(self, at: int) -> "tuple[Rows, Rows]":
        """Return the first `at` tokens and the rest; a page with tokens of both is shared."""
        middle = self.start + at
        return Rows(self.table, self.start, middle), Rows(self.table, middle, self.stop)

    def to_host(self) -> "HostRows":
        """Return a copy in main memory."""
        self.table.confirm()
        arena = self.table.arena
        rows = self.stop - self.table.first * arena.page
        return HostRows(arena, arena.spilled(self.table.pages, rows), self.start, self.stop)


class HostRows:
    """The same in main memory, from the beginning of the page that has `start`."""

    def __init__(self, arena: Arena, number: int, start: int, stop: int) -> None:
        self._arena, self._number, self.start, self.stop = arena, number, start, stop
        self._generation = arena.generation()

    def __del__(self) -> None:
        self._arena.forget(self._number)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self._arena.storage.row_bytes

    @property
    def _first(self) -> int:
        return self.start // self._arena.page * self._arena.page

    def split(self, at: int) -> "tuple[HostRows, HostRows]":
        """Return the first `at` tokens and the rest, each with its own memory."""
        middle = self.start + at
        return self._cut(self.start, middle), self._cut(middle, self.stop)

    def to_device(self) -> Rows:
        """Return the tokens in pages again. Raises torch.OutOfMemoryError, or RankError."""
        self._arena.confirm(self._generation)
        table = _Table(self._arena, self._first // self._arena.page)
        table.pages += self._arena.restored(self._number, self.stop - self._first)
        return Rows(table, self.start, self.stop)

    def _cut(self, start: int, stop: int) -> "HostRows":
        self._arena.confirm(self._generation)
        first = start // self._arena.page * self._arena.page
        number = self._arena.cut(self._number, first - self._first, stop - self._first)
        return HostRows(self._arena, number, start, stop)
