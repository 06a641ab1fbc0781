"""The tree against plain dictionaries: an exact one for whole segments, one of token prefixes for
text that splits. Fake payloads carry the tokens they stand for and all tokens before them.
"""

import gc
import random
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyimg_cli.kv.segments import ImageSegment, Segment, TextSegment
from hyimg_cli.kv.tree import Host, KVTree, Match, Prefix

BYTES_PER_TOKEN = 3
SCOPES = ("bf16", "fp8")
Segments = tuple[Segment, ...]
Tokens = tuple[Any, ...]
Path = tuple[Any, ...]  # a scope, then segments


def text(*ids: int) -> TextSegment:
    return TextSegment(ids)


def image(digest: str, length: int = 2) -> ImageSegment:
    return ImageSegment((9,) * length, digest, ((1, length),))


def tokens_of(segments: Sequence[Segment]) -> Tokens:
    """Text ids as they are; image tokens by image, since their ids are all the same."""
    return tuple(
        (segment.digest, at) if isinstance(segment, ImageSegment) else token
        for segment in segments
        for at, token in enumerate(segment.ids)
    )


@dataclass(eq=False)
class FakePayload:
    before: Tokens
    tokens: Tokens
    alive: "weakref.WeakSet[FakePayload]"
    home: str = "device"

    def __post_init__(self) -> None:
        self.alive.add(self)

    @property
    def nbytes(self) -> int:
        return BYTES_PER_TOKEN * len(self.tokens)

    def split(self, at: int) -> "tuple[FakePayload, FakePayload]":
        assert 0 < at < len(self.tokens)
        assert all(isinstance(token, int) for token in self.tokens), "an image was split"
        first, rest = self.tokens[:at], self.tokens[at:]
        return (
            FakePayload(self.before, first, self.alive, self.home),
            FakePayload(self.before + first, rest, self.alive, self.home),
        )

    def moved(self, home: str) -> "FakePayload":
        assert home != self.home
        return FakePayload(self.before, self.tokens, self.alive, home)


@dataclass
class Oracle:
    """Whole segments only: bytes by path, least recently used first."""

    budget: int
    held: dict[Path, int] = field(default_factory=dict)
    pins: list[Path] = field(default_factory=list)
    evicted: int = 0

    def match(self, path: Path) -> Path:
        longest = max(
            (stop for stop in range(2, len(path) + 1) if path[:stop] in self.held), default=1
        )
        self.touch(path[:longest])
        return path[:longest]

    def touch(self, path: Path) -> None:
        for stop in range(2, len(path) + 1):
            if path[:stop] in self.held:
                self.held[path[:stop]] = self.held.pop(path[:stop])

    def insert(self, path: Path) -> Path:
        held = self.match(path)
        for stop in range(len(held) + 1, len(path) + 1):
            if not self.make_room(nbytes := BYTES_PER_TOKEN * path[stop - 1].length, held):
                break
            held = path[:stop]
            self.held[held] = nbytes
        return held

    def make_room(self, nbytes: int, parent: Path) -> bool:
        kept = {pin[:stop] for pin in (*self.pins, parent) for stop in range(len(pin) + 1)}
        if sum(self.held[path] for path in kept & set(self.held)) + nbytes > self.budget:
            return False
        while sum(self.held.values()) + nbytes > self.budget:
            above = {path[:-1] for path in self.held}
            oldest = next(path for path in self.held if path not in above | kept)
            self.evicted += self.held.pop(oldest)
        return True

    def clear_scope(self, scope: str) -> None:
        kept = {pin[:stop] for pin in self.pins for stop in range(len(pin) + 1)}
        self.held = {p: n for p, n in self.held.items() if p[0] != scope or p in kept}


@dataclass
class Pin:
    path: Path
    handle: AbstractContextManager[Prefix[FakePayload]]
    prefix: Prefix[FakePayload]


