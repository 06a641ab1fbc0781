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
        # Ids twice, as a text and as runs, and the text itself.
        super().__init__(_KEPT_BYTES, lambda known: 1024 + 128 * len(known.fed))


def repeated_texts(texts: Iterable[Hashable | None]) -> set[int]:
    """Hashes of the texts that several jobs of a group share; None stands for a text that no other
    job can have.
    """
    # Eight bytes each: of a million texts most are one job's alone.
    hashes = np.fromiter(map(hash, filter(None, texts)), np.int64)
    found, counts = np.unique(hashes, return_counts=True)
    return set(found[counts > 1].tolist())
