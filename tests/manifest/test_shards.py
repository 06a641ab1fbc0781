"""Jobs dealt to shards: an even partition that all shards agree on; shared work stays together."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from hyimg_cli.manifest.planner import Shard, deal, planned_work, shard_of
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest

Make = Callable[..., ImageJob]
Weigh = Callable[[Job], int]
Dealt = Callable[[Sequence[ImageJob], int], list[Shard]]
Edits = Callable[[int, int], list[ImageJob]]


@pytest.fixture
def weigh(card_of: Callable[[str], ModelCard]) -> Weigh:
    no_videos = partial(pytest.fail, "no videos")
    return partial(planned_work, card_of=card_of, video_card_of=no_videos)


@pytest.fixture
def dealt(weigh: Weigh) -> Dealt:
    """Every shard of some jobs."""
    return lambda jobs, count: [shard_of(jobs, n, count, weigh) for n in range(1, count + 1)]


@pytest.fixture
def edits(make_job: Make) -> Edits:
    """Each of so many photos with each of so many prompts."""
    return lambda photos, prompts: [
        make_job(f"{photo}-{edit}", images=(f"in/{photo}.png",), prompt=f"edit {edit}")
        for edit in range(prompts)
        for photo in range(photos)
    ]


@pytest.mark.parametrize(
    ("photos", "prompts", "count"),
    [(8, 8, 4), pytest.param(1000, 8, 64, marks=pytest.mark.thorough), (40, 3, 7)],
)
def test_edits_of_a_photo_stay_together_and_shards_are_even(
    dealt: Dealt, edits: Edits, photos: int, prompts: int, count: int
) -> None:
    jobs = edits(photos, prompts)
    shards = dealt(jobs, count)
    assert sorted(job.custom_id for one in shards for job in one.jobs) == sorted(
        job.custom_id for job in jobs
    )
    assert sum(len({job.images for job in one.jobs}) for one in shards) == photos
    sizes = [len(one.jobs) for one in shards]
    whole_photos = -(-photos // count) * prompts
    assert max(sizes) <= max(1.05 * len(jobs) / count, whole_photos)
    assert {one.largest for one in shards} == {max(sizes) * count / len(jobs)}
    assert sum(one.part for one in shards) == pytest.approx(1)


def test_without_sources_equal_prompts_stay_together(dealt: Dealt, make_job: Make) -> None:
    jobs = [
        make_job(f"{seed}-{n}", prompt=f"prompt {n}", seed=seed)
        for seed in range(4)
        for n in range(30)
    ]
    shards = dealt(jobs, 5)
    assert sum(len({job.prompt for job in one.jobs}) for one in shards) == 30
    assert {len(one.jobs) for one in shards} == {24}


def test_jobs_are_weighed_by_planned_work(dealt: Dealt, make_job: Make) -> None:
    """Ten of a hundred steps, and a hundred of ten."""
    jobs = [
        make_job(
            f"job-{n}",
            prompt=f"p {n}",
            num_inference_steps=1000 if n < 10 else 100,
            bot_task="none",
        )
        for n in range(110)
    ]
    shards = dealt(jobs, 5)
    assert max(one.largest for one in shards) <= 1.05
    long = [sum(job.num_inference_steps == 1000 for job in one.jobs) for one in shards]
    assert len({len(one.jobs) for one in shards}) > 1 or set(long) == {2}


def test_a_text_to_write_and_a_larger_canvas_weigh_more(weigh: Weigh, make_job: Make) -> None:
    plain = weigh(make_job(bot_task="none"))
    assert weigh(make_job(bot_task="think")) > plain
    assert weigh(make_job(bot_task="none", images=("a.png",))) > plain
    assert weigh(make_job(bot_task="none", guidance_scale=1.0)) < plain
    assert weigh(make_job(bot_task="none", size=SizeRequest(64, 256))) == plain  # an equal area


def test_a_group_larger_than_a_shard_is_cut(dealt: Dealt, edits: Edits) -> None:
    shards = dealt(edits(1, 40), 4)
    assert [len(one.jobs) for one in shards] == [10, 10, 10, 10]


def test_more_shards_than_jobs(dealt: Dealt, edits: Edits) -> None:
    shards = dealt(edits(2, 1), 4)
    assert sorted(len(one.jobs) for one in shards) == [0, 0, 1, 1]
    assert dealt([], 2)[0].jobs == ()


def test_manifest_order_holds_in_a_shard_and_paths_do_not_matter(
    dealt: Dealt, edits: Edits, make_job: Make
) -> None:
    jobs = edits(20, 3)
    moved = [make_job(j.custom_id, images=(f"/mnt/{j.images[0]}",), prompt=j.prompt) for j in jobs]
    for here, there in zip(dealt(jobs, 3), dealt(moved, 3), strict=True):
        ids = [job.custom_id for job in here.jobs]
        assert ids == [job.custom_id for job in there.jobs]
        places = [[job.custom_id for job in jobs].index(name) for name in ids]
        assert places == sorted(places)


def test_a_deal_is_the_same_in_every_process() -> None:
    """Python's own hash of a text is another in each."""
    code = (
        "from hyimg_cli.manifest.planner import deal;"
        "print(deal([(f'job {n}', n % 3 + 1) for n in range(50)], 4))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(deal([(f"job {n}", n % 3 + 1) for n in range(50)], 4))


def test_preferences_are_spread_and_few_groups_move_with_the_count() -> None:
    """The bound binds in the end only: most stay where they were when a shard is added."""
    pieces = [(f"photo {n}", 1) for n in range(4000)]
    before, after = deal(pieces, 9), deal(pieces, 10)
    assert max(Counter(before).values()) == 445
    stayed = sum(old == new for old, new in zip(before, after, strict=True))
    assert stayed > 0.75 * len(pieces)
