"""Buffers and slices of which other processes hold their own parts: every change is noted, to be
made there too.

    leader     a Mirror, and buffers that note what is done to them: new, forked, cut, let go ..
    follower   a FollowerKV: the same things by number, changed in the same order

Rows are written by the forwards, on each side its own. Changes may be made later than they were
noted: what a cut copies, or a fork, only a forward changes, and it comes behind them. When parts
are lost, all that was made before is void: using it is an error and never a wrong row.
"""

# Legend: H kv head, S slot, D head width
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeAlias, cast
from weakref import finalize

import torch

from hyimg_cli.errors import RankError
from hyimg_cli.kv.buffer import Buffer, Slice

Part: TypeAlias = Buffer | Slice


class Change(Protocol):
    """One change to the parts of a follower; pickled. Made again where memory was short."""

    @property
    def parts(self) -> set[int]:
        """Numbers of what it makes and reads."""

    def make(self, kv: FollowerKV) -> None: ...


class Handle:
    """The number of a buffer or a slice in its generation; noted as freed when it is let go."""

    def __init__(self, number: int, generation: int) -> None:
        self.number = number
        self.generation = generation


class Mirror:
    """The leader's notes. Any thread may let a buffer go; one thread does all else."""

    def __init__(self) -> None:
        self.generation = 0
        self._numbers = count(1)
        # Appended to by finalizers as well, wherever the collector runs: a deque needs no lock.
        self._changes: deque[Change] = deque()

    def handle(self) -> Handle:
        """A number that nothing else has or had."""
        handle = Handle(next(self._numbers), self.generation)
        # Nothing is left to be told when the process ends.
        finalize(handle, self._freed, handle.number, handle.generation).atexit = False
        return handle

    def note(self, change: Change) -> None:
        self._changes.append(change)

    def drained(self) -> tuple[Change, ...]:
        """What was noted since the last time, in order."""
        found = []
        while self._changes:
            found.append(self._changes.popleft())
        return tuple(found)

    def require(self, part: Part) -> int:
        """The number of a part that every rank has. Raises RankError for one that was lost."""
        assert isinstance(part, MirroredBuffer | MirroredSlice), "made by this mirror's buffers"
        if part.handle.generation != self.generation:
            raise RankError(
                "keys and values of this job were lost with the ranks that held them",
                hint="run the same command again with --retry-failed, or give --max-retries",
                code="rank.lost",
                retryable=True,
            )
        return part.handle.number

    def lose(self) -> None:
        """The parts of all that was made until now are gone."""
        self.generation += 1
        self._changes.clear()

    def _freed(self, number: int, generation: int) -> None:
        if generation == self.generation:
            self.note(Free(number))


