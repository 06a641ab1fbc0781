"""A follower that gets the changes of mirrored buffers has the same contents."""

import gc
import pickle
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyimg_cli.errors import RankError
from hyimg_cli.kv.buffer import Buffer, Slice
from hyimg_cli.kv.mirror import Call, FollowerKV, Mirror, MirroredBuffer

LAYERS = 2
DEVICES = [torch.device("cpu")] * LAYERS
SHAPE: dict[str, Any] = {"kv_heads": 2, "head_dim": 3, "dtype": torch.float32, "devices": DEVICES}
CAPACITY = 12


class Pair:
    """Mirrored buffers and slices here, and a follower that is called as a process is."""

    def __init__(self) -> None:
        self.generation = 0
        self.kv = FollowerKV(lambda capacity: Buffer(capacity=capacity, **SHAPE), DEVICES)
        self.mirror = Mirror(self._call_all, lambda: self.generation)
        self.new: Callable[[int], MirroredBuffer] = lambda capacity: MirroredBuffer(
            self.mirror, capacity=capacity, **SHAPE
        )

    def _call_all(self, call: Call, own: Callable[[], Any]) -> Any:
        made = own()
        self.kv.make(pickle.loads(pickle.dumps(call)))
        return made

    def forward(self, buffer: Buffer, count: int) -> None:
        """New rows behind the prefix, on both sides."""
        self.told()
        start, stop = buffer.length, min(buffer.length + count, buffer.capacity)
        theirs = self.kv.parts[self.mirror.require(buffer).number]
        assert isinstance(theirs, Buffer)
        for layer in range(LAYERS):
            rows = torch.randn(stop - start, 2, 3)
            for side in (buffer, theirs):
                side.write(layer, start, rows, -rows)
        buffer.commit(stop)

    def told(self) -> None:
        self.kv.free(self.mirror.drain_freed())

    def assert_same(self, part: Buffer | Slice) -> None:
        theirs = self.kv.parts[self.mirror.require(part).number]
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
            buffers[-1].copy_prefix(buffer, buffer.length // 2)
        case "cut" if buffer.length:
            slices.append(buffer.cut(number % buffer.length, buffer.length))
        case "withdraw":
            buffer.truncate(buffer.length // 2)
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
            slices.append(rows.to_host())
        case "device":
            slices.append(rows.to_devices(DEVICES))


class ShortPair(Pair):
    """A follower that has no room for some of its parts."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        self._calls, self._refused = count(), refused

    def _call_all(self, call: Call, own: Callable[[], Any]) -> Any:
        if next(self._calls) in self._refused:
            self.kv.free(call.freed)
            own()
            raise torch.OutOfMemoryError("no room")
        return super()._call_all(call, own)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=40),
    st.sets(st.integers(1, 40)),
)
def test_what_a_follower_had_no_memory_for_is_nowhere(
    actions: list[tuple[str, int]], refused: set[int]
) -> None:
    """The caller is told; all else stays equal, and what the leader made alone is let go."""
    pair = ShortPair(refused)
    buffers: list[Buffer] = [pair.new(CAPACITY)]
    slices: list[Slice] = []
    for action, number in actions:
        lengths = [buffer.length for buffer in buffers]
        try:
            _act(pair, action, number, buffers, slices)
        except torch.OutOfMemoryError:
            # A method that failed is void, as one process's that ended halfway.
            for buffer, length in zip(buffers, lengths, strict=False):
                buffer.truncate(min(length, buffer.length))
            del buffers[len(lengths) :]
    gc.collect()
    pair.told()
    for part in (*buffers, *slices):
        pair.assert_same(part)
    assert len(pair.kv.parts) == len(buffers) + len(slices)


def test_a_follower_that_is_short_says_so_at_once() -> None:
    """There is room for two: the third comes when one of them has gone."""
    pair = Pair()
    original = pair.kv.new_buffer

    def short(capacity: int) -> Buffer:
        if len(pair.kv.parts) == 2:
            raise torch.OutOfMemoryError("no room")
        return original(capacity)

    pair.kv.new_buffer = short
    kept, old = pair.new(CAPACITY), pair.new(CAPACITY)
    pair.forward(kept, 4)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            pair.new(CAPACITY)
    del old
    third = pair.new(CAPACITY)
    third.copy_prefix(kept, 3)
    pair.assert_same(kept)
    pair.assert_same(third)
    assert len(pair.kv.parts) == 2


def test_what_was_lost_cannot_be_used() -> None:
    pair = Pair()
    buffer = pair.new(CAPACITY)
    pair.forward(buffer, 4)
    rows = buffer.cut(0, 3)
    pair.generation += 1
    pair.kv.parts.clear()
    fresh = pair.new(CAPACITY)
    uses: list[Callable[[], Any]] = [
        partial(fresh.copy_prefix, buffer, 1),
        partial(buffer.cut, 0, 1),
        partial(fresh.extend, rows),
        partial(rows.split, 1),
        rows.to_host,
        partial(rows.to_devices, DEVICES),
    ]
    for use in uses:
        with pytest.raises(RankError, match="were lost with the ranks") as raised:
            use()
        assert raised.value.retryable
    # What the other side no longer has is freed without an error.
    del buffer, rows, uses, use, raised
    pair.told()
    assert list(pair.kv.parts) == [fresh.handle.number]


def test_a_part_with_a_home_is_told_to_its_own_set_alone() -> None:
    """Both sets have the context; a branch is one's: copied, cut, kept on the host, back."""
    sets = [
        FollowerKV(lambda capacity: Buffer(capacity=capacity, **SHAPE), DEVICES, number)
        for number in range(2)
    ]

    def call_all(call: Call, own: Callable[[], Any]) -> Any:
        for kv in sets:
            kv.make(call)
        return own()

    mirror = Mirror(call_all, lambda: 0)
    context = MirroredBuffer(mirror, capacity=CAPACITY, **SHAPE)
    context.commit(4)
    kept: list[Any] = []
    for home in range(2):
        branch = MirroredBuffer(mirror, home=home, capacity=CAPACITY, **SHAPE)
        branch.copy_prefix(context, 3)
        branch.commit(6)
        rows = branch.cut(2, 6)
        back = rows.to_host().to_devices(DEVICES)
        again = MirroredBuffer(mirror, home=home, capacity=CAPACITY, **SHAPE)
        again.copy_prefix(branch, 5)
        again.extend(back.cut(0, 2))
        assert all(part.is_meta == bool(home) for part in (*_rows(branch), *_rows(back)))
        kept += [branch, rows, back, again]
    freed = mirror.drain_freed()
    for number, kv in enumerate(sets):
        kv.free(freed)
        own = kept[4 * number :][:4]
        assert set(kv.parts) == {part.handle.number for part in (context, *own)}
        assert all(kv.parts[part.handle.number].length == part.length for part in own[1:3])
    # As large as the set's own, so that what the tree may hold is counted.
    assert kept[5].nbytes == kept[1].nbytes
    with pytest.raises(AssertionError, match="another set's rows"):
        kept[0].copy_prefix(kept[4], 1)
    kept.clear()
    del branch, rows, back, again, own, context
    gc.collect()
    freed = mirror.drain_freed()
    for kv in sets:
        kv.free(freed)
        assert not kv.parts
