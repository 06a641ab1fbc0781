"""Texts that are written, for the jobs that would write the same: one decode, n drawings.

A text is known by its job's inputs and by the bytes of its sources. Its ids are kept here; its K/V
are in the tree of prefixes, behind its prompt's, for as long as there is room.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from hyimg_cli.cache.memo import Memo
from hyimg_cli.manifest.planner import TextIdentity
from hyimg_cli.models.protocols import GeneratedText
from hyimg_cli.spec.job import ImageJob

_KEPT_BYTES = 64_000_000
Key = tuple[TextIdentity, tuple[str, ...]]


@dataclass(frozen=True)
class CachedText:
    """A text, and `writer`, the job that wrote it.

    `fed`: the ids that its context has behind the prompt. `runs`: how they entered the network,
    with what was withdrawn at the end: fed so again, they give the same K/V to the bit.
    """

    text: GeneratedText
    fed: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]
    writer: str

    @property
    def withdrawn(self) -> tuple[int, ...]:
        """Tokens that entered the network at the end and were taken back."""
        return tuple(id_ for run in self.runs for id_ in run)[len(self.fed) :]


class Texts(Memo[Key, CachedText]):
    """The texts of one model, by inputs and sources of the jobs that write them; those that were
    asked for longest ago go first.
    """

    def __init__(self) -> None:
        super().__init__(_KEPT_BYTES, _nbytes)


class SharedTexts:
    """Which texts of a group are being written, and the jobs that wait for them. None stands for a
    text that no other job can have.
    """

    def __init__(self, texts: Iterable[Hashable | None]) -> None:
        # By their hashes, eight bytes each: of a million texts most are one job's alone.
        hashes = np.fromiter(map(hash, filter(None, texts)), np.int64)
        found, counts = np.unique(hashes, return_counts=True)
        self._several = set(found[counts > 1].tolist())
        self._awaited: dict[Hashable, list[ImageJob]] = {}

    def are_several(self, text: Hashable | None) -> bool:
        """True if several jobs share the text."""
        return text is not None and hash(text) in self._several

    def begin(self, text: Hashable | None) -> None:
        """Note that a job writes the text."""
        if text is not None:
            self._awaited.setdefault(text, [])

    def defer(self, text: Hashable | None, job: ImageJob) -> bool:
        """True if the job waits until another one has written its text."""
        if text not in self._awaited:
            return False
        self._awaited[text].append(job)
        return True

    def end(self, text: Hashable | None) -> list[ImageJob]:
        """Note that nobody writes the text any more; the jobs that waited for it."""
        return self._awaited.pop(text, [])


def _nbytes(known: CachedText) -> int:
    # Ids twice, as a text and as runs, and the text itself.
    return 1024 + 128 * len(known.fed)