class World:
    """A tree, what it should hold, and the checks after every operation."""

    def __init__(
        self, budget: int, *, splits_text: bool, host_budget: int | None = None, pins: int = 3
    ) -> None:
        self.alive: weakref.WeakSet[FakePayload] = weakref.WeakSet()
        self.budget, self.splits_text, self.host_budget = budget, splits_text, host_budget or 0
        host = Host[FakePayload](
            self.host_budget, lambda p: p.moved("host"), lambda p: p.moved("device")
        )
        self.tree: KVTree[FakePayload] = KVTree(
            budget, splits_text=splits_text, host=None if host_budget is None else host
        )
        is_exact = not splits_text and host_budget is None
        self.oracle = Oracle(budget) if is_exact else None
        self.inserted: dict[str, set[Tokens]] = {scope: set() for scope in SCOPES}
        self.pins: list[Pin] = []
        self.most_pins = pins
        self.matched_tokens = 0

    def apply(self, kind: str, scope: str, segments: Segments, which: int) -> None:
        if kind == "match":
            self.match(scope, segments)
        elif kind == "insert":
            self.insert(scope, segments)
        elif kind == "pin" and len(self.pins) < self.most_pins:
            self.pin(scope, segments)
        elif kind == "unpin" and self.pins:
            self.unpin(which % len(self.pins))
        elif kind == "clear":
            self.tree.clear_scope(scope)
            if self.oracle:
                self.oracle.clear_scope(scope)
        self.check()

    def match(self, scope: str, segments: Segments) -> Match:
        match = self.tree.match(scope, segments)
        self.matched_tokens += match.length
        flat = tokens_of(segments)
        assert match.length <= self.longest_inserted(scope, segments)
        assert self.is_border(segments, match.length)
        for pin in self.pins:  # what is pinned is found
            if pin.path[0] == scope:
                shared = _shared(tokens_of(pin.path[1:])[: pin.prefix.length], flat)
                assert match.length >= max(
                    at for at in range(shared + 1) if self.is_found(segments, pin.path[1:], at)
                )
        if self.oracle:
            path = self.oracle.match((scope, *segments))
            assert match.length == _length(path[1:])
        with self.tree.pinned(match) as prefix:
            self.check_prefix(prefix, flat[: match.length])
        return match

    def is_border(self, segments: Sequence[Segment], at: int) -> bool:
        """Whether a match may end before token `at`."""
        start = 0
        for segment in segments:
            may_split = self.splits_text and isinstance(segment, TextSegment)
            if at == start or (may_split and start < at < start + segment.length):
                return True
            start += segment.length
        return at == start

    def is_found(self, wanted: Segments, held: Segments, at: int) -> bool:
        """Whether `at` leading tokens are sure to be matched where `held` is pinned."""
        if self.splits_text:
            return self.is_border(wanted, at) and self.is_border(held, at)
        return any(_length(wanted[:n]) == at and wanted[:n] == held[:n] for n in range(5))

    def longest_inserted(self, scope: str, segments: Segments) -> int:
        flat = tokens_of(segments)
        return max(
            (at for at in range(1, len(flat) + 1) if flat[:at] in self.inserted[scope]), default=0
        )

    def insert(self, scope: str, segments: Segments) -> Match:
        flat, calls = tokens_of(segments), list[tuple[int, int]]()

        def payload_of(start: int, stop: int) -> FakePayload:
            calls.append((start, stop))
            return FakePayload(flat[:start], flat[start:stop], self.alive)

        before = self.tree.inserted_tokens
        match = self.tree.insert(scope, segments, payload_of)
        added = self.tree.inserted_tokens - before
        assert [start for start, _ in calls[1:]] == [stop for _, stop in calls[:-1]]
        assert all(self.is_border(segments, at) for call in calls for at in call)
        if calls:
            assert match.length == calls[0][0] + added
            assert calls[-1][1] == len(flat) or match.length == calls[-1][0]
        if self.oracle:
            path = self.oracle.insert((scope, *segments))
            assert match.length == _length(path[1:])
        self.inserted[scope] |= {flat[:at] for at in range(1, match.length + 1)}
        assert self.match(scope, segments).length == match.length
        return match

    def pin(self, scope: str, segments: Segments) -> None:
        match = self.match(scope, segments)
        handle = self.tree.pinned(match)
        path = (scope, *(_cut(segments, match.length)))
        self.pins.append(Pin(path, handle, handle.__enter__()))
        if self.oracle:
            self.oracle.pins.append(path)

    def unpin(self, which: int) -> None:
        pin = self.pins.pop(which)
        self.check_prefix(pin.prefix, tokens_of(pin.path[1:]))
        pin.handle.__exit__(None, None, None)
        if self.oracle:
            self.oracle.pins.remove(pin.path)
            self.oracle.touch(pin.path)

    def check_prefix(self, prefix: Prefix[FakePayload], tokens: Tokens) -> None:
        """Payloads are the tokens in order, each computed behind the very tokens before it."""
        start = 0
        for payload in prefix.payloads:
            assert payload.home == "device"
            assert payload.before == tokens[:start]
            assert payload.tokens == tokens[start : start + len(payload.tokens)]
            start += len(payload.tokens)
        assert start == prefix.length == len(tokens)

    def check(self) -> None:
        assert 0 <= self.tree.held_bytes <= self.budget
        assert 0 <= self.tree.host_bytes <= self.host_budget
        assert self.tree.matched_tokens == self.matched_tokens
        if not self.pins:  # nobody else holds payloads: what is alive is what the tree counts
            by_home = {"device": 0, "host": 0}
            for payload in self.alive:
                by_home[payload.home] += payload.nbytes
            assert by_home == {"device": self.tree.held_bytes, "host": self.tree.host_bytes}
        if self.oracle:
            assert self.tree.held_bytes == sum(self.oracle.held.values())
            assert len(self.tree) == len(self.oracle.held)
            assert self.tree.evicted_bytes == self.oracle.evicted

    def end(self) -> None:
        while self.pins:
            self.unpin(0)
        self.check()
        self.tree.clear()
        assert (len(self.tree), self.tree.held_bytes, self.tree.host_bytes) == (0, 0, 0)
        assert not self.alive


