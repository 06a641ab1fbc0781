"""What happens when a job fails, without a model: remedies, retries, isolation, the run's end."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hyimg_cli.errors import (
    CheckpointError,
    ConsecutiveErrors,
    HyimgError,
    JobError,
    MachineError,
    StorageError,
)
from hyimg_cli.pipelines.failures import (
    FailureLimit,
    Remedy,
    choose_remedy,
    exit_code,
    is_of_replica,
    isolate,
    policy_of_server,
    with_retries,
)
from hyimg_cli.settings.run import FailurePolicy
from hyimg_cli.spec.events import Event, Failure, JobEnded, JobStarted, Outcome
from hyimg_cli.spec.job import ImageJob, Job


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        # A job alone that runs out of memory, again and again, and may wait once.
        ({"has_dropped": False, "can_wait": True}, Remedy.RETRY),
        ({"has_dropped": True, "can_wait": True}, Remedy.REQUEUE),
        ({"has_dropped": True, "can_wait": False}, Remedy.FAIL),
        # Others that draw hold the memory.
        ({"has_company": True, "has_dropped": True}, Remedy.SPLIT),
        # Any other fault of a job alone.
        ({"is_short": False, "has_company": True, "can_wait": True}, Remedy.FAIL),
    ],
)
def test_remedies_of_a_job_alone(state: dict[str, bool], remedy: Remedy) -> None:
    usual = {"is_short": True, "has_company": False, "has_dropped": False, "can_wait": False}
    assert choose_remedy(1, **(usual | state)) is remedy


def test_no_job_of_a_batch_fails_before_it_was_tried_alone() -> None:
    names = ("is_short", "has_company", "has_dropped", "can_wait")
    for values in product((False, True), repeat=len(names)):
        assert choose_remedy(2, **dict(zip(names, values, strict=True))) is Remedy.SPLIT


def named(job: ImageJob, names: str) -> list[Job]:
    return [replace(job, custom_id=name) for name in names]


class Runs:
    """Runs jobs that fail for the first so many tries, until the run is over; remembers the order
    in which they ran.
    """

    def __init__(
        self, limit: FailureLimit, tries: dict[str, int], *, retryable: bool = True
    ) -> None:
        self.limit, self.tries, self.ran = limit, dict(tries), list[str]()
        self.failure = Failure("job.fake", "it failed", "", retryable=retryable)

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Event]:
        self.ran.append("")
        for job in jobs:
            if self.limit.is_over:
                return
            name = job.custom_id
            self.ran[-1] += name
            yield JobStarted(name)
            fails = self.tries.get(name, 0) > 0
            self.tries[name] = self.tries.get(name, 0) - 1
            error = self.failure if fails else None
            yield JobEnded(Outcome(name, "failed" if fails else "done", "", error=error))


def ends(job: ImageJob, names: str, runs: Runs) -> list[tuple[str, str]]:
    events = with_retries(named(job, names), runs, runs.limit)
    found = (event.outcome for event in events if isinstance(event, JobEnded))
    return [(one.custom_id, one.status) for one in found]


def test_a_retry_comes_after_the_other_jobs_and_only_the_last_end_is_told(job: ImageJob) -> None:
    runs = Runs(FailureLimit(FailurePolicy(max_retries=2)), {"a": 1, "b": 3})
    assert ends(job, "abc", runs) == [("c", "done"), ("a", "done"), ("b", "failed")]
    assert runs.ran == ["abc", "ab", "b"]


def test_jobs_that_a_retry_does_not_end_have_their_earlier_end(job: ImageJob) -> None:
    runs = Runs(FailureLimit(FailurePolicy(max_retries=9)), {"a": 5, "b": 1})
    first = iter([True])

    def once(jobs: Sequence[Job]) -> Iterator[Event]:
        return runs(jobs) if next(first, False) else iter(())

    told = with_retries(named(job, "abc"), once, runs.limit)
    ended = [event.outcome for event in told if isinstance(event, JobEnded)]
    assert [(one.custom_id, one.status) for one in ended] == [
        ("c", "done"), ("a", "failed"), ("b", "failed"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "retryable"),
    [(FailurePolicy(), True), (FailurePolicy(max_retries=5), False)],
)
def test_what_is_not_retried(job: ImageJob, policy: FailurePolicy, *, retryable: bool) -> None:
    runs = Runs(FailureLimit(policy), {"a": 1}, retryable=retryable)
    assert ends(job, "abc", runs) == [("a", "failed"), ("b", "done"), ("c", "done")]
    assert runs.ran == ["abc"]


@pytest.mark.parametrize(
    ("policy", "ran", "why"),
    [
        ({"max_retries": 2, "max_consecutive_errors": 3}, ["abc"], "3 errors in a row, all"),
        (
            {"max_retries": 2, "max_consecutive_errors": 7},
            ["abcde", "ab"],
            "7 errors in a row, all",
        ),
        # A failure that will be tried again is not the first one yet.
        ({"max_retries": 1, "fail_fast": True}, ["abcde", "a"], ""),
    ],
)
def test_tries_that_would_be_repeated_are_counted_and_their_jobs_told(
    job: ImageJob, policy: dict[str, Any], ran: list[str], why: str
) -> None:
    runs = Runs(FailureLimit(FailurePolicy(**policy)), dict.fromkeys("abcde", 9))
    told = ends(job, "abcde", runs)
    assert sorted(told) == [(name, "failed") for name in ran[0]]
    assert runs.ran == ran
    with pytest.raises(ConsecutiveErrors, match=why) if why else nullcontext():
        runs.limit.raise_fault()


def test_jobs_at_which_processes_died_come_last_alone_and_fail_after_the_second_death(
    job: ImageJob,
) -> None:
    jobs = named(job, "abcde")
    batches, failed = isolate(jobs, {"b": ["signal 9"], "d": ["signal 9", "hung"], "e": []})
    assert [[job.custom_id for job in batch] for batch in batches] == [["a", "c", "e"], ["b"]]
    assert [job.custom_id for job in failed] == ["d"]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MachineError("the GPU failed"), True),
        (CheckpointError("a tensor is missing"), False),
        (StorageError("the disk is full"), False),
        (JobError("it failed"), False),
    ],
)
def test_only_a_fault_of_its_own_machine_ends_one_replica(error: HyimgError, is_one: bool) -> None:
    assert is_of_replica(error) is is_one


def test_no_failed_request_ends_a_server() -> None:
    ends = {"halt": "1", "time_limit": "1s", "job_timeout": "1s"}
    strict = FailurePolicy(fail_fast=True, max_consecutive_errors=1, max_retries=3, **ends)
    assert policy_of_server(strict) == FailurePolicy(max_consecutive_errors=0, max_retries=3)


def test_exit_codes_of_a_run_that_came_to_its_end() -> None:
    assert [exit_code(), exit_code(0, 0), exit_code(0, 2)] == [0, 0, 1]
