"""Sizes that memory was too small for: learnt in one group, heeded by all that follow."""

import logging
from collections.abc import Iterable, Sequence

from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.image.prewarm import Shape, shape_of
from hyimg_cli.pipelines.out_of_memory import Shortage
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob

logger = logging.getLogger(__name__)


class MemoryLimits:
    """How many jobs of a shape may think and may draw together, where an out-of-memory has shown
    it. For the life of a loaded model: what was too much once is not tried again.
    """

    def __init__(self) -> None:
        self._most: dict[tuple[str, Shape], int] = {}

    def learn(self, found: Iterable[Shortage], card: ModelCard) -> None:
        """Keep what a run has met, prewarming or not."""
        for shortage in found:
            for shape in _shapes(shortage.jobs, card):
                key = shortage.stage, shape
                self._most[key] = min(shortage.most, self._most.get(key, shortage.most))

    def within(self, jobs: Sequence[ImageJob], together: Together, card: ModelCard) -> Together:
        """Sizes for a group: no more than any of its shapes may."""
        if not self._most:
            return together
        shapes = _shapes(jobs, card)
        found = Together(
            self._least("think", shapes, together.thinking),
            self._least("draw", shapes, together.drawing),
        )
        if found != together:
            logger.warning(
                "memory was too small for more before: %d think and %d draw together",
                found.thinking,
                found.drawing,
            )
        return found

    def clear(self) -> None:
        """Forget all: another model is coming."""
        self._most.clear()

    def _least(self, stage: str, shapes: set[Shape], size: int) -> int:
        return min([size, *(self._most.get((stage, shape), size) for shape in shapes)])


def _shapes(jobs: Iterable[ImageJob], card: ModelCard) -> set[Shape]:
    return {shape for job in jobs if (shape := shape_of(job, card)) is not None}
