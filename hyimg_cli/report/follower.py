"""A run's page kept up to date while the run goes, for a hundredth of its time."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hyimg_cli.journal.provenance import cores
from hyimg_cli.report.run_page import RunPage
from hyimg_cli.spec.events import Event, JobEnded

SHARE = 0.01
logger = logging.getLogger(__name__)


class Follower:
    """Refreshes the page in a thread of its own, as often as `SHARE` of the time passed allows.

    What is spent is that thread's processor time. On few cores the run feels all of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._share = SHARE * max(1, cores() // 2)
        self._began = time.perf_counter()
        self._spent_s = self._last_s = 0.0
        self._has_news = self._has_shown_any = False
        self._page: RunPage | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._at_work: Future[bool] | None = None

    def look(self, event: Event) -> None:
        """Begins a refresh where there is news and time for it; never waits."""
        is_news = isinstance(event, JobEnded)
        # The page as the run finds the folder; then with the first picture.
        if self._at_work is None or (is_news and not self._has_shown_any):
            self._has_shown_any |= is_news
            self._begin(thumbnails_s=0.0)
            return
        self._has_news |= is_news
        # One that failed is the last until the end.
        if not self._at_work.done() or self._at_work.exception() is not None:
            return
        assert self._page is not None, "it was made by the first refresh"
        left_s = self._allowed_s - self._last_s
        if left_s > 0 and (self._has_news or self._page.is_waiting):
            self._has_news = False
            self._begin(thumbnails_s=left_s)

    def close(self) -> bool:
        """The page as the run leaves it; True where it changed. Raises as `RunPage` does."""
        self._thread.shutdown()
        # Made anew: what has become of the pictures meanwhile is seen.
        self._page = None
        changed = self._refresh(is_running=False, thumbnails_s=max(0.0, self._allowed_s))
        took_s = time.perf_counter() - self._began
        logger.info("the page took %.2f s of the run's %.1f s", self._spent_s, took_s)
        return changed

    @property
    def _allowed_s(self) -> float:
        return self._share * (time.perf_counter() - self._began) - self._spent_s

    def _begin(self, thumbnails_s: float) -> None:
        self._at_work = self._thread.submit(
            self._refresh, is_running=True, thumbnails_s=thumbnails_s
        )

    def _refresh(self, *, is_running: bool, thumbnails_s: float) -> bool:
        began = time.thread_time()
        try:
            self._page = self._page or RunPage(self._folder)
            return self._page.refresh(is_running=is_running, thumbnails_s=thumbnails_s)
        finally:
            self._last_s = time.thread_time() - began
            self._spent_s += self._last_s
