"""Embeddings of prompts and pictures: from memory, else from disk, else computed now.

The encoder decides the contents of a key, which never include seeds or steps. Embeddings are never
modified, because jobs share the same tensors.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from hyimg_cli.cache.disk import SOURCE_IMAGES, START_PICTURES, DiskStore
from hyimg_cli.cache.memo import Memo
from hyimg_cli.errors import MachineError
from hyimg_cli.models.latent import ConditionEncoder, PromptEmbedding
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Embedded, Progress, PromptsReady

Item = TypeVar("Item")
logger = logging.getLogger(__name__)
_MEMO_BYTES = 2_000_000_000
_WHAT: dict[str, Embedded] = {
    START_PICTURES: "start pictures", SOURCE_IMAGES: "source pictures",
}  # fmt: skip


class Encodings(Generic[Item]):
    """Embeds each distinct item once; later runs find the result on disk.

    An item is a string or a view of a picture. With the cache off, every job embeds its own items,
    and the encoders stay loaded. `scope`: the scope of the jobs at work. An item embedded in one
    scope is not found in another, not even on disk.
    """

    def __init__(self, cache: CacheConfig, kind: str, *, is_on: bool = True) -> None:
        """`kind`: the kind of entry in the disk cache."""
        self._is_on, self._kind = is_on, kind
        self._what: Embedded = _WHAT.get(kind, "prompts")
        self._memo: Memo[str, PromptEmbedding] = Memo(
            _MEMO_BYTES, lambda one: sum(tensor.nbytes for tensor in one.tensors.values())
        )
        self._store = DiskStore(cache.folder, cache.budget_bytes)
        self._counts = {"memory_hits": 0, "disk_hits": 0, "misses": 0}
        self._ready: set[tuple[str, Item]] = set()
        self.scope = ""

    def ready(
        self, encoder: ConditionEncoder[Item], items: Iterable[Item]
    ) -> Iterator[Progress | PromptsReady]:
        """Embed all `items` that are not ready yet, then release the encoders.

        An item that cannot be embedded fails its own jobs later. Raises MachineError.
        """
        distinct = [one for one in dict.fromkeys(items) if (self.scope, one) not in self._ready]
        if not (distinct and self._is_on):
            return
        started, before = time.perf_counter(), self._counts["misses"]
        for count, item in enumerate(distinct, 1):
            try:
                _, place = self._find(encoder, item)
                if place != "memory_hits":
                    self._counts[place] += 1
            except MachineError:
                raise
            except Exception:
                logger.info("an item was not embedded ahead of its job", exc_info=True)
            yield Progress("", "embed", count, len(distinct))
        self._ready.update((self.scope, item) for item in distinct)
        encoder.release()
        encoded = self._counts["misses"] - before
        yield PromptsReady(len(distinct), encoded, time.perf_counter() - started, self._what)

    def of(
        self, encoder: ConditionEncoder[Item], item: Item, *, is_counted: bool = True
    ) -> PromptEmbedding:
        """Return an item's embedding, with any cache warnings.

        `is_counted`: the look-up is for a job; other look-ups are not counted and take no warnings.
        """
        embedding, place = self._find(encoder, item)
        if place == "misses" and self._is_on:
            # Memory was too small for the plan.
            encoder.release()
        if is_counted:
            self._counts[place] += 1
            embedding = replace(embedding, warnings=self._store.take_notes())
        return embedding

    def counts(self) -> dict[str, int]:
        """Return how often an item was in memory for a job, was on disk, or had to be embedded."""
        return dict(self._counts)

    def clear(self) -> None:
        """Drop everything in memory."""
        self._memo.clear()
        self._ready.clear()

    def _find(self, encoder: ConditionEncoder[Item], item: Item) -> tuple[PromptEmbedding, str]:
        """Return an embedding, and the name of the count for the place where it was found."""
        if not self._is_on:
            return encoder.encode(item), "misses"
        key = encoder.key(item)
        place = digest.of_json([key, self.scope]) if self.scope else key
        if (known := self._memo.find(place)) is not None:
            return known, "memory_hits"
        embedding, was_there = self._store.read_through(
            self._kind,
            place,
            lambda: encoder.encode(item),
            pack=encoder.pack,
            unpack=lambda data: encoder.unpack(data, key),
        )
        self._memo.get(place, lambda: embedding)
        return embedding, "disk_hits" if was_there else "misses"
