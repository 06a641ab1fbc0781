"""Dealing: every job once, sets together, large pieces first, the slow one gets less."""

import heapq
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from engine.fake_video import video_job

from hyimg_cli.engine.replicas.pieces import cut, in_order, model_of
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Group, Plan, VideoGroup


def group_of(
    job: ImageJob, count: int, *, name: str = "a", each: int = 0, texts: int = 1, **more: Any
) -> Group:
    """`count` jobs; `each` of them in a row have the same source image, 0: none has any; `texts`
    of them in a row write the same text.
    """
    jobs = [
        replace(
            job,
            custom_id=f"{name}{n}",
            images=(f"{name}{n // each}.png",) if each else (),
            seed=n,
            ar_seed=n // texts,
            **more,
        )
        for n in range(count)
    ]
    return Group(jobs[0].model, "auto", tuple(jobs))


def films(count: int, model: str = "tiny-video") -> VideoGroup:
    jobs = tuple(video_job(f"v{n}", seed=n, model=model) for n in range(count))
    return VideoGroup(model, "48x32, 5 frames", jobs)


def ids(jobs: tuple[Job, ...]) -> list[str]:
    return [job.custom_id for job in jobs]


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_taken_once_in_its_own_group(job: ImageJob, seed: int) -> None:
    chance = random.Random(seed)
    groups = [
        group_of(job, chance.randrange(1, 60), name=f"g{n}-", each=chance.randrange(5))
        for n in range(chance.randrange(1, 5))
    ]
    plan = Plan((*groups, films(chance.randrange(1, 9))))
    pieces = cut(plan, chance.randrange(1, 9))
    assert sorted(ids(tuple(one for piece in pieces for one in piece.jobs))) == sorted(
        ids(plan.jobs)
    )
    home = {one.custom_id: number for number, some in enumerate(plan.groups) for one in some.jobs}
    assert all(len({home[one.custom_id] for one in piece.jobs}) == 1 for piece in pieces)


def test_pieces_shrink_to_single_jobs(job: ImageJob) -> None:
    sizes = [len(piece.jobs) for piece in cut(Plan((group_of(job, 500),)), 8)]
    assert sizes[0] == 32  # a sixteenth of what is left
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-7:] == [1] * 7


def test_few_jobs_are_spread_evenly_at_once(job: ImageJob) -> None:
    """Pictures that would fill the replicas together are not dispatched one by one."""
    sizes = [len(piece.jobs) for piece in cut(Plan((group_of(job, 16),)), 4)]
    assert sizes[:3] == [4, 3, 3]
    singles = [len(piece.jobs) for piece in cut(Plan((films(16),)), 4)]
    assert singles[:3] == [2, 2, 2]


@pytest.mark.parametrize("each", [2, 3, 5])
def test_jobs_with_the_same_source_stay_together_while_much_is_left(
    job: ImageJob, each: int
) -> None:
    pieces = cut(Plan((group_of(job, 240, each=each),)), 4)
    for piece in pieces:
        if len(piece.jobs) >= 2 * each:
            images = [one.images for one in piece.jobs if isinstance(one, ImageJob)]
            assert all(images.count(path) == each for path in set(images))
    sets = [{one.images for one in piece.jobs if isinstance(one, ImageJob)} for piece in pieces]
    parted = sum(bool(first & second) for first, second in pairwise(sets))
    assert parted <= 4 * each  # only the finely split end


def test_many_edits_of_one_picture_are_shared_all_the_same(job: ImageJob) -> None:
    sizes = [len(piece.jobs) for piece in cut(Plan((group_of(job, 80, each=80),)), 8)]
    assert sizes[0] == 5


def _texts(piece: Plan) -> set[int]:
    return {one.ar_seed for one in piece.jobs if isinstance(one, ImageJob)}


@pytest.mark.parametrize("each", [0, 80])
def test_jobs_of_one_text_stay_together(job: ImageJob, each: int) -> None:
    """Within edits of one picture too, which are too many for one replica."""
    group = group_of(job, 80, each=each, texts=4)
    pieces = cut(Plan((group,)), 2)
    assert len(pieces) > 2
    parted = sum(bool(_texts(first) & _texts(second)) for first, second in pairwise(pieces))
    assert not any(_texts(first) & _texts(second) for first, second in pairwise(pieces[:4]))
    assert parted <= 2  # at the end: a replica without work costs more than a text


def test_a_text_of_too_many_jobs_is_shared_out(job: ImageJob) -> None:
    sizes = [len(piece.jobs) for piece in cut(Plan((group_of(job, 80, texts=80),)), 8)]
    assert sizes[0] == 5


def test_a_slow_replica_gets_less_and_holds_nothing_up(job: ImageJob) -> None:
    """Simulated: one of eight takes five times as long for a job."""
    pace = [1.0] * 7 + [5.0]
    pieces, done = cut(Plan((group_of(job, 500),)), 8), [0] * 8
    free = [(0.0, number) for number in range(8)]
    last = 0.0
    for piece in pieces:
        now, number = heapq.heappop(free)
        done[number] += len(piece.jobs)
        heapq.heappush(free, (now + len(piece.jobs) * pace[number], number))
        last = max(last, now + len(piece.jobs) * pace[number])
    ideal = 500 / sum(1 / one for one in pace)
    assert sum(done) == 500
    assert done[7] < min(done[:7])
    assert last < 2.4 * ideal  # the slow one's first piece of 32 alone is 160 of 69
    even = 5.0 * 500 / 8
    assert last < even * 0.6


def test_a_replica_keeps_its_model_and_models_are_shared_out(job: ImageJob) -> None:
    pieces = cut(Plan((group_of(job, 40), films(20))), 3)
    left = [*enumerate(pieces)]
    first = [in_order(left, (number + 0.5) / 3, None)[0] for number in range(3)]
    assert [model_of(pieces[number]) for number in first] == ["tiny-image"] * 2 + ["tiny-video"]
    order = [model_of(pieces[number]) for number in in_order(left, 0.1, "tiny-video")]
    assert order == sorted(order, reverse=True)  # videos to their end, then pictures
    assert sorted(in_order(left, 0.5, "tiny-video")) == [number for number, _ in left]


@pytest.mark.parametrize("count", [1, 7, 1000, 100_000])
def test_pieces_are_few(job: ImageJob, count: int) -> None:
    """Each costs a lock and a file, however many jobs there are."""
    jobs = (job,) * count
    assert len(cut(Plan((Group(job.model, "auto", jobs),)), 4)) <= 4 * 12
