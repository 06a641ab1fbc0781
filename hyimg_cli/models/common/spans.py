"""Image tokens as grids, and masks as runs of queries with one rule each: no mask tensor is built;
no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Grid:
    """Rows and columns of image tokens."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def places(self, side: int) -> list[int]:
        """Row of each token in a table of `side` x `side` positions."""
        return [y * side + x for y in range(self.rows) for x in range(self.columns)]


@dataclass(frozen=True)
class QuerySpan:
    """Queries `[start, stop)`: they see every slot before `stop`, or, if causal, up to
    themselves.
    """

    start: int
    stop: int
    is_causal: bool


def query_spans(
    start: int, stop: int, full_spans: Iterable[tuple[int, int]], cuts: Iterable[int] = ()
) -> tuple[QuerySpan, ...]:
    """The mask of tokens `[start, stop)`: causal, but fully visible within each of `full_spans`.

    A full span must lie wholly inside or outside: its tokens depend on each other and are computed
    together. Causal runs also end at `cuts`, wherever a prefix may be shared: the same runs, and so
    the same bits, whether what comes before a cut is computed here or was there already.
    """
    borders = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
    result: list[QuerySpan] = []
    at = start
    for span_start, span_stop in sorted(full_spans):
        if span_stop <= start or span_start >= stop:
            continue
        assert start <= span_start < span_stop <= stop, "an image is never computed in parts"
        result += _causal(at, span_start, borders)
        result.append(QuerySpan(span_start, span_stop, is_causal=False))
        at = span_stop
    return (*result, *_causal(at, stop, borders))


def _causal(start: int, stop: int, borders: Sequence[int]) -> list[QuerySpan]:
    inner = [border for border in borders if start < border < stop]
    edges = [start, *inner, stop]
    return [QuerySpan(a, b, is_causal=True) for a, b in pairwise(edges) if a < b]
