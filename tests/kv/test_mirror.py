"""A follower that is told what was done to mirrored buffers holds what they hold."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyimg_cli.errors import RankError
from hyimg_cli.kv.buffer import Buffer, Slice
from hyimg_cli.kv.mirror import FollowerKV, Mirror, MirroredBuffer

LAYERS = 2
DEVICES = [torch.device("cpu")] * LAYERS
SHAPE: dict[str, Any] = {"kv_heads": 2, "head_dim": 3, "dtype": torch.float32, "devices": DEVICES}
CAPACITY = 12


class Pair:
    """Mirrored buffers and slices here, and a follower that is told of them as a process is."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.kv = FollowerKV(lambda capacity: Buffer(capacity=capacity, **SHAPE), DEVICES)
        self.new: Callable[[int], MirroredBuffer] = lambda capacity: MirroredBuffer(
            self.mirror, capacity=capacity, **SHAPE
        )

    def forward(self, buffer: Buffer, count: int) -> None:
        """New rows behind the prefix, on both sides; the changes before them come first."""
        self.told()
        start, stop = buffer.length, min(buffer.length + count, buffer.capacity)
        theirs = self.kv.buffer(self.mirror.require(buffer))
        for layer in range(LAYERS):
            rows = torch.randn(stop - start, 2, 3)
            for side in (buffer, theirs):
                side.write(layer, start, rows, -rows)
        buffer.commit(stop)

    def told(self) -> None:
        self.kv.change(pickle.loads(pickle.dumps(self.mirror.drained())))

    def assert_same(self, part: Buffer | Slice) -> None:
        theirs = self.kv.parts[self.mirror.require(part)]
        for ours, others in zip(_rows(part), _rows(theirs), strict=True):
            length = part.length
            assert torch.equal(ours[:, :length], others[:, :length])


def _rows(part: Buffer | Slice) -> list[torch.Tensor]:
    if isinstance(part, Buffer):
        return [*part.keys_HSD, *part.values_HSD]
    return [*part.keys, *part.values]


ACTIONS = ("new", "forward", "take", "cut", "split", "extend", "host", "device", "withdraw", "drop")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=40))
def test_a_follower_follows_whatever_is_done(actions: list[tuple[str, int]]) -> None:
    pair = Pair()
    buffers: list[Buffer] = [pair.new(CAPACITY)]
    slices: list[Slice] = []
    for action, number in actions:
        _act(pair, action, number, buffers, slices)
    pair.told()
    for part in (*buffers, *slices):
        pair.assert_same(part)
    assert len(pair.kv.parts) == len(buffers) + len(slices)
    buffers.clear()
    slices.clear()
    del part
    pair.told()
    assert not pair.kv.parts


def _act(pair: Pair, action: str, number: int, buffers: list[Buffer], slices: list[Slice]) -> None:
    buffer = buffers[number % len(buffers)]
    rows = slices[number % len(slices)] if slices else None
    match action:
        case "new":
            buffers.append(pair.new(CAPACITY))
        case "forward":
            pair.forward(buffer, number % 5)
        case "take":
            buffers.append(pair.new(CAPACITY))
            buffers[-1].take(buffer, buffer.length // 2)
        case "cut" if buffer.length:
            slices.append(buffer.cut(number % buffer.length, buffer.length))
        case "withdraw":
            buffer.withdraw(buffer.length // 2)
        case "drop" if len(buffers) > 1:
            buffers.remove(buffer)
        case _ if rows is not None:
            _act_on_slice(action, number, rows, buffer, slices)


def _act_on_slice(
    action: str, number: int, rows: Slice, buffer: Buffer, slices: list[Slice]
) -> None:
    match action:
        case "split" if rows.length > 1:
            # By identity: equal slices may be there twice.
            slices[:] = [one for one in slices if one is not rows]
            slices.extend(rows.split(1 + number % (rows.length - 1)))
        case "extend" if buffer.length + rows.length <= buffer.capacity:
            buffer.extend(rows)
        case "host":
            slices.append(rows.on_host())
        case "device":
            slices.append(rows.on(DEVICES))


class ShortPair(Pair):
    """A follower that has no room for some of its buffers: a forward without them is void, on both
    sides, and what was noted for it is made before the next.
    """

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        calls, original = count(), self.kv.new_buffer

        def short(capacity: int) -> Buffer:
            if next(calls) in refused:
                raise torch.OutOfMemoryError("no room")
            return original(capacity)

        self.kv.new_buffer = short

    def forward(self, buffer: Buffer, count: int) -> None:
        with suppress(torch.OutOfMemoryError):
            super().forward(buffer, count)

    def told(self) -> None:
        self.refused = True
        super().told()
        self.refused = False


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=40),
    st.sets(st.integers(0, 12)),
)
def test_a_follower_that_was_short_of_memory_catches_up(
    actions: list[tuple[str, int]], refused: set[int]
) -> None:
    pair = ShortPair(refused)
    buffers: list[Buffer] = [pair.new(CAPACITY)]
    slices: list[Slice] = []
    for action, number in actions:
        _act(pair, action, number, buffers, slices)
    for _ in range(len(refused) + 1):
        with suppress(torch.OutOfMemoryError):
            pair.told()
    assert not pair.refused
    for part in (*buffers, *slices):
        pair.assert_same(part)
    assert len(pair.kv.parts) == len(buffers) + len(slices)


