"""Tables of pages against lists of rows: whatever is shared, written, spilled and dropped.

Each row has a number of its own; the oracle is a dictionary from each table to its rows' numbers.
"""

import gc
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyimg_cli.errors import RankError
from hyimg_cli.kv.arena import Arena, Change, Span, Storage
from hyimg_cli.kv.buffer import Buffer, HostRows, Rows

LAYERS, PAGE = 2, 4
Held = Buffer | Rows | HostRows


def _storage() -> Storage:
    devices = [torch.device("cpu")] * LAYERS
    return Storage(kv_heads=2, head_dim=3, dtype=torch.float32, devices=devices)


class World:
    """An arena, a rank that follows it, and the rows that every table has by the oracle."""

    def __init__(self, seed: int = 0) -> None:
        self.arena = Arena(_storage(), PAGE, is_led=True)
        self.follower = _storage()
        self.rows: dict[Held, list[float]] = {}
        self._random, self._next = random.Random(seed), 1.0

    def write(self, buffer: Buffer, count: int, *, is_committed: bool = True) -> None:
        """Write new rows after a prefix, as a forward does on every rank."""
        start, stop = buffer.length, buffer.length + count
        buffer.reserve(stop)
        self.follow()
        new = [self._next + at for at in range(count)]
        self._next += count
        for storage in (self.arena.storage, self.follower):
            for layer in range(LAYERS):
                rows_TKD = torch.tensor(new)[:, None, None].expand(count, 2, 3)
                storage.write(layer, buffer.span(start, stop), rows_TKD + layer, -rows_TKD)
        if is_committed:
            buffer.commit(stop)
            self.rows[buffer] = [*self.rows[buffer], *new]

    def follow(self) -> None:
        for change in pickle.loads(pickle.dumps(self.arena.changes())):
            self.follower.make(change)

    def confirm(self) -> None:
        """Every table has its rows on both ranks, and every page as many users as tables."""
        self.follow()
        counts = [0] * len(self.arena.pages)
        for held, rows in self.rows.items():
            if isinstance(held, HostRows):
                continue
            pages = held.pages if isinstance(held, Buffer) else held.table.pages
            first = 0 if isinstance(held, Buffer) else held.start % PAGE
            for page in pages:
                counts[page] += 1
            span = self.arena.span(pages, first, first + len(rows))
            if isinstance(held, Buffer):
                assert [*held.prefix.runs] == [*span.runs]
            for storage in (self.arena.storage, self.follower):
                for layer in range(LAYERS):
                    keys, values = storage.read(layer, span)
                    assert (keys - layer)[:, 0, 0].tolist() == rows
                    assert (-values)[:, 1, 2].tolist() == rows
        held_pages = self.arena.pages.used  # collects what was dropped
        assert self.arena.pages.users == counts
        assert held_pages == sum(count > 0 for count in counts)

    def act(self, action: str, number: int) -> None:
        def picked(kind: type) -> Any:
            found = [held for held in self.rows if isinstance(held, kind)]
            return found[number % len(found)] if found else None

        buffer, rows, host = (picked(kind) for kind in (Buffer, Rows, HostRows))
        match action:
            case "new":
                self.rows[Buffer(self.arena)] = []
            case "write" if buffer:
                self.write(buffer, 1 + number % 6)
            case "scratch" if buffer:
                self.write(buffer, 1 + number % 6, is_committed=False)
            case "branch" if buffer:
                branch, prefix = Buffer(self.arena), number % (buffer.length + 1)
                branch.share_prefix(buffer, prefix)
                self.rows[branch] = self.rows[buffer][:prefix]
            case "truncate" if buffer:
                buffer.truncate(number % (buffer.length + 1))
                self.rows[buffer] = self.rows[buffer][: buffer.length]
            case "keep" if buffer and buffer.length:
                start = number % buffer.length
                self.rows[buffer.rows(start, buffer.length)] = self.rows[buffer][start:]
            case "split" if (part := rows or host) and part.stop - part.start > 1:
                known, at = self.rows.pop(part), 1 + number % (part.stop - part.start - 1)
                for half, its in zip(part.split(at), (known[:at], known[at:]), strict=True):
                    self.rows[half] = its
            case "extend" if buffer and rows and rows.start == 0:
                again = Buffer(self.arena)
                again.extend(rows)
                self.rows[again] = self.rows[rows]
            case "spill" if rows:
                self.rows[rows.to_host()] = self.rows.pop(rows)
            case "restore" if host:
                self.rows[host.to_device()] = self.rows.pop(host)
            case "shrink":
                self.arena.shrink()
            case "drop" if self.rows:
                self.rows.pop([*self.rows][number % len(self.rows)])


ACTIONS = (
    "new", "write", "write", "scratch", "branch", "truncate", "keep", "split", "extend", "spill",
    "restore", "shrink", "drop",
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=40))
def test_every_table_has_its_rows_and_every_page_its_users(actions: list[tuple[str, int]]) -> None:
    world = World()
    world.act("new", 0)
    for action, number in actions:
        world.act(action, number)
        world.confirm()
    world.rows.clear()
    assert world.arena.pages.used == 0
    world.arena.shrink()
    world.confirm()
    assert world.follower.slots == world.arena.slots == 0
    assert world.follower.host_bytes == world.arena.storage.host_bytes == 0


def test_nothing_leaks_in_many_operations() -> None:
    world, drawn = World(), random.Random(7)
    for step in range(3000):
        world.act(drawn.choice(ACTIONS), drawn.randrange(99))
        if len(world.rows) > 12:
            world.act("drop", drawn.randrange(99))
        if step % 50 == 0:
            world.confirm()
    world.confirm()
    world.rows.clear()
    world.follow()
    assert world.follower.host_bytes == world.arena.storage.host_bytes == 0
    assert world.arena.pages.used == 0
    assert set(world.arena.pages.users) == {0}


