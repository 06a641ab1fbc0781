"""Segments: the stretches of a sequence that enter the KV cache as a unit. No torch.

Keys name the content, not the position: a position is the length of the path before a segment (and
for image tokens the grids on top of it), so segments at the end of equal paths have equal
positions.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import ClassVar, TypeAlias

from hyimg_cli.spec.digest import of_bytes

_KEY_LENGTH = 32  # hex digits: 128 bits, far beyond any chance of two equal keys


@dataclass(frozen=True)
class TextSegment:
    """Text tokens; each sees only tokens before it, so the segment may split anywhere."""

    ids: tuple[int, ...]
    is_atomic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        assert self.ids, "a segment has at least one token"

    @property
    def length(self) -> int:
        return len(self.ids)

    @cached_property
    def key(self) -> str:
        """Return the digest of the kind and the ids, 32 hex digits."""
        return _digest(b"text", self.ids)

    def head(self, at: int) -> "TextSegment":
        """Return the first `at` tokens."""
        return TextSegment(self.ids[:at])

    def tail(self, at: int) -> "TextSegment":
        """Return the segment after its first `at` tokens."""
        return TextSegment(self.ids[at:])

    def shared_with(self, other: "TextSegment") -> int:
        """Return the number of leading tokens that both have in common."""
        pairs = zip(self.ids, other.ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class ImageSegment:
    """An image's tokens; they see each other fully, so the segment is never split.

    `digest` names the image's content (its ids are placeholders); `grids` are the (rows, columns)
    that shape its 2-D positions.
    """

    ids: tuple[int, ...]
    digest: str
    grids: tuple[tuple[int, int], ...]
    is_atomic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert self.ids, "a segment has at least one token"

    @property
    def length(self) -> int:
        return len(self.ids)

    @cached_property
    def key(self) -> str:
        """The digest of the kind, the ids, the image and its grids, 32 hex digits."""
        return _digest(f"image {self.digest} {self.grids}".encode(), self.ids)


Segment: TypeAlias = TextSegment | ImageSegment


def shares_more(
    one: Sequence[Segment], other: Sequence[Segment], tokens: int, *, splits_text: bool
) -> bool:
    """True if two sequences share more than this many leading tokens, in whole segments or not."""
    at = 0
    for own, its in zip(one, other, strict=False):
        if own == its:
            at += own.length
        elif splits_text and isinstance(own, TextSegment) and isinstance(its, TextSegment):
            more = tokens + 1 - at
            return more <= min(own.length, its.length) and own.ids[:more] == its.ids[:more]
        else:
            return False
        if at > tokens:
            return True
    return False


def leading(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """Return the first `tokens` of a sequence, which may end inside a text only."""
    found: list[Segment] = []
    for segment in segments:
        if segment.length > tokens:
            if tokens > 0:
                assert isinstance(segment, TextSegment), "only text splits"
                found.append(segment.head(tokens))
            break
        found.append(segment)
        tokens -= segment.length
    return found


def _digest(what: bytes, ids: tuple[int, ...]) -> str:
    return of_bytes(what + b"\0" + array("q", ids).tobytes())[:_KEY_LENGTH]