def _shared(first: Tokens, second: Tokens) -> int:
    at = 0
    while at < min(len(first), len(second)) and first[at] == second[at]:
        at += 1
    return at


def _length(segments: Sequence[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _cut(segments: Sequence[Segment], at: int) -> Segments:
    """The first `at` tokens as segments."""
    kept: list[Segment] = []
    for segment in segments:
        if at <= 0:
            break
        is_cut = isinstance(segment, TextSegment) and at < segment.length
        kept.append(segment.head(at) if is_cut else segment)  # type: ignore[union-attr]
        at -= segment.length
    return tuple(kept)


KINDS = ("match", "match", "insert", "insert", "insert", "pin", "unpin", "clear")
SEGMENT = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda ids: text(*ids)),
    st.sampled_from([image("cat"), image("dog", 3)]),
)
OPERATION = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(SCOPES),
    st.lists(SEGMENT, min_size=1, max_size=4).map(tuple),
    st.integers(0, 2),
)
MODES = pytest.mark.parametrize(
    ("splits_text", "host_budget"),
    [(False, None), (True, None), (False, 24), (True, 24)],
    ids=["whole", "splitting", "whole with host", "splitting with host"],
)


def random_segments(dice: random.Random) -> Segments:
    def segment() -> Segment:
        if dice.random() < 0.3:
            return dice.choice([image("cat"), image("dog", 3)])
        return text(*(dice.randrange(2) for _ in range(dice.randint(1, 4))))

    return tuple(segment() for _ in range(dice.randint(1, 4)))


