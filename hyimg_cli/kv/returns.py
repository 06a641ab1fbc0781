"""Which prefixes the jobs of a plan that are left will look up; no torch.

Every leading part of a sequence that can be shared has a hash, which continues the hash of the part
before it. Only hashes of several jobs are kept: of many jobs, most have prompts of their own, and
such a prompt is not worth any memory.

Without `splits_text` the parts are whole segments. With it texts share any leading tokens. They are
counted in blocks, so up to `_BLOCK` - 1 tokens that could be shared are computed again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyimg_cli.kv.segments import ImageSegment, Segment, leading

_BLOCK = 16
Row = Sequence[Segment]


class Returns:
    """The number of jobs left that will look up each prefix.

    Images are known by their paths. Methods for sequences that were read take `names`, which has
    the path of each image digest.
    """

    def __init__(
        self, jobs: Iterable[Any], rows_of: Callable[[Any], Iterable[Row]], *, splits_text: bool
    ) -> None:
        """`rows_of`: returns the sequences that a job will look up."""
        self._rows_of, self._splits_text = rows_of, splits_text
        hashes = np.fromiter((part for job in jobs for part in self._parts(job)), np.int64)
        found, counts = np.unique(hashes, return_counts=True)
        many = counts > 1
        self._left = dict(zip(found[many].tolist(), counts[many].tolist(), strict=True))

    def end(self, job: Any) -> None:
        """Count a job as one that is not left."""
        for part in self._parts(job):
            if part in self._left:
                self._left[part] -= 1

    def shared(self, row: Row, names: Mapping[str, str]) -> list[Segment]:
        """Return the leading part of a sequence that another job that is left may look up."""
        longest = 0
        for stop, part in self._path(row, names):
            if self._left.get(part, 0) < 2:
                break
            longest = stop
        return leading(row, longest)

    def over(self, row: Row, names: Mapping[str, str]) -> tuple[list[Segment], int] | None:
        """Return the part of a sequence that no job left looks up, and where what is needed ends.

        None if a job looks up all of it, or if it is unknown.
        """
        longest = 0
        for stop, part in self._path(row, names):
            left = self._left.get(part)
            if not left:
                return None if left is None else (leading(row, stop), longest)
            longest = stop
        return None

    def _parts(self, job: Any) -> set[int]:
        return {part for row in self._rows_of(job) for _, part in self._path(row, {})}

    def _path(self, row: Row, names: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        """Yield each part that can be shared: where it ends, and its hash."""
        at = part = 0
        for segment in row:
            ids, start = segment.ids, at
            at += segment.length
            if isinstance(segment, ImageSegment):
                part = hash((part, names.get(segment.digest, segment.digest)))
            else:
                whole = (len(ids) - 1) // _BLOCK * _BLOCK if self._splits_text else 0
                for first in range(0, whole, _BLOCK):
                    part = hash((part, ids[first : first + _BLOCK]))
                    yield start + first + _BLOCK, part
                part = hash((part, "end", ids[whole:]))
            yield at, part
