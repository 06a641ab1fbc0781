"""Many jobs at work at once: a line for each phase, and none that outlives its jobs."""

import random

import pytest

from hyimg_cli.cli import views
from hyimg_cli.cli.underway import Underway
from hyimg_cli.spec.events import (
    DenoiseStep,
    Event,
    Failure,
    JobDone,
    JobFailed,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    Outcome,
    PhaseStarted,
    Prewarmed,
    ThinkToken,
)

STEPS, JOBS = 4, 40


def end_of(name: str, *, is_failed: bool) -> Event:
    if not is_failed:
        return JobDone(Outcome(name, "done", key=""))
    failure = Failure("job.fake", "told to\nfail", "", retryable=False)
    return JobFailed(Outcome(name, "failed", key="", error=failure))


def life_of(name: str, *, is_failed: bool) -> list[Event]:
    steps = [DenoiseStep(name, step, STEPS) for step in range(1, STEPS + 1)]
    return [
        JobStarted(name),
        PhaseStarted(name, "prefill"),
        PhaseStarted(name, "think"),
        ThinkToken(name, 1),
        ThinkToken(name, 2),
        PhaseStarted(name, "denoise", STEPS),
        *(steps[:1] if is_failed else steps),
        end_of(name, is_failed=is_failed),
    ]


def interleaved(count: int) -> list[Event]:
    """Every job's events in their order, the jobs in any."""
    lives = [life_of(f"job-{n}", is_failed=n % 5 == 0) for n in range(count)]
    turns = [n for n, life in enumerate(lives) for _ in life]
    random.shuffle(turns)
    return [lives[n].pop(0) for n in turns]


def test_nothing_is_left_over_of_many_interleaved_jobs() -> None:
    view = views.RichView(JOBS)
    with view:
        for event in interleaved(JOBS):
            view.show(event)
            assert len(view.bars) <= 5
        assert view.bars == ["all jobs"]


def test_a_phase_is_told_once_with_its_jobs() -> None:
    underway = Underway()
    for name in ("a", "b", "c"):
        underway.add(JobStarted(name))
        underway.add(PhaseStarted(name, "think"))
    underway.add(ThinkToken("a", 7))
    underway.add(PhaseStarted("c", "denoise", 20))
    underway.add(DenoiseStep("c", 12, 20))
    told = [(line.at.phase, line.who, line.at.count) for line in underway.lines()]
    assert told == [("denoise", "c", "step 12/20"), ("think", "2 jobs", "7 tokens")]
    assert underway.drawn == 0.6


def test_a_job_that_ends_without_a_start_or_starts_again_leaves_nothing() -> None:
    underway = Underway()
    underway.add(end_of("lost", is_failed=True))
    for event in life_of("a", is_failed=False)[:-1] + life_of("a", is_failed=False):
        underway.add(event)
    assert list(underway.lines()) == []


@pytest.mark.parametrize("view", [views.PlainView(2), views.RichView(2)])
def test_what_was_made_ready_is_told(view: views.View, capsys: pytest.CaptureFixture[str]) -> None:
    view.show(ModelLoading("tiny"))
    assert "loading tiny\n" in capsys.readouterr().err
    view.show(ModelLoaded("tiny", 0.5, "cpu", "float32", 1000))
    view.show(Prewarmed(3, 1.25))
    view.show(Prewarmed(0, 0.5, graphs=12))
    err = capsys.readouterr().err
    assert "tiny" in err
    assert "prewarmed 3 shapes in 1.25 s" in err
    assert "prewarmed 0 shapes and 12 CUDA graphs in 0.50 s" in err


def test_a_failure_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    views.View().show(end_of("a", is_failed=True))
    assert capsys.readouterr().err == "a: failed[job.fake]: told to fail\n"