@MODES
@pytest.mark.parametrize("seed", range(6))
def test_ten_thousand_operations(seed: int, splits_text: bool, host_budget: int | None) -> None:
    dice = random.Random(seed)
    world = World((0, 12, 30, 45, 60, 90)[seed], splits_text=splits_text, host_budget=host_budget)
    gc.disable()  # payloads go when the tree lets go of them, not when cycles are collected
    try:
        for _ in range(2000):
            kind = "clear" if dice.random() < 0.01 else dice.choice(KINDS[:-1])
            world.apply(kind, dice.choice(SCOPES), random_segments(dice), dice.randrange(3))
        world.end()
    finally:
        gc.enable()
    assert (world.tree.evicted_bytes > 0) == (seed > 0)


@MODES
@given(operations=st.lists(OPERATION, max_size=25), budget=st.integers(0, 45))
@settings(deadline=None, max_examples=60)
def test_operations_in_any_order(
    splits_text: bool, host_budget: int | None, operations: list[Any], budget: int
) -> None:
    world = World(budget, splits_text=splits_text, host_budget=host_budget)
    for operation in operations:
        world.apply(*operation)
    world.end()


@given(inserted=st.lists(st.lists(SEGMENT, max_size=4).map(tuple), max_size=6), data=st.data())
@settings(deadline=None, max_examples=100)
def test_splitting_finds_the_longest_common_prefix(inserted: list[Segments], data: Any) -> None:
    world = World(10**6, splits_text=True)
    for segments in inserted:
        assert world.insert("bf16", segments).length == len(tokens_of(segments))
    asked = data.draw(st.lists(SEGMENT, max_size=4).map(tuple))
    borders = [at for at in range(len(tokens_of(asked)) + 1) if world.is_border(asked, at)]
    longest = max(
        at for at in borders if at == 0 or tokens_of(asked)[:at] in world.inserted["bf16"]
    )
    assert world.match("bf16", asked).length == longest
    world.check()


def no_payload(start: int, stop: int) -> FakePayload:
    raise AssertionError("nothing can be kept, so nothing should be made")


def test_shared_prefix_is_made_once() -> None:
    world = World(1000, splits_text=False)
    head: Segments = (text(1, 2, 3), image("cat"))
    for job in range(16):
        assert world.insert("bf16", (*head, text(4, job))).length == 7
    assert world.tree.inserted_tokens == 5 + 16 * 2
    assert len(world.tree) == 2 + 16


def test_least_recently_used_leaves_go_first() -> None:
    world = World(4 * BYTES_PER_TOKEN, splits_text=False)
    for job in (1, 2, 3):
        world.insert("bf16", (text(0), text(job)))
    world.match("bf16", (text(0), text(1)))
    world.insert("bf16", (text(0), text(4)))
    found = {job: world.match("bf16", (text(0), text(job))).length for job in (1, 2, 3, 4)}
    assert found == {1: 2, 2: 1, 3: 2, 4: 2}


def test_a_pin_counts_as_use_until_it_ends() -> None:
    world = World(2 * BYTES_PER_TOKEN, splits_text=False)
    world.insert("bf16", (text(1),))
    world.pin("bf16", (text(1),))
    world.insert("bf16", (text(2),))
    world.unpin(0)
    world.insert("bf16", (text(3),))
    assert world.match("bf16", (text(1),)).length == 1
    assert world.match("bf16", (text(2),)).length == 0


def test_what_cannot_fit_beside_pins_evicts_nothing() -> None:
    world = World(6 * BYTES_PER_TOKEN, splits_text=False)
    pinned, other = (text(1, 1, 1),), (text(2, 2),)
    world.insert("bf16", pinned)
    world.insert("bf16", other)
    world.pin("bf16", pinned)
    assert world.insert("bf16", (text(3, 3, 3, 3), text(3))).length == 0
    assert world.tree.evicted_bytes == 0
    assert world.insert("bf16", (text(4, 4, 4),)).length == 3
    assert world.match("bf16", other).length == 0
    world.unpin(0)
    assert world.insert("bf16", (text(3, 3, 3, 3),)).length == 4


