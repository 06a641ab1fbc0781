"""The two watches: whose clock counts, what is silence, what hangs."""

import os
import signal
import time
from itertools import count

import pytest
import rank_tasks

from hyimg_cli.errors import RankError
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.parallel.watch import AwakeClock, Beat, Limits, Steps, StepWatch


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    now = [100.0]
    clock = AwakeClock(most_s=2.0, now=lambda: now[0])
    for passed, counted in ((1.5, 1.5), (3600.0, 3.5), (0.5, 4.0)):
        now[0] += passed
        assert clock() == pytest.approx(counted)


def test_a_step_is_measured_by_its_kind() -> None:
    now = [0.0]
    steps = Steps(clock=lambda: now[0])
    for kind, seconds in (("denoise", 2.0), ("decode", 9.0), ("denoise", 3.0), ("denoise", 1.0)):
        steps.begin(kind)
        now[0] += seconds
    assert steps.beat() == Beat("denoise", 1.0, 3.0)
    steps.begin()
    now[0] += 5000.0
    assert steps.beat().kind == "", "what loads, compiles or captures is not timed"
    steps.begin("decode")
    assert steps.beat().longest_s == 9.0


@pytest.mark.parametrize(
    ("beat", "hangs"),
    [
        (Beat(), False),
        (Beat("", 9999.0), False),
        (Beat("denoise", 3599.0), False),
        (Beat("denoise", 3601.0), True),
        (Beat("denoise", 599.0, 2.0), False),
        (Beat("denoise", 601.0, 2.0), True),
        (Beat("decode", 1999.0, 100.0), False),
        (Beat("decode", 2001.0, 100.0), True),
    ],
)
def test_what_takes_twenty_times_the_longest_and_ten_minutes_hangs(beat: Beat, hangs: bool) -> None:
    assert bool(StepWatch(Limits()).overdue(beat)) == hangs


def test_what_one_has_seen_counts_for_all() -> None:
    watch = StepWatch(Limits())
    assert not watch.overdue(Beat("decode", 5.0, 100.0))
    assert not watch.overdue(Beat("decode", 1900.0))
    assert "decode" in watch.overdue(Beat("decode", 2100.0))


def test_a_rank_that_was_stopped_ends_its_task_and_the_next_one_works(pool: RankPool) -> None:
    pool.stop()  # a process is in one group at a time
    with RankPool(2, limits=Limits(silence_s=10.0), beat_s=0.1) as mine:
        mine.start()
        os.kill(mine.member_pids[0], signal.SIGSTOP)
        # Five seconds pass from one look to the next: nobody waits for them.
        mine._steps.clock = count(mine._steps.clock(), 5.0).__next__
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 failed: no sign of life for 10 s"):
            mine.run(rank_tasks.number)
        assert time.monotonic() - began < 60
        mine._steps.clock = AwakeClock()
        assert mine.run(rank_tasks.number) == [0, 1]


def test_a_task_that_hangs_is_ended(pool: RankPool) -> None:
    pool.stop()
    with RankPool(2, limits=Limits(step_s=1.0, first_s=1.0)) as mine:
        mine.start()
        with pytest.raises(RankError, match=r"no progress for \d+ s \(wait_for\); it hangs"):
            mine.run(rank_tasks.wait_for, 1)
