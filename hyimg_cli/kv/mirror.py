"""Mirror buffers and slices over ranks: each holds its part, and changes run on every rank.

    leader     MirroredBuffer, MirroredSlice: a call is sent to the others and made here
    follower   FollowerKV: its own parts, by the leader's numbers

Each rank's forwards write its own rows. If a rank has no memory for a change, the leader's caller
gets the error, as in one process. When followers end, all parts made before are void: using one is
an error, never a wrong row.

A part with a home belongs to one set of ranks; `home` 0 is the leader's. Parts made of it have the
same home. Of another set's part the leader has shapes, but no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from hyimg_cli.errors import RankError
from hyimg_cli.kv.buffer import Buffer, Slice

Part: TypeAlias = Buffer | Slice
Method = Literal["new", "copy_prefix", "extend", "cut", "to_host", "to_devices"]


class Call(NamedTuple):
    """A method call on a part, as it is sent to the followers; pickled.

    `result`: the number of the part that it makes. `parts`: the part and its argument, each by
    number and length on the leader. `freed`: parts that the leader released before.
    """

    method: Method
    result: int
    parts: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    home: int | None
    freed: tuple[int, ...]


# Makes a call on all ranks, and on this one with the function; returns the function's result.
CallAll = Callable[[Call, Callable[[], Any]], Any]


class Mirror:
    """The leader's record of its followers' parts.

    Any thread may release a part; one thread does everything else.
    """

    def __init__(self, call_all: CallAll, generation: Callable[[], int]) -> None:
        """`generation`: how often the followers have ended."""
        self.generation = generation
        self.numbers = count(1)
        # Appended to wherever the garbage collector runs: a deque needs no lock.
        self.freed: deque[int] = deque()
        self._call_all = call_all

    def call(
        self,
        method: Method,
        own: Callable[[], Any],
        parts: Sequence[Part] = (),
        *numbers: int,
        home: int | None = None,
    ) -> tuple[Any, Handle]:
        """Call a method on every rank of `home`, here as `own`; return its result and the handle.

        Raises RankError for lost parts, torch.OutOfMemoryError if a rank has no memory for it.
        """
        handles = [self.require(part) for part in parts]
        assert all(one.home in (None, home) for one in handles), "another set's rows are not here"
        known = tuple((one.number, part.length) for one, part in zip(handles, parts, strict=True))
        result = Handle(self, home)
        call = Call(method, result.number, known, numbers, home, self.drain_freed())
        return self._call_all(call, own), result

    def slice_of(
        self, part: MirroredBuffer | MirroredSlice, method: Method, own: Any, *numbers: int
    ) -> MirroredSlice:
        """Return the slice that a method makes, on every rank that has the part."""
        made, handle = self.call(method, own, [part], *numbers, home=part.handle.home)
        return MirroredSlice(made.keys, made.values, mirror=self, handle=handle)

    def drain_freed(self) -> tuple[int, ...]:
        """Return the numbers of all parts released since the last call."""
        return tuple(self.freed.popleft() for _ in range(len(self.freed)))

    def require(self, part: Part) -> Handle:
        """Return the handle of a part that every rank has. Raises RankError if it was lost."""
        assert isinstance(part, MirroredBuffer | MirroredSlice), "made by this mirror's buffers"
        if part.handle.generation != self.generation():
            raise RankError(
                "keys and values of this job were lost with the ranks that held them",
                hint="run the same command again with --retry-failed, or add --max-retries",
                code="rank.lost",
                retryable=True,
            )
        return part.handle


class Handle:
    """A part's number on the followers, which free it once nothing refers to the handle."""

    def __init__(self, mirror: Mirror, home: int | None) -> None:
        self.number, self.generation, self.home = next(mirror.numbers), mirror.generation(), home
        self._freed = mirror.freed

    def __del__(self) -> None:
        self._freed.append(self.number)


class MirroredBuffer(Buffer):
    """A buffer that every rank has, or every rank of `home`."""

    def __init__(
        self,
        mirror: Mirror,
        *,
        devices: Sequence[torch.device],
        home: int | None = None,
        **shape: Any,
    ) -> None:
        """`shape` as a Buffer's. `home`: the one set of ranks that has it."""
        own = partial(
            super().__init__,
            devices=[torch.device("meta")] * len(devices) if home else devices,
            **shape,
        )
        self._mirror = mirror
        _, self.handle = mirror.call("new", own, (), shape["capacity"], home=home)

    def cut(self, start: int, stop: int) -> Slice:
        return self._mirror.slice_of(self, "cut", partial(super().cut, start, stop), start, stop)

    def extend(self, rows: Slice) -> None:
        own = partial(super().extend, rows)
        self._mirror.call("extend", own, [self, rows], home=self.handle.home)

    def copy_prefix(self, other: Buffer, prefix: int) -> None:
        own = partial(super().copy_prefix, other, prefix)
        self._mirror.call("copy_prefix", own, [self, other], prefix, home=self.handle.home)


@dataclass(frozen=True, eq=False)
class MirroredSlice(Slice):
    """A slice that every rank has, or every rank of its home."""

    mirror: Mirror = field(kw_only=True)
    handle: Handle = field(kw_only=True)

    def to_host(self) -> Slice:
        own = (lambda: self) if self.handle.home else super().to_host
        return self.mirror.slice_of(self, "to_host", own)

    def to_devices(self, devices: Sequence[torch.device]) -> Slice:
        own = (lambda: self) if self.handle.home else partial(super().to_devices, devices)
        return self.mirror.slice_of(self, "to_devices", own)

    def cut(self, start: int, stop: int) -> Slice:
        return self.mirror.slice_of(self, "cut", partial(super().cut, start, stop), start, stop)


class FollowerKV:
    """A follower's parts, by the leader's numbers."""

    def __init__(
        self, new_buffer: Callable[[int], Buffer], devices: Sequence[torch.device], home: int = 0
    ) -> None:
        """Hold no parts. `new_buffer` makes an empty buffer; `devices` has one entry a layer.

        `home`: the set of ranks to which this one belongs.
        """
        self.new_buffer = new_buffer
        self.devices, self.home = devices, home
        self.parts: dict[int, Part] = {}

    def free(self, numbers: Sequence[int]) -> None:
        """Release parts; numbers of another set, or of calls that made nothing, are ignored."""
        for number in numbers:
            self.parts.pop(number, None)

    def make(self, call: Call) -> None:
        """Repeat the leader's call. Raises torch.OutOfMemoryError; each part is then unchanged."""
        self.free(call.freed)
        if call.home not in (None, self.home):
            return
        parts = [self.parts[number] for number, _ in call.parts]
        for part, (_, length) in zip(parts, call.parts, strict=True):
            if isinstance(part, Buffer):
                part.length = length  # only the leader uses it
        if call.method == "new":
            made = self.new_buffer(*call.numbers)
        else:
            given = (self.devices,) if call.method == "to_devices" else (*parts[1:], *call.numbers)
            made = getattr(parts[0], call.method)(*given)
        if made is not None:
            self.parts[call.result] = made
