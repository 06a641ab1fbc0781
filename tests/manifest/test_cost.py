"""The cost of pictures, worked out by hand for jobs of known rows."""

from collections.abc import Callable

from hyimg_cli.manifest.cost import Cost, JobTokens, step_cost, total_cost
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.step_cache import StepCache

TWO_BRANCHES = JobTokens(ar_prefill=10, positive=20, step_rows=65, branches=2, assumed_think=5)
ONE_BRANCH = JobTokens(positive=20, step_rows=65)


def test_one_job_by_hand(make_job: Callable[..., ImageJob]) -> None:
    job = make_job(num_inference_steps=7)
    assert step_cost(job, TWO_BRANCHES) == Cost(jobs=1, denoise_steps=7, full_steps=7, forwards=14)
    assert step_cost(job, ONE_BRANCH, 5) == Cost(jobs=1, denoise_steps=2, full_steps=2, forwards=2)
    own = TWO_BRANCHES._replace(steps=6, forwards=9)
    assert step_cost(job, own) == Cost(jobs=1, denoise_steps=6, full_steps=6, forwards=9)


def test_a_step_cache_leaves_its_full_steps(make_job: Callable[..., ImageJob]) -> None:
    one = step_cost(make_job(num_inference_steps=20, step_cache=StepCache(3)), TWO_BRANCHES)
    assert (one.denoise_steps, one.full_steps, one.forwards) == (20, 9, 18)


def test_jobs_add_up(make_job: Callable[..., ImageJob]) -> None:
    total = total_cost(step_cost(make_job(), of) for of in (TWO_BRANCHES, ONE_BRANCH))
    assert (total.jobs, total.denoise_steps, total.forwards) == (2, 8, 12)


def test_no_jobs_cost_nothing() -> None:
    assert total_cost([]) == Cost()
