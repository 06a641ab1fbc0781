"""Embeddings of prompts and pictures: those of all jobs before the first, then one job's."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from hyimg_cli.cache.disk import SOURCE_IMAGES, START_PICTURES
from hyimg_cli.errors import MachineError
from hyimg_cli.models.latent import ConditionEncoder, PromptEmbedding
from hyimg_cli.pipelines.encoded_inputs import EncodedInputs, Encoding
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec.events import Embedded, Progress, PromptsReady

Item = TypeVar("Item")
logger = logging.getLogger(__name__)
_WHAT: dict[str, Embedded] = {
    START_PICTURES: "start pictures", SOURCE_IMAGES: "source pictures",
}  # fmt: skip


class Encodings(Generic[Item]):
    """Embeds each distinct item once.

    An item is a string or a view of a picture. With the cache off, every job embeds its own items,
    and the encoders stay loaded. `scope`: the scope of the jobs at work. An item embedded in one
    scope is not found in another, not even on disk.
    """

    def __init__(self, cache: CacheConfig, kind: str, *, is_on: bool = True) -> None:
        """`kind`: the kind of entry in the disk cache."""
        self._is_on = is_on
        self._what: Embedded = _WHAT.get(kind, "prompts")
        self._inputs: EncodedInputs[PromptEmbedding] = EncodedInputs(
            cache, kind, lambda one: sum(tensor.nbytes for tensor in one.tensors.values())
        )
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
        started, before = time.perf_counter(), self._inputs.counts["misses"]
        for count, item in enumerate(distinct, 1):
            try:
                self._inputs.find(self._encoding(encoder, item))
            except MachineError:
                raise
            except Exception:
                logger.info("an item was not embedded ahead of its job", exc_info=True)
            yield Progress("", "embed", count, len(distinct))
        self._ready.update((self.scope, item) for item in distinct)
        encoder.release()
        encoded = self._inputs.counts["misses"] - before
        yield PromptsReady(len(distinct), encoded, time.perf_counter() - started, self._what)

    def of(
        self, encoder: ConditionEncoder[Item], item: Item, *, is_counted: bool = True
    ) -> PromptEmbedding:
        """Return an item's embedding, with any cache warnings.

        `is_counted`: the look-up is for a job; other look-ups are not counted and take no warnings.
        """
        counts = self._inputs.counts
        if not self._is_on:
            counts["misses"] += is_counted
            return encoder.encode(item)
        encoding = self._encoding(encoder, item)
        embedding, place = self._inputs.find(encoding)
        if place == "misses":
            # Memory was too small for the plan.
            encoder.release()
        if is_counted:
            counts["memory_hits"] += place == "memory_hits"
            embedding = replace(embedding, warnings=self._inputs.take_warnings(encoding))
        return embedding

    def counts(self) -> dict[str, int]:
        """Return how often an item was in memory for a job, was on disk, or had to be embedded."""
        return {**self._inputs.counts}

    def clear(self) -> None:
        """Drop everything in memory."""
        self._inputs.clear()
        self._ready.clear()

    def _encoding(self, encoder: ConditionEncoder[Item], item: Item) -> Encoding[PromptEmbedding]:
        """Return how an encoder embeds an item, in the scope of the jobs at work."""
        key = encoder.key(item)
        encoding = Encoding(
            key,
            lambda: encoder.encode(item),
            encoder.pack,
            lambda data: encoder.unpack(data, key),
        )
        return encoding.within(self.scope)