def _filled(world: World, count: int) -> Buffer:
    buffer = Buffer(world.arena)
    world.rows[buffer] = []
    world.write(buffer, count)
    return buffer


def test_a_branch_holds_its_own_rows_alone() -> None:
    world = World()
    context = _filled(world, 10)
    branch = Buffer(world.arena)
    branch.share_prefix(context, 10)
    world.rows[branch] = world.rows[context]
    assert world.arena.pages.used == 3
    # Nobody has written behind row 10, so the branch does; the context then gets a copy.
    world.write(branch, 1)
    assert world.arena.pages.used == 3
    world.write(context, 1)
    assert world.arena.pages.used == 4
    world.confirm()


def test_neighbouring_pages_are_read_where_they_are() -> None:
    world = World()
    buffer = _filled(world, 11)
    span = buffer.span(0, 11)
    assert span.runs == [(0, 11)]
    keys, _ = world.arena.storage.read(1, span)
    assert keys.data_ptr() == world.arena.storage.keys_SKD[1].data_ptr()


def test_many_runs_are_read_by_an_index() -> None:
    world = World()
    buffers = [_filled(world, 4) for _ in range(2)]
    for _ in range(12):
        for buffer in buffers:
            world.write(buffer, 4)
    assert len(buffers[0].span(0, 52).runs) == 13
    world.confirm()


def test_more_rows_are_joined_for_one_read() -> None:
    world = World()
    buffer = _filled(world, 6)
    more = torch.full((3, 2, 3), 0.5, dtype=torch.float64)
    keys, values = world.arena.storage.read(0, buffer.span(0, 6), (more, -more))
    assert keys[:, 0, 0].tolist() == [*world.rows[buffer], 0.5, 0.5, 0.5]
    assert keys.dtype == values.dtype == torch.float32
    assert world.arena.pages.used == 2


def test_a_dropped_page_is_free_at_once() -> None:
    world = World()
    old = _filled(world, 9)
    world.rows.clear()
    del old
    assert _filled(world, 12).pages == [0, 1, 2]
    assert len(world.arena.pages) == 3


def test_the_last_pages_move_into_free_ones() -> None:
    """So all free memory is given back; a canvas's block of an earlier step is void then."""
    world = World()
    first, second, third = (_filled(world, 6) for _ in range(3))
    before = third.prefix
    del world.rows[first], first
    world.arena.shrink()
    assert (second.pages, third.pages) == ([2, 3], [0, 1])
    assert third.prefix is not before
    assert world.arena.slots == world.arena.storage.slots == 16
    world.confirm()
    del world.rows[second], second
    world.arena.shrink()
    assert world.arena.slots == 8
    world.confirm()


def test_a_storage_without_memory_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    buffer = _filled(world, 9)
    original, left = torch.Tensor.new_empty, [1]

    def short(self: torch.Tensor, *shape: int) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("no room")
        left.pop()
        return original(self, *shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", short)
    with pytest.raises(torch.OutOfMemoryError):
        buffer.reserve(30)
    world.confirm()
    monkeypatch.undo()
    world.write(buffer, 21)
    world.confirm()


def test_only_committed_tokens_are_shared() -> None:
    world = World()
    buffer = _filled(world, 2)
    with pytest.raises(AssertionError, match="only committed"):
        buffer.rows(0, 3)
    with pytest.raises(AssertionError, match="only grows"):
        buffer.commit(1)
    with pytest.raises(AssertionError, match="committed can be cut off"):
        buffer.truncate(3)
    with pytest.raises(AssertionError, match="stay in their places"):
        buffer.extend(buffer.rows(0, 2))


def test_what_was_lost_with_the_ranks_cannot_be_used() -> None:
    generation = [0]
    world = World()
    world.arena.generation = lambda: generation[0]
    buffer = _filled(world, 6)
    rows, host = buffer.rows(0, 5), buffer.rows(0, 3).to_host()
    generation[0] += 1
    world.follower = _storage()
    fresh = Buffer(world.arena)
    calls: list[tuple[Any, ...]] = [
        (buffer.reserve, 7), (buffer.span, 0, 1), (buffer.rows, 0, 1), (fresh.extend, rows),
        (rows.split, 1), (rows.to_host,), (host.to_device,), (host.split, 1),
    ]  # fmt: skip
    for use, *arguments in calls:
        with pytest.raises(RankError, match="were lost with the ranks") as raised:
            use(*arguments)
        assert raised.value.retryable
    world.rows.clear()
    del buffer, rows, host, fresh, calls, use, arguments, raised
    gc.collect()
    # New ranks begin with as many slots, and follow.
    _filled(world, 30)
    world.confirm()
    assert world.arena.pages.used == 8


@pytest.mark.parametrize("slots", [0, 8])
def test_a_change_is_made_again_after_memory_was_short(slots: int) -> None:
    storage = _storage()
    storage.resize(slots)
    for _ in range(2):
        storage.make(Change("resize", (), (16,)))
    assert storage.slots == 16


def _runs(*spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined = Span(spans[0])
    for span in spans[1:]:
        joined = joined + Span(span)
    return [*joined.runs]


def test_spans_are_joined_where_they_meet() -> None:
    assert _runs([(0, 4)], [(4, 6), (9, 10)], [(10, 11)]) == [(0, 6), (9, 11)]
    assert _runs([], [(3, 4)]) == [(3, 4)]
