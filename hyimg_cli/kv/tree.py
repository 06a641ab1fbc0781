"""The prefix tree of segments: which K/V are kept, how long, and shared. No torch.

    tree      scope ── system prompt ──┬── source image ──┬── text of job 1
              (model,                  │                  └── text of job 2   ◀─ evictable: a leaf
               dtype)                  └── <cfg> text  ◀─ pinned: it and the path to it stay
    payloads  one a node, owned by the tree: on the device, or (evicted with a Host) in host memory
    caller    a Match: a place in the tree, owns nothing
              a Prefix, inside `with tree.pinned(match)`: payloads to share with its own buffer

Bytes never exceed a budget: payloads that do not fit next to the pinned nodes are not inserted. Of
the unpinned nodes, the least recently used leaf is evicted first. One thread uses a tree.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from hyimg_cli.kv.segments import Segment, TextSegment, shares_more


class Payload(Protocol):
    """The K/V of one node. To the tree it is a constant number of bytes."""

    @property
    def nbytes(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """Return the first `at` tokens and the rest; their bytes add up to the whole.

        Evicting a half frees its memory, unless others share it.
        """


P = TypeVar("P", bound=Payload)


@dataclass(frozen=True)
class Host(Generic[P]):
    """Second storage for evicted payloads. `spill` and `restore` keep `nbytes` unchanged."""

    budget_bytes: int
    spill: Callable[[P], P]
    restore: Callable[[P], P]


@dataclass(eq=False)
class _Root:
    children: "dict[str | int, _Node]" = field(default_factory=dict)
    pins: int = 0


@dataclass(eq=False, kw_only=True)
class _Node(_Root):
    segment: Segment
    parent: _Root


@dataclass(frozen=True)
class Match:
    """A position in the tree, `length` tokens deep. Pin it to reach the payloads."""

    length: int
    node: _Root = field(repr=False)


@dataclass(frozen=True)
class Prefix(Generic[P]):
    """The `length` tokens of a pinned match: its payloads in order, valid until the pin ends."""

    length: int
    payloads: tuple[P, ...]


class KVTree(Generic[P]):
    """Payloads by the segments that lead to them, within a budget of bytes.

    A `scope` is one root: what a payload depends on besides segments (model, weights, dtype).
    """

    def __init__(
        self, budget_bytes: int, *, splits_text: bool = False, host: Host[P] | None = None
    ) -> None:
        """Without `splits_text` whole segments are shared and nodes never split.

        K/V then come from forwards over the same pieces as without the tree, bit for bit. With it
        texts share every leading token, whatever segments they came in.
        """
        self._splits_text = splits_text
        self._host = host
        self._roots: dict[str, _Root] = {}
        self._pinned: set[_Root] = set()
        self._coming: list[tuple[str, Sequence[Segment]]] = []
        self._device_level: _Level[P] = _Level(budget_bytes)
        self._host_level: _Level[P] = _Level(host.budget_bytes if host else 0)
        self.matched_tokens = self.inserted_tokens = self.evicted_bytes = 0

    def __len__(self) -> int:
        """Return the number of nodes, including those in host memory."""
        return len(self._device_level.payloads) + len(self._host_level.payloads)

    @property
    def held_bytes(self) -> int:
        """Return the bytes on the device."""
        return self._device_level.held_bytes

    @property
    def host_bytes(self) -> int:
        """Return the bytes in host memory."""
        return self._host_level.held_bytes

    def match(self, scope: str, segments: Sequence[Segment]) -> Match:
        """Return the longest cached prefix of `segments`, now the most recently used.

        Spilled parts are restored, as far as memory allows.
        """
        node, missing = self._walk(scope, segments)
        match = Match(_length(segments) - _length(missing), node)
        self.matched_tokens += match.length
        return match

    @contextmanager
    def pinned(self, match: Match) -> Iterator[Prefix[P]]:
        """Keep the prefix of a match until the block ends; then it counts as just used.

        It is shorter than the match if a part was evicted since: use the prefix's length.
        """
        node = match.node
        while isinstance(node, _Node) and node not in self._device_level.payloads:
            node = node.parent
        with self._kept(node):
            path, payloads = _path(node), self._device_level.payloads
            yield Prefix(_length(n.segment for n in path), tuple(payloads[n] for n in path))
        for used in _path(node):
            self._device_level.touch(used)

    def insert(
        self, scope: str, segments: Sequence[Segment], payload_of: Callable[[int, int], P]
    ) -> Match:
        """Cache the prefix of `segments` and return it: all of it, or as much as fits.

        `payload_of(start, stop)` makes the payload of these tokens of the sequence. It is called
        for missing nodes only, in order, and before memory is freed: memory holds the budget and
        one more payload.
        """
        node, missing = self._walk(scope, segments)
        start = _length(segments) - _length(missing)
        for segment in missing:
            child = self._grow(node, segment, start, payload_of)
            if child is None:
                break
            node, start = child, start + segment.length
            self.inserted_tokens += segment.length
        return Match(start, node)

    @contextmanager
    def expecting(self, scope: str, segments: Sequence[Segment]) -> Iterator[None]:
        """Record until the block ends that `segments` are being computed, to be inserted."""
        coming = scope, segments
        self._coming.append(coming)
        try:
            yield
        finally:
            self._coming.remove(coming)

    def expects(self, scope: str, segments: Sequence[Segment], tokens: int) -> bool:
        """True if more than this many leading tokens of `segments` are being computed."""
        return bool(self._device_level.budget_bytes) and any(
            of == scope and shares_more(segments, coming, tokens, splits_text=self._splits_text)
            for of, coming in self._coming
        )

    def trim(self, scope: str, segments: Sequence[Segment], tokens: int) -> None:
        """Drop a sequence after its first `tokens`, and all that continues it.

        What other sequences begin with stays, and what is pinned.
        """
        node, missing = self._roots.get(scope, _Root()), [*segments]
        while missing and (child := self._child(node, missing[0])) is not None:
            node, missing = child, _behind(missing, child.segment.length)
        if not missing:
            for child in [*node.children.values()]:
                self._drop(child)
        while isinstance(node, _Node) and not (node.children or node.pins):
            parent = node.parent
            if _length(one.segment for one in _path(parent)) < tokens:
                break
            self._drop(node)
            node = parent

    def clear(self) -> None:
        """Drop everything that is not pinned; the counters stay."""
        for scope in list(self._roots):
            self.clear_scope(scope)

    def clear_scope(self, scope: str) -> None:
        """Drop everything that is not pinned in one scope."""
        for child in list(self._roots.get(scope, _Root()).children.values()):
            self._drop(child)

    # --- the way down

    def _walk(self, scope: str, segments: Sequence[Segment]) -> tuple[_Root, list[Segment]]:
        """Return the deepest on-device node along `segments`, and the missing segments below it."""
        node, missing = self._roots.setdefault(scope, _Root()), list(segments)
        while missing and (child := self._child(node, missing[0])) is not None:
            self._level_of(child).touch(child)
            node, missing = child, _behind(missing, child.segment.length)
        for depth, held in enumerate(path := _path(node)):
            if held not in self._device_level.payloads and not self._restored(held):
                return held.parent, _behind(segments, _length(n.segment for n in path[:depth]))
        return node, missing

    def _child(self, node: _Root, segment: Segment) -> "_Node | None":
        """Return the child whose tokens `segment` begins with, split off if necessary."""
        child = node.children.get(self._edge(segment))
        if child and isinstance(segment, TextSegment) and isinstance(child.segment, TextSegment):
            shared = child.segment.shared_with(segment)
            assert self._splits_text or child.segment == segment, "equal keys, equal segments"
            return child if shared == child.segment.length else self._split(child, shared)
        return child

    def _edge(self, segment: Segment) -> str | int:
        """Return the key among siblings: the first token of a text, else the segment's own key."""
        can_split = self._splits_text and not segment.is_atomic
        return segment.ids[0] if can_split else segment.key

    def _grow(
        self, parent: _Root, segment: Segment, start: int, payload_of: Callable[[int, int], P]
    ) -> "_Node | None":
        """Return a new child with its payload, or None if it does not fit."""
        # An existing child could not be restored, so nothing fits here.
        if not self._device_level.budget_bytes or self._edge(segment) in parent.children:
            return None
        with self._kept(parent):
            payload = payload_of(start, start + segment.length)
            if not self._reserve(self._device_level, payload.nbytes):
                return None
        child = parent.children[self._edge(segment)] = _Node(segment=segment, parent=parent)
        self._device_level.add(child, payload)
        return child

    def _split(self, node: _Node, at: int) -> _Node:
        """Return a new node with the first `at` tokens of `node`, above it.

        `node` keeps the rest, its pins and its age, so a match that ends in it stays valid.
        """
        assert isinstance(node.segment, TextSegment), "only text splits"
        level = self._level_of(node)
        whole = level.payloads[node]
        first, rest = whole.split(at)
        assert first.nbytes + rest.nbytes == whole.nbytes, "splitting keeps the bytes"
        upper = _Node(segment=node.segment.head(at), parent=node.parent)
        upper.parent.children[self._edge(upper.segment)] = upper
        node.segment, node.parent = node.segment.tail(at), upper
        upper.children[self._edge(node.segment)] = node
        level.replace(node, rest)
        level.add(upper, first)
        return upper

    # --- room

    @contextmanager
    def _kept(self, node: _Root) -> Iterator[None]:
        node.pins += 1
        self._pinned.add(node)
        try:
            yield
        finally:
            node.pins -= 1
            if not node.pins:
                self._pinned.discard(node)

    def _reserve(self, level: "_Level[P]", nbytes: int) -> bool:
        """Return True if `nbytes` fit after evictions; evict nothing if they cannot."""
        if level.held_bytes + nbytes <= level.budget_bytes:
            return True
        if level.bytes_on_paths(self._pinned) + nbytes > level.budget_bytes:
            return False
        while level.held_bytes + nbytes > level.budget_bytes:
            self._evict(level)
        return True

    def _evict(self, level: "_Level[P]") -> None:
        """Evict the least recently used leaf: from device to host, or from the host."""
        node = level.oldest_leaf()
        payload = level.payloads[node]
        if level is self._device_level:
            self.evicted_bytes += payload.nbytes
            if self._host and self._reserve(self._host_level, payload.nbytes):
                self._host_level.add(node, self._host.spill(payload))
                level.remove(node)
                return
        self._drop(node)

    def _restored(self, node: _Node) -> bool:
        """True if a spilled node is back on the device; its parent is there already."""
        if self._host is None or node not in self._host_level.payloads:
            return False  # it was evicted while its ancestors were restored
        payload = self._host_level.remove(node)  # first, so that what is evicted can take its room
        with self._kept(node.parent):
            if not self._reserve(self._device_level, payload.nbytes):
                self._host_level.add(node, payload)
                return False
        try:
            self._device_level.add(node, self._host.restore(payload))
        except BaseException:
            self._host_level.add(node, payload)
            self._drop(node)
            raise
        return True

    def _drop(self, node: _Node) -> None:
        """Forget a node and all below it, except pinned nodes and the paths to them."""
        for child in list(node.children.values()):
            self._drop(child)
        if not node.children and not node.pins:
            del node.parent.children[self._edge(node.segment)]
            self._level_of(node).remove(node)

    def _level_of(self, node: _Node) -> "_Level[P]":
        is_on_device = node in self._device_level.payloads
        return self._device_level if is_on_device else self._host_level


