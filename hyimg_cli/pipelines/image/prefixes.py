"""Prefixes shared between jobs: the KV tree on one side, a job's buffer on the other."""

from collections.abc import Sequence

from hyimg_cli.kv.buffer import Buffer, Slice
from hyimg_cli.kv.segments import Segment
from hyimg_cli.kv.tree import KVTree


class Prefixes:
    """One model's part of the tree. With a budget of zero nothing is ever shared."""

    def __init__(self, tree: "KVTree[Slice]", scope: str) -> None:
        self._tree = tree
        self._scope = scope

    def of_branch(self, number: int) -> "Prefixes":
        """Those of one guidance branch, whose K/V lie where no other branch finds them."""
        return Prefixes(self._tree, f"{self._scope}, branch {number}")

    def held(self, segments: Sequence[Segment]) -> int:
        """How many leading tokens of the segments are held."""
        return self._tree.match(self._scope, segments).length

    def start(self, segments: Sequence[Segment], buffer: Buffer) -> int:
        """Fill the empty `buffer` with the longest prefix that is held; its length in tokens."""
        assert buffer.length == 0, "a prefix stands at the front"
        match = self._tree.match(self._scope, segments)
        with self._tree.pinned(match) as prefix:
            for payload in prefix.payloads:
                buffer.extend(payload)
        return buffer.length

    def keep(self, segments: Sequence[Segment], buffer: Buffer) -> None:
        """Hold the segments' K/V, copied from the buffer they were computed in."""
        self._tree.insert(self._scope, segments, buffer.cut)

    def release(self) -> None:
        """Hold nothing any more: memory is short. Later jobs compute their prefixes again."""
        self._tree.clear()
