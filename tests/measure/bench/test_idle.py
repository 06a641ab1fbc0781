"""Idle time: sleeping is idle, working is not, nor is waiting for a thread that works."""

import threading
import time

from hyimg_cli.measure.bench.runs import IdleWatch


def _work(seconds: float) -> None:
    """Busy for so much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_sleeping_is_idle() -> None:
    before, busy = time.perf_counter(), time.process_time()
    with IdleWatch() as idle:
        _work(0.1)
        time.sleep(0.3)
    # Besides the sleep, what other programs took of the core.
    unworked_s = (time.perf_counter() - before) - (time.process_time() - busy)
    assert 0.15 <= idle.idle_s <= unworked_s / 0.9 + 0.05, "up to a tenth of an interval is work"


def test_waiting_for_a_thread_that_works_is_not() -> None:
    worker = threading.Thread(target=_work, args=(0.3,))
    before, busy = time.perf_counter(), time.process_time()
    with IdleWatch() as idle:
        worker.start()
        worker.join()
    # What other programs took of the core in the meantime looks like sleep.
    taken = (time.perf_counter() - before) - (time.process_time() - busy)
    assert idle.idle_s <= max(taken, 0) / 0.9 + 0.05
