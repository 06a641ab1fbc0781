"""Wall segments of one job, and shares of the time in which several work, against a fake clock."""

import random

import pytest

from hyimg_cli.pipelines import clock
from hyimg_cli.pipelines.clock import PhaseClock, Shares


class FakeTime:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(clock, "time", fake)
    return fake


def clocks(count: int, time: FakeTime) -> list[PhaseClock]:
    shares = Shares()
    return [PhaseClock(time.now, lambda: None, shares) for _ in range(count)]


def test_a_batch_stands_whole_in_each_job_and_once_in_all_shares(time: FakeTime) -> None:
    jobs = clocks(4, time)
    time.now += 3  # in the queue
    for job in jobs:
        job.enter("denoise_first")
    time.now += 8
    assert [job.timings_s()["denoise_first"] for job in jobs] == [8] * 4
    assert [job.share_s() for job in jobs] == [{"denoise_first": 2, "total": 2}] * 4


def test_who_thinks_waits_while_another_is_prefilled_or_drawn(time: FakeTime) -> None:
    thinker, other = clocks(2, time)
    thinker.enter("think")
    time.now += 1
    other.enter("prefill")
    time.now += 5
    other.enter("queue")
    time.now += 1
    other.enter("think")
    time.now += 2
    assert thinker.share_s() == {"think": 1 + 1 + 1, "total": 3}
    assert other.share_s() == {"prefill": 5, "think": 1, "total": 6}
    assert thinker.timings_s()["think"] == 9


def test_shares_are_never_more_than_the_time_that_passed(time: FakeTime) -> None:
    jobs = clocks(7, time)
    phases = ("queue", "prefill", "think", "denoise_rest", "decode_latents", "write")
    for _ in range(500):
        random.choice(jobs).enter(random.choice(phases))
        time.now += random.choice((0, 0.25, 1))
    dealt = sum(job.share_s()["total"] for job in jobs)
    assert 0 < dealt <= time.now - 100.0
    for job in jobs:
        assert job.share_s()["total"] <= sum(job.timings_s().values()) - job.timings_s()["total"]
