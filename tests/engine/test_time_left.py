"""What is left of a run, against a fake clock: unknown at first, then near the truth."""

import random
from dataclasses import replace

import pytest

from hyimg_cli.engine.timing.left import TimeLeft, cells
from hyimg_cli.engine.timing.observed import GroupTiming, RunTiming, Sample, TextLengths
from hyimg_cli.spec.events import (
    DenoiseStep,
    Event,
    Failure,
    GroupStarted,
    JobDone,
    JobFailed,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    Outcome,
    PhaseStarted,
    ThinkToken,
)
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Group, Plan

STEPS = 10
LOAD, TOKEN, STEP, FINISH = 60.0, 0.5, 2.0, 1.0
TOKENS = 20


class Run:
    """A run of `count` jobs, so many together, whose every moment is known."""

    def __init__(self, job: ImageJob, count: int, together: int) -> None:
        self.now = 0.0
        one = replace(job, num_inference_steps=STEPS)
        self.jobs = tuple(replace(one, custom_id=f"j{n}") for n in range(count))
        self.plan = Plan((Group("tiny-image", "auto", self.jobs),))
        self.together = together

    def moments(self) -> list[tuple[float, Event]]:
        """Every event with the seconds that pass before it."""
        found: list[tuple[float, Event]] = [
            (0, ModelLoading("tiny-image")),
            (LOAD, ModelLoaded("tiny-image", LOAD, "cpu", "float32", 1)),
            (0, GroupStarted("tiny-image", "auto", len(self.jobs))),
        ]
        for first in range(0, len(self.jobs), self.together):
            names = [job.custom_id for job in self.jobs[first : first + self.together]]
            for name in names:
                found += [(0, JobStarted(name)), (0, PhaseStarted(name, "think"))]
            for token in range(1, TOKENS + 1):
                found += [
                    (TOKEN if n == 0 else 0, ThinkToken(name, token))
                    for n, name in enumerate(names)
                ]
            found += [(0, PhaseStarted(name, "denoise", STEPS)) for name in names]
            for step in range(1, STEPS + 1):
                found += [
                    (STEP if n == 0 else 0, DenoiseStep(name, step, STEPS))
                    for n, name in enumerate(names)
                ]
            found += [(FINISH, JobDone(Outcome(name, "done", key=""))) for name in names]
        return found

    def left(self, **more: object) -> TimeLeft:
        return TimeLeft(self.plan, clock=lambda: self.now, **more)  # type: ignore[arg-type]


@pytest.fixture(params=[(40, 1), (40, 8), (8, 8)])
def run(request: pytest.FixtureRequest, job: ImageJob) -> Run:
    return Run(job, *request.param)


def of_runs(run: Run, factor: float) -> dict[str, list[RunTiming]]:
    """What earlier runs took: `factor` times what this one does."""
    count = len(run.jobs)
    batches = count / run.together
    phases = {
        "think": Sample(1, 1, TOKENS * TOKEN * batches * factor),
        "denoise": Sample(
            1, sum(cells(job, None) for job in run.jobs), STEPS * STEP * batches * factor
        ),
        "decode": Sample(1, 1, FINISH * count * factor),
    }
    texts = {"think": TextLengths(count, TOKENS, TOKENS)}
    group = GroupTiming("auto", count, phases, texts=texts)
    return {"tiny-image": [RunTiming(1, 0.0, {"load": Sample(1, 1, LOAD * factor)}, (group,))]}


def test_without_earlier_runs_it_is_unknown_until_every_stage_was_seen(run: Run) -> None:
    left, moments = run.left(), run.moments()
    total = sum(seconds for seconds, _ in moments)
    has_finished = False
    for seconds, event in moments:
        run.now += seconds
        left.add(event)
        if left.left_s is None:
            assert not has_finished
        elif 0.5 * total < run.now:
            assert left.left_s == pytest.approx(total - run.now, rel=0.25, abs=3 * STEP)
        has_finished = has_finished or isinstance(event, JobDone)
    assert left.left_s == 0
    assert left.done == left.total == len(run.jobs)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_with_earlier_runs_it_is_known_from_the_start_and_learns(run: Run, factor: float) -> None:
    left, moments = run.left(earlier=of_runs(run, factor)), run.moments()
    total = sum(seconds for seconds, _ in moments)
    for number, (seconds, event) in enumerate(moments):
        run.now += seconds
        left.add(event)
        assert left.left_s is not None
        # Events of one moment come one after the other: the last of them counts.
        if number + 1 == len(moments) or moments[number + 1][0]:
            wrong = factor - 1 if run.now < 0.5 * total else 0.5 * (factor - 1)
            most = 5 * STEP + LOAD * (factor - 1)
            assert left.left_s == pytest.approx(total - run.now, rel=0.15 + wrong, abs=most)


def test_between_events_it_counts_down_until_nobody_can_know(job: ImageJob) -> None:
    run = Run(job, 4, 1)
    left = run.left(earlier=of_runs(run, 1.0))
    left.add(ModelLoading("tiny-image"))
    before = left.left_s
    run.now += 20
    now = left.left_s
    assert before is not None
    assert now == pytest.approx(before - 20)
    run.now += before - 20
    assert left.left_s == pytest.approx(0.1 * before), "something is still awaited"
    run.now += 10_000
    assert left.left_s is None, "it takes longer than all of it should"


def test_a_failed_job_leaves_no_work_and_one_tried_again_has_all_of_it(job: ImageJob) -> None:
    run = Run(job, 2, 1)
    left = run.left(earlier=of_runs(run, 1.0))
    for event in (JobStarted("j0"), DenoiseStep("j0", 5, STEPS)):
        left.add(event)
    half = left.left_s
    left.add(JobStarted("j0"))
    again = left.left_s
    failure = Failure("job.fake", "", "", retryable=False)
    left.add(JobFailed(Outcome("j0", "failed", key="", error=failure)))
    assert half is not None
    assert again is not None
    assert left.left_s is not None
    assert left.left_s < half < again
    assert left.done == 1


def test_events_of_nobody_and_in_any_order_do_no_harm(job: ImageJob) -> None:
    run = Run(job, 5, 1)
    events = [event for _, event in run.moments()] * 2
    events += [JobStarted("nobody"), ThinkToken("nobody", 3), DenoiseStep("nobody", 1, 2)]
    random.shuffle(events)
    left = run.left()
    for event in events:
        run.now += 0.1
        left.add(event)
        assert left.left_s is None or left.left_s >= 0
    assert left.seconds_per_job is not None


def test_a_plan_without_jobs_has_nothing_left() -> None:
    left = TimeLeft(Plan(()))
    assert (left.left_s, left.total, left.seconds_per_job) == (0, 0, None)
