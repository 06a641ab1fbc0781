"""Buffers and slices of which other processes hold their own parts: every change is noted, to be
made there too.

    leader     a Mirror, and buffers that note what is done to them: new, forked, cut, freed ..
    follower   a FollowerKV: the same things by number, changed in the same order

Rows are written by the forwards, on each side its own. Changes may be made later than they were
noted: what is cut or taken, only a forward changes, and it comes behind them. When parts
are lost, all that was made before is void: using it is an error and never a wrong row.

A part with a home is one set of ranks' alone: `home` 0 is the leader's. What is made of it has the
same home, and no other set is told. Of another set's part the leader has shapes, and no memory.
"""

# Legend: H kv head, S slot, D head width
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import finalize

import torch

from hyimg_cli.errors import RankError
from hyimg_cli.kv.buffer import Buffer, Slice

Part: TypeAlias = Buffer | Slice


class Change(NamedTuple):
    """One change to a follower's parts, by their numbers; pickled. Made again where memory was
    short.

        new        an empty buffer of `numbers`: capacity
        copy       the first `numbers`: prefix tokens of the buffer `source`, into a buffer
        extend     the slice `source` behind the first `numbers`: length tokens of a buffer
        cut        tokens `numbers`: [start, stop) of the buffer or slice `source`, as a slice
        to_host    the slice `source` in main memory
        to_device  the slice `source` where the layers are
        free       the last holder has let a part go
    """

    kind: Literal["new", "copy", "extend", "cut", "to_host", "to_device", "free"]
    own: int
    # Numbers begin at 1, so no part is taken for a source that is not there.
    source: int = 0
    numbers: tuple[int, ...] = ()
    home: int | None = None


class Mirror:
    """The leader's notes. Any thread may let a buffer go; one thread does all else."""

    def __init__(self) -> None:
        self.generation = 0
        self._numbers = count(1)
        # Appended to by finalizers as well, wherever the collector runs: a deque needs no lock.
        self._changes: deque[Change] = deque()

    def number(self) -> int:
        """A number that nothing else has or had."""
        return next(self._numbers)

    def note(
        self,
        kind: Literal["new", "copy", "extend", "cut", "to_host", "to_device"],
        own: int,
        source: int = 0,
        *numbers: int,
        home: int | None = None,
    ) -> None:
        """Have a change made on every other rank of `home`, by default all, before its next
        forward.
        """
        self._changes.append(Change(kind, own, source, numbers, home))

    def follow(self, part: MirroredBuffer | MirroredSlice) -> None:
        """Note that a part is freed, once nobody holds it here."""
        # Nothing is left to be told when the process ends.
        finalize(part, self._freed, part.number, part.generation, part.home).atexit = False

    def drained(self) -> tuple[Change, ...]:
        """Take all changes noted since the last time, in order."""
        found = []
        while self._changes:
            found.append(self._changes.popleft())
        return tuple(found)

    def require(self, part: Part) -> int:
        """The number of a part that every rank has. Raises RankError for one that was lost."""
        assert isinstance(part, MirroredBuffer | MirroredSlice), "made by this mirror's buffers"
        if part.generation != self.generation:
            raise RankError(
                "keys and values of this job were lost with the ranks that held them",
                hint="run the same command again with --retry-failed, or give --max-retries",
                code="rank.lost",
                retryable=True,
            )
        return part.number

    def lose(self) -> None:
        """The parts of all that was made until now are gone."""
        self.generation += 1
        self._changes.clear()

    def _freed(self, number: int, generation: int, home: int | None) -> None:
        if generation == self.generation:
            self._changes.append(Change("free", number, home=home))


class MirroredBuffer(Buffer):
    """A buffer whose changes are noted."""

    def __init__(
        self,
        mirror: Mirror,
        *,
        devices: Sequence[torch.device],
        home: int | None = None,
        **shape: Any,
    ) -> None:
        """`shape` as a Buffer's. `home`: the one set of ranks that has it."""
        super().__init__(
            devices=[torch.device("meta")] * len(devices) if home else devices, **shape
        )
        self._mirror, self.home = mirror, home
        self.number, self.generation = mirror.number(), mirror.generation
        mirror.note("new", self.number, 0, self.capacity, home=home)
        mirror.follow(self)

    def cut(self, start: int, stop: int) -> Slice:
        source, home = self._mirror.require(self), self.home
        return _mirrored(self._mirror, home, super().cut(start, stop), "cut", source, start, stop)

    def extend(self, rows: Slice) -> None:
        own, source, at = self._mirror.require(self), self._required(rows), self.length
        super().extend(rows)
        self._mirror.note("extend", own, source, at, home=self.home)

    def take(self, other: Buffer, prefix: int) -> None:
        own, source = self._mirror.require(self), self._required(other)
        super().take(other, prefix)
        self._mirror.note("copy", own, source, prefix, home=self.home)

    def _required(self, other: Part) -> int:
        """The number of a part that every rank with this buffer has."""
        number = self._mirror.require(other)
        assert isinstance(other, MirroredBuffer | MirroredSlice), "as `require` knows"
        assert other.home in (None, self.home), "another set's rows are not here"
        return number