class MirroredBuffer(Buffer):
    """A buffer whose changes are noted."""

    def __init__(
        self,
        mirror: Mirror,
        *,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        super().__init__(
            kv_heads=kv_heads, head_dim=head_dim, capacity=capacity, dtype=dtype, devices=devices
        )
        self._mirror = mirror
        self.handle = mirror.handle()
        mirror.note(New(self.handle.number, capacity))

    def cut(self, start: int, stop: int) -> Slice:
        source = self._mirror.require(self)
        return _mirrored(
            self._mirror,
            super().cut(start, stop),
            lambda own: CopyOfPart(own, source, start, stop),
        )

    def extend(self, rows: Slice) -> None:
        own, source, at = self._mirror.require(self), self._mirror.require(rows), self.length
        super().extend(rows)
        self._mirror.note(Extend(own, source, at))

    def fork(self, prefix: int, capacity: int) -> Buffer:
        source = self._mirror.require(self)
        other = cast(MirroredBuffer, super().fork(prefix, capacity))
        self._mirror.note(Copy(other.handle.number, source, prefix))
        return other

    def _empty(self, capacity: int) -> Buffer:
        heads, _, width = self.keys_HSD[0].shape
        return MirroredBuffer(
            self._mirror,
            kv_heads=heads,
            head_dim=width,
            capacity=capacity,
            dtype=self.keys_HSD[0].dtype,
            devices=[keys.device for keys in self.keys_HSD],
        )


@dataclass(frozen=True, eq=False)
class MirroredSlice(Slice):
    """A slice whose changes are noted."""

    mirror: Mirror = field(kw_only=True)
    handle: Handle = field(kw_only=True)

    def on_host(self) -> Slice:
        source = self.mirror.require(self)
        return _mirrored(self.mirror, super().on_host(), lambda own: ToHost(own, source))

    def on(self, devices: Sequence[torch.device]) -> Slice:
        source = self.mirror.require(self)
        return _mirrored(self.mirror, super().on(devices), lambda own: ToDevice(own, source))

    def split(self, at: int) -> tuple[Slice, Slice]:
        source = self.mirror.require(self)
        head, tail = super().split(at)
        stop = at + tail.length
        return (
            _mirrored(self.mirror, head, lambda own: CopyOfPart(own, source, 0, at)),
            _mirrored(self.mirror, tail, lambda own: CopyOfPart(own, source, at, stop)),
        )


def _mirrored(mirror: Mirror, rows: Slice, made_by: Callable[[int], Change]) -> MirroredSlice:
    """`rows` with a number of their own, under which followers make theirs."""
    handle = mirror.handle()
    mirror.note(made_by(handle.number))
    return MirroredSlice(rows.keys, rows.values, mirror=mirror, handle=handle)


class FollowerKV:
    """A follower's parts, by the leader's numbers."""

    def __init__(self, new_buffer: Callable[[int], Buffer], devices: Sequence[torch.device]):
        """`new_buffer` makes an empty one of a capacity; `devices` has one entry a layer."""
        self.new_buffer = new_buffer
        self.devices = devices
        self.parts: dict[int, Part] = {}
        self._due: deque[Change] = deque()

    def change(self, changes: Sequence[Change]) -> None:
        """Make what the leader noted, behind what there was no memory for before.

        Raises torch.OutOfMemoryError, after which no forward may run before the next call: what is
        left is made then, first of all what has been let go meanwhile.
        """
        is_behind = bool(self._due)
        self._due.extend(changes)
        if is_behind:
            self._free_early()
        while self._due:
            self._due[0].make(self)
            self._due.popleft()

    def _free_early(self) -> None:
        """Let go what nothing before its turn still needs: there may be room then for the rest."""
        needed: set[int] = set()
        for change in list(self._due):
            if isinstance(change, Free) and change.own in self.parts.keys() - needed:
                change.make(self)
                self._due.remove(change)
            else:
                needed |= change.parts

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


@dataclass(frozen=True)
class _OfOne:
    """A change of one part."""

    own: int

    @property
    def parts(self) -> set[int]:
        return {self.own}


@dataclass(frozen=True)
class _OfTwo:
    """A change of one part by another."""

    own: int
    source: int

    @property
    def parts(self) -> set[int]:
        return {self.own, self.source}


@dataclass(frozen=True)
class New(_OfOne):
    """An empty buffer."""

    capacity: int

    def make(self, kv: FollowerKV) -> None:
        kv.parts[self.own] = kv.new_buffer(self.capacity)


@dataclass(frozen=True)
class Copy(_OfTwo):
    """Another buffer's first `prefix` tokens."""

    prefix: int

    def make(self, kv: FollowerKV) -> None:
        kv.buffer(self.own).take(kv.buffer(self.source, self.prefix), self.prefix)


@dataclass(frozen=True)
class Extend(_OfTwo):
    """A slice's tokens, behind the first `at` of a buffer."""

    at: int

    def make(self, kv: FollowerKV) -> None:
        kv.buffer(self.own, self.at).extend(kv.rows(self.source))


@dataclass(frozen=True)
class CopyOfPart(_OfTwo):
    """Tokens `[start, stop)` of a buffer or of a slice, as a slice of its own."""

    start: int
    stop: int

    def make(self, kv: FollowerKV) -> None:
        source = kv.parts[self.source]
        if isinstance(source, Buffer):
            source = kv.buffer(self.source, self.stop)
        kv.parts[self.own] = source.cut(self.start, self.stop)


@dataclass(frozen=True)
class ToHost(_OfTwo):
    """A copy of a slice in main memory."""

    def make(self, kv: FollowerKV) -> None:
        kv.parts[self.own] = kv.rows(self.source).on_host()


@dataclass(frozen=True)
class ToDevice(_OfTwo):
    """A copy of a slice where the layers are."""

    def make(self, kv: FollowerKV) -> None:
        kv.parts[self.own] = kv.rows(self.source).on(kv.devices)


@dataclass(frozen=True)
class Free(_OfOne):
    """A buffer or a slice is let go."""

    def make(self, kv: FollowerKV) -> None:
        # What was made and let go before it was told was made here, too: notes keep their order.
        del kv.parts[self.own]