def test_nothing_stands_below_what_was_not_inserted() -> None:
    world = World(3 * BYTES_PER_TOKEN, splits_text=False)
    assert world.insert("bf16", (text(1), text(2, 2, 2, 2), text(3))).length == 1
    assert len(world.tree) == 1


def test_budget_zero_asks_for_no_payload() -> None:
    tree: KVTree[FakePayload] = KVTree(0, splits_text=True)
    assert tree.insert("bf16", (text(1, 2), image("cat")), no_payload).length == 0
    with tree.pinned(tree.match("bf16", (text(1, 2),))) as prefix:
        assert (prefix.length, prefix.payloads) == (0, ())
    assert (len(tree), tree.held_bytes) == (0, 0)


def test_scopes_share_nothing() -> None:
    world = World(1000, splits_text=True)
    world.insert("bf16", (text(1, 2),))
    assert world.match("fp8", (text(1, 2),)).length == 0
    world.insert("fp8", (text(1, 2),))
    assert world.tree.held_bytes == 4 * BYTES_PER_TOKEN
    world.tree.clear_scope("fp8")
    assert world.match("bf16", (text(1, 2),)).length == 2
    assert world.match("fp8", (text(1, 2),)).length == 0


def test_an_image_is_matched_whole_or_not_at_all() -> None:
    world = World(1000, splits_text=True)
    world.insert("bf16", (text(1, 2), image("cat", 4)))
    assert world.match("bf16", (text(1, 2), image("cat", 3))).length == 2
    assert world.match("bf16", (text(1, 2), image("dog", 4))).length == 2
    assert world.match("bf16", (text(1, 2), text(9, 9))).length == 2
    assert world.match("bf16", (text(1, 2), image("cat", 4))).length == 6


def test_a_split_leaves_matches_and_pins_true() -> None:
    world = World(1000, splits_text=True)
    world.insert("bf16", (text(1, 2, 3, 4), image("cat")))
    match = world.match("bf16", (text(1, 2, 3, 4),))
    with world.tree.pinned(match) as before:
        assert world.match("bf16", (text(1, 2),)).length == 2
        world.check_prefix(before, (1, 2, 3, 4))
        with world.tree.pinned(match) as after:
            assert [len(payload.tokens) for payload in after.payloads] == [2, 2]
            world.check_prefix(after, (1, 2, 3, 4))
        world.tree.clear()
        assert world.match("bf16", (text(1, 2, 3, 4), image("cat"))).length == 4


def test_a_split_makes_only_the_matched_part_young() -> None:
    world = World(4 * BYTES_PER_TOKEN, splits_text=True)
    world.insert("bf16", (text(1, 2),))
    world.insert("bf16", (text(3),))
    assert world.match("bf16", (text(1),)).length == 1
    world.insert("bf16", (text(4, 4),))
    assert world.match("bf16", (text(1, 2),)).length == 1
    assert world.match("bf16", (text(3),)).length == 1


def test_a_match_shrinks_to_what_is_left_of_it() -> None:
    world = World(3 * BYTES_PER_TOKEN, splits_text=False)
    match = world.insert("bf16", (text(1), text(2)))
    world.pin("bf16", (text(1),))
    world.insert("bf16", (text(5, 5),))
    world.unpin(0)
    with world.tree.pinned(match) as prefix:
        world.check_prefix(prefix, (1,))
    world.tree.clear()
    with world.tree.pinned(match) as prefix:
        world.check_prefix(prefix, ())


def test_a_failing_payload_leaves_the_tree_as_it_was() -> None:
    world = World(2 * BYTES_PER_TOKEN, splits_text=False)
    world.insert("bf16", (text(1),))

    def payload_of(start: int, stop: int) -> FakePayload:
        raise MemoryError

    with pytest.raises(MemoryError):
        world.tree.insert("bf16", (text(1), text(2)), payload_of)
    assert len(world.tree) == 1
    world.insert("bf16", (text(3, 3),))  # nothing stayed pinned
    assert world.match("bf16", (text(3, 3),)).length == 2