@dataclass(frozen=True, eq=False)
class MirroredSlice(Slice):
    """A slice whose changes are noted."""

    mirror: Mirror = field(kw_only=True)
    home: int | None = field(kw_only=True)
    number: int = field(kw_only=True)
    generation: int = field(kw_only=True)

    def on_host(self) -> Slice:
        source = self.mirror.require(self)
        rows = self if self.home else super().on_host()
        return _mirrored(self.mirror, self.home, rows, "to_host", source)

    def on(self, devices: Sequence[torch.device]) -> Slice:
        source = self.mirror.require(self)
        rows = self if self.home else super().on(devices)
        return _mirrored(self.mirror, self.home, rows, "to_device", source)

    def cut(self, start: int, stop: int) -> Slice:
        source, home = self.mirror.require(self), self.home
        return _mirrored(self.mirror, home, super().cut(start, stop), "cut", source, start, stop)


def _mirrored(
    mirror: Mirror,
    home: int | None,
    rows: Slice,
    kind: Literal["cut", "to_host", "to_device"],
    source: int,
    *numbers: int,
) -> MirroredSlice:
    """`rows` with a number of their own, under which followers make theirs."""
    part = MirroredSlice(
        rows.keys,
        rows.values,
        mirror=mirror,
        home=home,
        number=mirror.number(),
        generation=mirror.generation,
    )
    mirror.note(kind, part.number, source, *numbers, home=home)
    mirror.follow(part)
    return part


class FollowerKV:
    """A follower's parts, by the leader's numbers."""

    def __init__(
        self,
        new_buffer: Callable[[int], Buffer],
        devices: Sequence[torch.device],
        home: int = 0,
    ) -> None:
        """`new_buffer` makes an empty one of a capacity; `devices` has one entry a layer; `home`:
        the set of ranks that this one is of.
        """
        self.new_buffer = new_buffer
        self.devices, self.home = devices, home
        self.parts: dict[int, Part] = {}
        self._due: deque[Change] = deque()

    def change(self, changes: Sequence[Change]) -> None:
        """Make what the leader noted, behind what there was no memory for before.

        Raises torch.OutOfMemoryError, after which no forward may run before the next call: what is
        left is made then, first of all what has been freed meanwhile.
        """
        is_behind = bool(self._due)
        self._due.extend(one for one in changes if one.home in (None, self.home))
        if is_behind:
            self._free_early()
        while self._due:
            self._make(self._due[0])
            self._due.popleft()

    def _free_early(self) -> None:
        """Free what no change before its turn still needs: there may be room then for the rest."""
        needed: set[int] = set()
        for change in list(self._due):
            if change.kind == "free" and change.own in self.parts.keys() - needed:
                self._make(change)
                self._due.remove(change)
            else:
                needed |= {change.own, change.source}

    def _make(self, change: Change) -> None:
        kind, own, source, numbers, _ = change
        match kind, numbers:
            case "new", (capacity,):
                self.parts[own] = self.new_buffer(capacity)
            case "copy", (prefix,):
                self.buffer(own).take(self.buffer(source, prefix), prefix)
            case "extend", (at,):
                self.buffer(own, at).extend(self.rows(source))
            case "cut", (start, stop):
                is_buffer = isinstance(self.parts[source], Buffer)
                part = self.buffer(source, stop) if is_buffer else self.rows(source)
                self.parts[own] = part.cut(start, stop)
            case "to_host", ():
                self.parts[own] = self.rows(source).on_host()
            case "to_device", ():
                self.parts[own] = self.rows(source).on(self.devices)
            case "free", ():
                # Made and freed before it was told: both were noted, in their order.
                del self.parts[own]
            case _:
                raise AssertionError(f"{change} is no change")

    def buffer(self, number: int, length: int = 0) -> Buffer:
        """A buffer; its length is the leader's to know, and is told where it matters."""
        found = self.parts[number]
        assert isinstance(found, Buffer), "a number is a buffer's or a slice's for good"
        found.length = length
        return found

    def rows(self, number: int) -> Slice:
        found = self.parts[number]
        assert isinstance(found, Slice), "a number is a buffer's or a slice's for good"
        return found
