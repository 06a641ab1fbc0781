"""Ranks that start, work together, and leave their parent's signals alone."""

import os
import signal
from dataclasses import replace

import pytest
import rank_tasks
import torch

from hyimg_cli.errors import MachineError
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.parallel.wire import Numerics


def test_a_task_runs_on_all_or_on_the_first_ranks(pool: RankPool) -> None:
    assert pool.run(rank_tasks.number) == [0, 1, 2, 3]
    assert pool.run(rank_tasks.number, ranks=2) == [0, 1]
    assert pool.run(rank_tasks.number, ranks=1, own=lambda: "mine") == ["mine"]


def test_members_stay_and_compute_with_as_many_threads(pool: RankPool) -> None:
    first, second = (pool.run(rank_tasks.threads_and_pid) for _ in range(2))
    assert first == second
    assert [pid for _, pid in first] == [os.getpid(), *pool.member_pids]
    assert {threads for threads, _ in first} == {torch.get_num_threads()}


def test_collectives_work(pool: RankPool) -> None:
    assert pool.run(rank_tasks.summed) == [10.0] * 4


def test_one_rank_needs_no_process() -> None:
    alone = RankPool(1)
    assert alone.run(rank_tasks.number) == [0]
    assert not alone.member_pids


def test_two_groups_in_one_process_are_refused(pool: RankPool) -> None:
    pool.start()
    with pytest.raises(MachineError, match=r"another torch\.distributed group"):
        RankPool(2).start()
    # The group that there is was left alone.
    assert pool.run(rank_tasks.summed) == [10.0] * 4


def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(MachineError, match="ranks need"):
        RankPool(torch.cuda.device_count() + 1, device="cuda")


def test_members_leave_stop_signals_to_rank_0(pool: RankPool) -> None:
    pool.start()
    for pid in pool.member_pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert pool.run(rank_tasks.number) == [0, 1, 2, 3]


def test_members_are_deterministic_where_rank_0_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    for is_on in (True, False, True):
        numerics = replace(Numerics.of_this_process(), is_deterministic=is_on)
        numerics.apply()
    assert told == [True, True], "it was off before"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert Numerics.of_this_process().is_deterministic