def test_what_was_let_go_makes_room_for_what_is_due() -> None:
    """There is room for two: the third comes when one of them has gone, told behind it."""
    pair = Pair()
    original = pair.kv.new_buffer

    def short(capacity: int) -> Buffer:
        if len(pair.kv.parts) == 2:
            raise torch.OutOfMemoryError("no room")
        return original(capacity)

    pair.kv.new_buffer = short
    kept, old = pair.new(CAPACITY), pair.new(CAPACITY)
    pair.forward(kept, 4)
    third = pair.new(CAPACITY)
    third.take(kept, 3)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            pair.told()
    del old
    pair.told()
    pair.assert_same(kept)
    pair.assert_same(third)
    assert len(pair.kv.parts) == 2


@pytest.mark.parametrize("action", ["take", "cut", "extend", "write", "host", "split"])
def test_nothing_is_freed_before_its_last_reader(action: str) -> None:
    """The leader has let go of what a follower, short of memory, has still to read or write."""
    pair = Pair()
    source, target = pair.new(CAPACITY), pair.new(CAPACITY)
    pair.forward(source, 4)
    pair.forward(target, 2)
    rows = source.cut(0, 3)
    pair.told()
    original, pair.kv.new_buffer = pair.kv.new_buffer, _refused
    late = pair.new(CAPACITY)
    slices: list[Slice] = []
    match action:
        case "take":
            late.take(source, 3)
        case "cut":
            slices = [source.cut(1, 4)]
        case "extend":
            target.extend(rows)
            slices = [target.cut(2, 5)]
        case "write":
            target.extend(rows)
        case _:
            slices = list(rows.split(1)) if action == "split" else [rows.on_host()]
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            pair.told()
        # Freed behind its reader, which waits behind the buffer that there is no room for.
        source = target = rows = None  # type: ignore[assignment]
    pair.kv.new_buffer = original
    pair.told()
    for part in (late, *slices):
        pair.assert_same(part)
    assert len(pair.kv.parts) == 1 + len(slices)


def _refused(capacity: int) -> Buffer:
    raise torch.OutOfMemoryError("no room")


def test_what_was_lost_cannot_be_used() -> None:
    pair = Pair()
    buffer = pair.new(CAPACITY)
    pair.forward(buffer, 4)
    rows = buffer.cut(0, 3)
    pair.mirror.lose()
    fresh = pair.new(CAPACITY)
    uses: list[Callable[[], Any]] = [
        partial(fresh.take, buffer, 1),
        partial(buffer.cut, 0, 1),
        partial(fresh.extend, rows),
        partial(rows.split, 1),
        rows.on_host,
        partial(rows.on, DEVICES),
    ]
    for use in uses:
        with pytest.raises(RankError, match="were lost with the ranks") as raised:
            use()
        assert raised.value.retryable
    # Nothing is told of what the other side no longer has.
    pair.kv.parts.clear()
    del buffer, rows, uses, use, raised
    pair.told()
    assert list(pair.kv.parts) == [fresh.number]


def test_a_part_with_a_home_is_told_to_its_own_set_alone() -> None:
    """Both sets have the context; a branch is one's: copied, cut, kept on the host, back."""
    mirror = Mirror()
    sets = [
        FollowerKV(lambda capacity: Buffer(capacity=capacity, **SHAPE), DEVICES, number)
        for number in range(2)
    ]
    context = MirroredBuffer(mirror, capacity=CAPACITY, **SHAPE)
    context.commit(4)
    kept: list[Any] = []
    for home in range(2):
        branch = MirroredBuffer(mirror, home=home, capacity=CAPACITY, **SHAPE)
        branch.take(context, 3)
        branch.commit(6)
        rows = branch.cut(2, 6)
        back = rows.on_host().on(DEVICES)
        again = MirroredBuffer(mirror, home=home, capacity=CAPACITY, **SHAPE)
        again.take(branch, 5)
        again.extend(back.cut(0, 2))
        assert all(part.is_meta == bool(home) for part in (*_rows(branch), *_rows(back)))
        kept += [branch, rows, back, again]
    changes = mirror.drained()
    for number, kv in enumerate(sets):
        kv.change(changes)
        own = kept[4 * number :][:4]
        assert set(kv.parts) == {context.number, *(mirror.require(part) for part in own)}
        assert all(kv.parts[part.number].length == part.length for part in own[1:3])
    # As large as the set's own, so that what the tree may hold is counted.
    assert kept[5].nbytes == kept[1].nbytes
    with pytest.raises(AssertionError, match="another set's rows"):
        kept[0].take(kept[4], 1)
    kept.clear()
    del branch, rows, back, again, own, context
    for kv, changes in zip(sets, [mirror.drained()] * 2, strict=True):
        kv.change(changes)
        assert not kv.parts
