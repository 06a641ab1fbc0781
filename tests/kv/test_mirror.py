"""A follower that is told what was done to mirrored buffers holds what they hold."""

import pickle
from collections.abc import Callable
from functools import partial
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
                side.write(layer, torch.arange(start, stop), rows, -rows)
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


ACTIONS = ("new", "forward", "fork", "cut", "split", "extend", "host", "device", "withdraw", "drop")


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
        case "fork":
            buffers.append(buffer.fork(buffer.length // 2, CAPACITY))
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
            slices.remove(rows)
            slices.extend(rows.split(1 + number % (rows.length - 1)))
        case "extend" if buffer.length + rows.length <= buffer.capacity:
            buffer.extend(rows)
        case "host":
            slices.append(rows.on_host())
        case "device":
            slices.append(rows.on(DEVICES))


def test_what_was_lost_cannot_be_used() -> None:
    pair = Pair()
    buffer = pair.new(CAPACITY)
    pair.forward(buffer, 4)
    rows = buffer.cut(0, 3)
    pair.mirror.lose()
    fresh = pair.new(CAPACITY)
    uses: list[Callable[[], Any]] = [
        partial(buffer.fork, 1, CAPACITY),
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
    assert list(pair.kv.parts) == [fresh.handle.number]