def test_spilled_payloads_come_back() -> None:
    world = World(4 * BYTES_PER_TOKEN, splits_text=False, host_budget=6 * BYTES_PER_TOKEN)
    first: Segments = (text(1, 1), text(2, 2))
    world.insert("bf16", first)
    world.insert("bf16", (text(3, 3, 3, 3),))
    assert (world.tree.held_bytes, world.tree.host_bytes) == (12, 12)
    assert world.match("bf16", first).length == 4  # the other one spills in its place
    assert (world.tree.held_bytes, world.tree.host_bytes) == (12, 12)
    assert world.match("bf16", (text(3, 3, 3, 3),)).length == 4
    assert world.tree.inserted_tokens == 8


def test_what_is_wanted_next_is_not_what_the_host_forgets() -> None:
    world = World(4 * BYTES_PER_TOKEN, splits_text=False, host_budget=4 * BYTES_PER_TOKEN)
    wanted: Segments = (text(1), text(2), text(3))
    world.insert("bf16", wanted)
    for ids in ((4,), (5, 5), (6, 6)):  # what is wanted spills first, text(4) after it
        world.insert("bf16", (text(*ids),))
    assert (len(world.tree), world.tree.host_bytes) == (6, 4 * BYTES_PER_TOKEN)
    assert world.match("bf16", wanted).length == 3  # text(5, 5) comes down; text(4) makes room
    assert world.match("bf16", (text(4),)).length == 0


def test_a_host_too_small_for_a_swap_loses_the_end_of_the_path() -> None:
    world = World(4 * BYTES_PER_TOKEN, splits_text=False, host_budget=4 * BYTES_PER_TOKEN)
    world.insert("bf16", (text(1, 1), text(2, 2)))
    world.insert("bf16", (text(3, 3, 3, 3),))
    assert world.match("bf16", (text(1, 1), text(2, 2))).length == 2
    assert world.match("bf16", (text(3, 3, 3, 3),)).length == 4


def test_a_failing_restore_loses_the_payload_and_nothing_else() -> None:
    world = World(2 * BYTES_PER_TOKEN, splits_text=False, host_budget=100)

    def restore(payload: FakePayload) -> FakePayload:
        raise MemoryError

    world.tree = KVTree(2 * BYTES_PER_TOKEN, host=Host(100, lambda p: p.moved("host"), restore))
    world.insert("bf16", (text(1, 1),))
    world.insert("bf16", (text(2, 2),))
    with pytest.raises(MemoryError):
        world.tree.match("bf16", (text(1, 1),))
    assert (len(world.tree), world.tree.held_bytes, world.tree.host_bytes) == (1, 0, 6)
    assert world.tree.match("bf16", (text(1, 1),)).length == 0


def test_what_cannot_be_restored_beside_pins_stays_spilled() -> None:
    world = World(4 * BYTES_PER_TOKEN, splits_text=False, host_budget=100)
    first: Segments = (text(1, 1), text(2, 2))
    world.insert("bf16", first)
    world.insert("bf16", (text(3, 3),))  # spills text(2, 2)
    with world.tree.pinned(world.match("bf16", (text(3, 3),))):
        assert world.match("bf16", first).length == 2
        assert world.tree.insert("bf16", first, no_payload).length == 2
    assert world.match("bf16", first).length == 4
    assert world.tree.inserted_tokens == 6


def test_the_host_forgets_least_recently_used_first() -> None:
    world = World(2 * BYTES_PER_TOKEN, splits_text=False, host_budget=4 * BYTES_PER_TOKEN)
    for job in (1, 2, 3, 4):
        world.insert("bf16", (text(job, job),))
    held = len(world.tree)
    assert held == 3
    assert world.match("bf16", (text(1, 1),)).length == 0
    assert world.match("bf16", (text(2, 2),)).length == 2