class _Level(Generic[P]):
    """Payloads in one memory, least recently used first.

    Below a node on the host everything is on the host: eviction goes leaf by leaf, and a walk
    restores from the root on.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.payloads: dict[_Node, P] = {}

    def add(self, node: _Node, payload: P) -> None:
        self.payloads[node] = payload
        self.held_bytes += payload.nbytes

    def replace(self, node: _Node, payload: P) -> None:
        self.held_bytes += payload.nbytes - self.payloads[node].nbytes
        self.payloads[node] = payload

    def remove(self, node: _Node) -> P:
        payload = self.payloads.pop(node)
        self.held_bytes -= payload.nbytes
        return payload

    def touch(self, node: _Node) -> None:
        self.payloads[node] = self.payloads.pop(node)

    def bytes_on_paths(self, pinned: "Iterable[_Root]") -> int:
        """Return the bytes that no eviction can free: pinned nodes and the paths to them."""
        ends = (node for node in pinned if node in self.payloads)
        kept = {on_path for node in ends for on_path in _path(node)}
        return sum(self.payloads[node].nbytes for node in kept if node in self.payloads)

    def oldest_leaf(self) -> _Node:
        """Return the first node without pins and without children in the same memory."""
        return next(
            node
            for node in self.payloads
            if not node.pins and not any(c in self.payloads for c in node.children.values())
        )


def _path(node: _Root) -> list[_Node]:
    """Return the nodes from below the root to `node`."""
    path: list[_Node] = []
    while isinstance(node, _Node):
        path.append(node)
        node = node.parent
    return path[::-1]


def _length(segments: Iterable[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _behind(segments: Sequence[Segment], at: int) -> list[Segment]:
    """Return the segments after the first `at` tokens, which may end inside a text only."""
    for number, segment in enumerate(segments):
        if at <= 0:
            return [*segments[number:]]
        if at < segment.length:
            assert isinstance(segment, TextSegment), "only text splits"
            return [segment.tail(at), *segments[number + 1 :]]
        at -= segment.length
    return []
