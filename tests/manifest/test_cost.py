"""The cost of a plan, worked out by hand for jobs of known rows."""

from collections.abc import Callable

from hyimg_cli.manifest.cost import Cost, JobTokens, cost
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.step_cache import StepCache

CardOf = Callable[[str], ModelCard]
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


def test_one_job_by_hand(make_job: Callable[..., ImageJob], card_of: CardOf) -> None:
    plan = make_plan([make_job(num_inference_steps=7)], card_of)
    assert cost(plan, lambda job: WITH_TEXT, card_of).total == Cost(
        jobs=1,
        denoise_steps=7,
        full_steps=7,
        image_encodes=1,
        ar_prefill_rows=10,
        think_rows=5,
        prefix_rows=(20 - 15) + (20 - 6),
        prefix_rows_unshared=40,
        denoise_rows=7 * 2 * 65,
        kv_bytes_peak=(40 + 2 * 65) * 64,
    )


def test_a_step_cache_leaves_its_full_steps(
    make_job: Callable[..., ImageJob], card_of: CardOf
) -> None:
    job = make_job(num_inference_steps=20, step_cache=StepCache(3))
    total = cost(make_plan([job], card_of), lambda job: WITH_TEXT, card_of).total
    assert (total.denoise_steps, total.full_steps, total.denoise_rows) == (20, 9, 9 * 2 * 65)


def test_a_job_without_text_and_guidance_shares_nothing(
    make_job: Callable[..., ImageJob], card_of: CardOf
) -> None:
    total = cost(make_plan([make_job()], card_of), lambda job: DISTILLED, card_of).total
    assert total.prefix_rows == total.prefix_rows_unshared == 20
    assert total.denoise_rows == 4 * 65


def test_groups_add_up_and_the_peak_is_the_largest(
    make_job: Callable[..., ImageJob], card_of: CardOf
) -> None:
    jobs = [make_job("a"), make_job("b", size=SizeRequest(96, 160)), make_job("c")]
    rows = {"a": WITH_TEXT, "b": DISTILLED, "c": WITH_TEXT._replace(step_rows=100)}
    costs = cost(make_plan(jobs, card_of), lambda job: rows[job.custom_id], card_of)
    assert [(group.size_class, group.cost.jobs) for group in costs.groups] == [
        ("auto", 2),
        ("160x96", 1),
    ]
    assert costs.total.jobs == 3
    assert costs.total.denoise_steps == 12
    assert costs.total.denoise_rows == sum(group.cost.denoise_rows for group in costs.groups)
    assert costs.total.kv_bytes_peak == (40 + 200) * 64 == costs.groups[0].cost.kv_bytes_peak


def test_an_empty_plan_costs_nothing(card_of: CardOf) -> None:
    assert cost(make_plan([], card_of), lambda job: WITH_TEXT, card_of).total == Cost()
