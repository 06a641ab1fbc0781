"""The tree keeps what the plan's jobs that are left will look up, and is empty at the end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine.session import Session
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded
from hyimg_cli.spec.job import ImageJob, SizeRequest

COUNT = 9


@pytest.mark.parametrize("is_invariant", [True, False])
@pytest.mark.parametrize(
    ("prompt", "whole_prompts"),
    [
        # Prompts of three lengths: that many negative branches are shared, and no positive one.
        (lambda n: f"{n}" + " red" * (n % 3), 0),
        (lambda n: f"{n % 3} red circles", 3),
        (lambda _: "a red circle", 1),
    ],
    ids=["distinct", "three", "one"],
)
def test_only_prompts_that_return_are_kept(
    family: Any,
    job: ImageJob,
    tmp_path: Path,
    prompt: Callable[[int], str],
    whole_prompts: int,
    is_invariant: bool,
) -> None:
    plain = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=1)
    jobs = [replace(plain, custom_id=f"j{n}", seed=n, prompt=prompt(n)) for n in range(COUNT)]
    batch = BatchConfig(max_size=4, prewarm=False, is_invariant=is_invariant)
    config = RunConfig(OutputConfig(tmp_path), batch=batch)
    with Session(config, lambda choice, *, is_batch_invariant: family) as session:
        tree = session._images.tree
        for _ in range(2):  # the same plan again
            before = tree.inserted_tokens
            plan = make_plan(jobs, lambda model: family.card)
            ends = [event for event in session.run(plan) if isinstance(event, JobEnded)]
            assert all(end.is_done for end in ends)
            assert len(tree) == 0
            kept = tree.inserted_tokens - before
            positive = [end.outcome.kv_reuse.branches[0] for end in ends if end.outcome.kv_reuse]
            if whole_prompts:
                assert sum(one.computed > 1 for one in positive) == whole_prompts
                assert kept > 0
            elif is_invariant:
                assert kept < sum(one.computed for one in positive)


@pytest.mark.parametrize("fails", ["j1", "j3"])
def test_a_job_that_fails_leaves_nothing(
    family: Any, job: ImageJob, tmp_path: Path, fails: str
) -> None:
    plain = replace(job, bot_task="none", num_inference_steps=1)
    jobs = [replace(plain, custom_id=f"j{n}", seed=n) for n in range(4)]
    jobs = [
        replace(one, images=(str(tmp_path / "missing.png"),)) if one.custom_id == fails else one
        for one in jobs
    ]
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(max_size=2, prewarm=False))
    with Session(config, lambda choice, *, is_batch_invariant: family) as session:
        ends = [
            event
            for event in session.run(make_plan(jobs, lambda model: family.card))
            if isinstance(event, JobEnded)
        ]
        assert [end.outcome.custom_id for end in ends if not end.is_done] == [fails]
        assert len(session._images.tree) == 0


def test_texts_that_jobs_share_are_kept_for_them_alone(
    family: Any, job: ImageJob, tmp_path: Path
) -> None:
    jobs = [replace(job, custom_id=f"j{n}", seed=n, ar_seed=n // 2) for n in range(6)]
    jobs = [replace(one, num_inference_steps=1) for one in jobs]
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(max_size=2, prewarm=False))
    with Session(config, lambda choice, *, is_batch_invariant: family) as session:
        ends = [
            event.outcome
            for event in session.run(make_plan(jobs, lambda model: family.card))
            if isinstance(event, JobEnded)
        ]
        reuse = {one.custom_id: one.kv_reuse for one in ends}
        taken = [one.ar_prefill_tokens for one in reuse.values() if one and one.ar_taken_tokens]
        assert taken == [0, 0, 0]
        assert len(session._images.tree) == 0
