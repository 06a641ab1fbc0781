"""Prefetch and write-behind: threads read and write files while the model works."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from hyimg_cli.media.images import SourceImage, read_view
from hyimg_cli.spec.job import View

Done = TypeVar("Done")


@dataclass
class SourcePrefetch:
    """Reads source images in one thread before they are needed.

    A bad image fails only its own job.

    `coming`: views in the order in which they will be needed; each is removed when it is read.
    `window` of them are held in memory. `then` is called with each image that could be read, in the
    reading thread.
    """

    pool: ThreadPoolExecutor
    coming: deque[View]
    window: int
    then: Callable[[SourceImage], object] | None = None
    _reads: dict[View, Future[tuple[SourceImage, float]]] = field(default_factory=dict)

    def read(self, view: View) -> tuple[SourceImage, float]:
        """Return the image, and the seconds its reading took in parallel with other work.

        Raises SourceImageError as `read_view` does.
        """
        if view in self.coming:
            # Earlier views are no longer needed: their job failed at an earlier image.
            while self.coming[0] != view:
                self.coming.popleft()
            wanted = dict.fromkeys(islice(self.coming, self.window))
            self._reads = {known: read for known, read in self._reads.items() if known in wanted}
            for near in wanted:
                if near not in self._reads:
                    self._reads[near] = self.pool.submit(_timed, partial(read_view, near))
                    self._reads[near].add_done_callback(self._tell)
            self.coming.popleft()
        if view not in self._reads:
            return read_view(view), 0.0
        started = time.perf_counter()
        image, seconds = self._reads[view].result()
        return image, max(0.0, seconds - (time.perf_counter() - started))

    def _tell(self, read: Future[tuple[SourceImage, float]]) -> None:
        if self.then is not None and not read.cancelled() and read.exception() is None:
            self.then(read.result()[0])


class WriteBehind(Generic[Done]):
    """Runs writes in one thread, in order; each result is returned once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._writes: list[Future[tuple[Done, float]]] = []

    def submit(self, write: Callable[[], Done]) -> None:
        self._writes.append(self._pool.submit(_timed, write))

    def finished(self, *, wait: bool) -> Iterable[tuple[Done, float]]:
        """Yield the results written so far, or all of them, with the seconds that each took.

        Raises the exception of a failed write.
        """
        while self._writes and (wait or self._writes[0].done()):
            yield self._writes.pop(0).result()


def _timed(work: Callable[[], Done]) -> tuple[Done, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started
