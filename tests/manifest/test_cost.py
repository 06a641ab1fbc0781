"""The cost of pictures, worked out by hand for jobs of known rows."""

from collections.abc import Callable

from hyimg_cli.manifest.cost import Cost, JobTokens, job_cost, total_cost
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.step_cache import StepCache

# Bytes of a row's K/V.
WIDTH = 64
# A prompt of 10 and a text of 5; the picture's branches of 20 begin with 15 and with 6 equal rows.
WITH_TEXT = JobTokens(
    ar_prefill=10,
    shared_prefix=6,
    positive=20,
    negative=20,
    step_rows=65,
    branches=2,
    image_encodes=1,
    assumed_think=5,
)
DISTILLED = WITH_TEXT._replace(
    ar_prefill=0, assumed_think=0, negative=0, branches=1, image_encodes=0
)


def test_one_job_by_hand(make_job: Callable[..., ImageJob]) -> None:
    assert job_cost(make_job(num_inference_steps=7), WITH_TEXT, WIDTH) == Cost(
        jobs=1,
        denoise_steps=7,
        full_steps=7,
        image_encodes=1,
        ar_prefill_rows=10,
        think_rows=5,
        prefix_rows=(20 - 15) + (20 - 6),
        prefix_rows_unshared=40,
        denoise_rows=7 * 2 * 65,
        forwards=7 * 2,
        kv_bytes_peak=(40 + 2 * 65) * WIDTH,
    )


def test_a_step_cache_leaves_its_full_steps(make_job: Callable[..., ImageJob]) -> None:
    job = make_job(num_inference_steps=20, step_cache=StepCache(3))
    one = job_cost(job, WITH_TEXT, WIDTH)
    assert (one.denoise_steps, one.full_steps, one.denoise_rows) == (20, 9, 9 * 2 * 65)


def test_a_job_without_text_and_guidance_shares_nothing(
    make_job: Callable[..., ImageJob],
) -> None:
    one = job_cost(make_job(), DISTILLED, WIDTH)
    assert one.prefix_rows == one.prefix_rows_unshared == 20
    assert one.denoise_rows == 4 * 65


def test_jobs_add_up_and_the_peak_is_the_largest(make_job: Callable[..., ImageJob]) -> None:
    rows = (WITH_TEXT, DISTILLED, WITH_TEXT._replace(step_rows=100))
    costs = [job_cost(make_job(), of_job, WIDTH) for of_job in rows]
    total = total_cost(costs)
    assert (total.jobs, total.denoise_steps) == (3, 12)
    assert total.denoise_rows == sum(one.denoise_rows for one in costs)
    assert total.kv_bytes_peak == (40 + 200) * WIDTH == costs[2].kv_bytes_peak


def test_no_jobs_cost_nothing() -> None:
    assert total_cost([]) == Cost()
