"""A run ends in time, a job that works for too long fails alone, and many failures end the run."""

import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import Interrupted, RunHalted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.pipelines.failures import FailureLimit
from hyimg_cli.pipelines.queue import Dropped
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.pipelines.timeouts import JobTimeout
from hyimg_cli.settings.run import BatchConfig, FailurePolicy, OutputConfig, RunConfig
from hyimg_cli.spec.events import Failure, JobEnded, JobStarted, Outcome, Progress
from hyimg_cli.spec.job import ImageJob


@pytest.mark.parametrize(
    ("halt", "jobs", "failed", "most"),
    [
        ("10%", 300, 0, "30"),
        ("10%", 5, 0, "1"),
        ("10%", 11, 0, "2"),
        ("10%", 300, 29, "1"),
        ("30", 10, 0, "30"),
        (None, 10, 0, None),
    ],
)
def test_a_share_is_of_the_jobs_to_run(
    halt: str | None, jobs: int, failed: int, most: str | None
) -> None:
    assert FailurePolicy(halt=halt).for_run(jobs, failed).halt == most


def test_failures_that_are_not_in_a_row_end_the_run_and_retries_are_not_counted() -> None:
    limit = FailureLimit(FailurePolicy(halt="2"))
    error = Failure("job.fake", "it failed", "", retryable=True)
    failed, done = (
        JobEnded(Outcome("a", status, "", error=one))  # type: ignore[arg-type]
        for status, one in (("failed", error), ("done", None))
    )
    for event, is_final in ((failed, False), (failed, True), (done, True), (failed, False)):
        limit.add(event, is_final=is_final)
        assert not limit.is_over
    limit.add(failed)
    assert limit.is_over
    with pytest.raises(RunHalted, match=r"2 jobs failed, as many as --halt allows; 2 of them job"):
        limit.raise_fault()


def test_a_job_is_overdue_once_by_the_time_since_it_began(job: ImageJob) -> None:
    now = [0.0]
    timeout = JobTimeout("1m", {"job": job}, clock=lambda: now[0])
    timeout.heed(JobStarted("job"))
    now[0] = 60.0
    assert [*timeout.overdue()] == []
    now[0] = 60.5
    assert [*timeout.overdue()] == ["job"]
    assert [*timeout.overdue()] == []
    lost = timeout.heed(Dropped("job"))
    assert isinstance(lost, Lost)
    assert str(lost.error).startswith("it worked for longer than the 1m of --job-timeout")
    assert [*JobTimeout(None, {"job": job}).overdue()] == []


def outcomes(jobs: list[ImageJob], out: Path) -> dict[str, Outcome]:
    config = RunConfig(OutputConfig(out), failure=FailurePolicy(job_timeout="1h"))
    with RunFolder(out) as folder:
        events = [*Session(config).run(make_plan(jobs, registry.model_card), folder)]
    return {one.outcome.custom_id: one.outcome for one in events if isinstance(one, JobEnded)}


@pytest.mark.parametrize("phase", ["think", "denoise"])
def test_a_job_that_is_overdue_fails_alone_and_its_batch_draws_the_same(
    job: ImageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    jobs = [replace(job, custom_id=name, seed=n, ar_seed=n) for n, name in enumerate("abc")]
    whole = outcomes(jobs, tmp_path / "whole")
    seen, heed = list[Any](), JobTimeout.heed

    def heed_and_keep(self: JobTimeout, event: Any) -> Any:
        seen.append(event)
        return heed(self, event)

    def overdue(self: JobTimeout) -> Iterator[str]:
        last = seen[-1] if seen else None
        if isinstance(last, Progress) and (last.custom_id, last.phase) == ("b", phase):
            yield "b"

    monkeypatch.setattr(JobTimeout, "heed", heed_and_keep)
    monkeypatch.setattr(JobTimeout, "overdue", overdue)
    cut = outcomes(jobs, tmp_path / "cut")
    error = cut["b"].error
    assert error is not None
    assert (error.code, error.retryable) == ("job.timeout", True)
    for name in "ac":
        made, expected = (one[name].outputs[0].pixel_sha256 for one in (cut, whole))
        assert made == expected


def test_a_stop_saves_the_latents_of_the_step_at_which_it_comes(
    job: ImageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only every tenth step: the signal comes during the third one."""
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=False))
    plan, session = make_plan([replace(job, num_inference_steps=8)], registry.model_card), None
    velocities, steps = HunyuanImage3.velocities, count(1)

    def stopped(self: Any, pictures: Any) -> Any:
        if next(steps) == 3:
            session.request_stop(signal.SIGTERM)
        return velocities(self, pictures)

    monkeypatch.setattr(HunyuanImage3, "velocities", stopped)
    session = Session(config)
    with RunFolder(tmp_path) as folder, pytest.raises(Interrupted):
        deque(session.run(plan, folder), maxlen=0)
    with RunFolder(tmp_path) as folder:
        events = [*Session(config).run(plan, folder)]
    (end,) = (one.outcome for one in events if isinstance(one, JobEnded))
    assert end.denoise_steps == 5, end.notes
