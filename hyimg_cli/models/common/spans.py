"""Image tokens as grids, and masks as runs of queries with one rule each; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hyimg_cli.kv.segments import ImageSegment, Segment, TextSegment


@dataclass(frozen=True)
class Grid:
    """Rows and columns of image tokens."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def places(self, side: int) -> list[int]:
        """Return the row of each token in a table of `side` x `side` positions."""
        return [y * side + x for y in range(self.rows) for x in range(self.columns)]


@dataclass(frozen=True)
class QuerySpan:
    """Queries `[start, stop)` that see every slot before `stop` or, if causal, themselves."""

    start: int
    stop: int
    is_causal: bool


def query_spans(
    start: int, stop: int, full_spans: Iterable[tuple[int, int]], cuts: Iterable[int] = ()
) -> tuple[QuerySpan, ...]:
    """Return the mask of tokens `[start, stop)`: causal, but full within each of `full_spans`.

    A full span must be wholly inside or outside: its tokens depend on each other and are computed
    together. Causal runs also end at `cuts`, wherever a prefix may be shared: the same runs, and so
    the same bits, whether earlier tokens are computed here or were cached.
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


def cut_segments(
    ids: Sequence[int],
    cuts: Iterable[int],
    images: Mapping[int, tuple[str, tuple[Grid, ...]]],
    stop: int,
) -> list[Segment]:
    """Return the tokens `ids[:stop]` as segments that meet at `cuts`: texts and source images.

    `images`: digest and grids by start. An image that does not end before `stop`, and all that
    follows, is left out.
    """
    found: list[Segment] = []
    for start, end in pairwise(sorted({0, *cuts, len(ids)})):
        if start >= stop or (start in images and end > stop):
            break
        if start in images:
            found.append(_image_segment(tuple(ids[start:end]), *images[start]))
        else:
            found.append(TextSegment(tuple(ids[start : min(end, stop)])))
    return found


@lru_cache(maxsize=256)  # A key takes long to compute: jobs with one source share its segment.
def _image_segment(ids: tuple[int, ...], digest: str, grids: tuple[Grid, ...]) -> ImageSegment:
    return ImageSegment(ids, digest, tuple((grid.rows, grid.columns) for grid in grids))
