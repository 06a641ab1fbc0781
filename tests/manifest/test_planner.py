"""A plan holds every job once, alike ones side by side, and depends on nothing but the jobs."""

from collections.abc import Callable, Hashable
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.manifest.planner import make_plan, text_of
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(["tiny-image", "big"]),
            "size": st.sampled_from(
                [SizeRequest(), SizeRequest(9, 16), SizeRequest(96, 160), SizeRequest(100, 99)]
            ),
            "images": st.sampled_from([(), ("a.png",), ("b.png",), ("a.png", "b.png")]),
            "bot_task": st.sampled_from(["none", "think_recaption"]),
            "seed": st.integers(1, 9),
            "text": st.just(TextSampling(0.6, 9, 0.9, 64)),
            "ar_seed": st.integers(1, 3),
        }
    ),
    max_size=12,
)
CardOf = Callable[[str], ModelCard]


def runs(keys: list[Hashable]) -> list[Hashable]:
    return [key for key, _ in groupby(keys)]


@given(entries=JOBS)
def test_a_plan_is_a_permutation_with_alike_jobs_adjacent(
    entries: list[dict[str, Any]], make_job: Callable[..., ImageJob], card_of: CardOf
) -> None:
    jobs = [make_job(f"job-{index}", **entry) for index, entry in enumerate(entries)]
    plan = make_plan(jobs, card_of)
    assert sorted(job.custom_id for job in plan.jobs) == sorted(job.custom_id for job in jobs)
    assert make_plan(jobs, card_of) == plan

    groups = [(group.model, group.size_class) for group in plan.groups]
    assert len(set(groups)) == len(groups)
    models: list[Hashable] = [group.model for group in plan.groups]
    assert len(set(models)) == len(runs(models)), "a model is loaded once"
    assert runs(models) == list(dict.fromkeys(job.model for job in jobs))

    place = {job.custom_id: index for index, job in enumerate(jobs)}
    for group in plan.groups:
        assert {job.model for job in group.jobs} == {group.model}
        writes = [job.writes_text for job in group.jobs]
        assert writes == sorted(writes), "who needs no text waits for nobody's"
        sources: list[Hashable] = [(job.writes_text, job.images) for job in group.jobs]
        assert len(set(sources)) == len(runs(sources)), "the same images stand side by side"
        for _, alike in groupby(group.jobs, key=lambda job: (job.writes_text, job.images)):
            texts = [(text_of(job), place[job.custom_id]) for job in alike]
            names = [name for name, _ in texts]
            assert len(set(names)) == len(runs(names)), "the same text is written in a row"
            first = [next(p for n, p in texts if n == name) for name in dict.fromkeys(names)]
            assert first == sorted(first), "else the manifest's order holds"
            for name in names:
                places = [p for n, p in texts if n == name]
                assert places == sorted(places)


def test_sizes_of_one_bucket_are_one_group(
    make_job: Callable[..., ImageJob], card_of: CardOf
) -> None:
    sizes = [SizeRequest(96, 160), SizeRequest(), SizeRequest(9, 16), SizeRequest(100, 99)]
    plan = make_plan([make_job(str(s), size=s) for s in sizes], card_of)
    assert [(group.size_class, len(group.jobs)) for group in plan.groups] == [
        ("160x96", 2),
        ("auto", 1),
        ("128x128", 1),
    ]


def test_no_jobs_no_groups_and_no_model_looked_at() -> None:
    def look_up(model: str) -> ModelCard:
        raise AssertionError("not to be asked")

    assert make_plan([], look_up).groups == ()
