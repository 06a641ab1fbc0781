"""Ranks that run out of memory: batches are halved as in one process, and no rank is lost."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine.conftest import studio_of
from engine.test_group import _pixels, _run
from short_tasks import refuse_slots, short, short_here, slots

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.models import registry
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.pipelines import ranks as ranks_of
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import ImageJob, SizeRequest

# Rows of two pictures in a denoise step, with both branches, fit in; those of four do not.
TWO_DRAW = 100
SPACED = (9, 31, 64, 101)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2, timeout_s=60)
    ranks_of.take(pool)  # another file's ranks may be up in this process
    with pool as started:
        yield started


@pytest.fixture(scope="module")
def spread(pool: RankPool) -> Any:
    return registry.load(ModelChoice(device="cpu", dtype="float32"), pool=pool)


@pytest.fixture(scope="module")
def jobs(job: ImageJob) -> list[ImageJob]:
    text = replace(job.text, max_new_tokens=4)
    size = SizeRequest(64, 64)
    return [replace(job, custom_id=f"{n}", seed=n, text=text, size=size) for n in range(4)]


@pytest.fixture(scope="module")
def expected(spread: Any, jobs: list[ImageJob]) -> dict[str, bytes]:
    return _pixels(_run(jobs, studio_of(spread), 4))


@pytest.fixture(autouse=True)
def _nothing_is_short(pool: RankPool, expected: dict[str, bytes]) -> None:
    """What the test before asked of the other rank is taken back."""
    on_member(pool, "mlp")


def on_member(pool: RankPool, where: str, **when: Any) -> None:
    most, at = when.get("most", 10**6), when.get("at", ())
    pool.run(short_here, where, most, at, own=lambda: None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["self_attn", "mlp"])
def test_a_short_rank_halves_its_batches(
    spread: Any,
    pool: RankPool,
    jobs: list[ImageJob],
    expected: dict[str, bytes],
    where: str,
    rank: int,
) -> None:
    """Before a layer's first sum or its second, on rank 0 or on the other; to the bit."""
    pids, tree = pool.member_pids, KVTree[Any](10**9)
    lift = None
    if rank == 0:
        lift = short(spread.network.model, where, TWO_DRAW)
    else:
        on_member(pool, where, most=TWO_DRAW)
    try:
        ends = _run(jobs, studio_of(spread, tree=tree), 4)
    finally:
        if lift:
            lift()
    assert _pixels(ends) == expected
    batches = [end.batch["denoise"] for end in ends.values() if isinstance(end, ImageRequest)]
    assert batches == [2, 2, 2, 2]
    notes = [note for end in ends.values() for note in end.warnings]  # type: ignore[union-attr]
    assert any("out of memory" in note for note in notes)
    assert pool.member_pids == pids, "no rank has ended"


def test_a_rank_that_is_short_now_and_then_stays_equal(
    spread: Any, pool: RankPool, jobs: list[ImageJob], expected: dict[str, bytes]
) -> None:
    """In prefill, text and denoise steps; what is shared afterwards is right on every rank."""
    pids, tree = pool.member_pids, KVTree[Any](10**9)
    on_member(pool, "mlp", at=SPACED)
    assert _pixels(_run(jobs, studio_of(spread, tree=tree), 4)) == expected
    on_member(pool, "mlp")
    assert _pixels(_run(jobs[::-1], studio_of(spread, tree=tree), 4)) == expected
    assert pool.member_pids == pids


def test_slots_that_a_rank_cannot_have_come_later(
    spread: Any, pool: RankPool, jobs: list[ImageJob], expected: dict[str, bytes]
) -> None:
    pids = pool.member_pids
    for refusals in (0, 1, 1):
        spread.arena.shrink()
        pool.run(refuse_slots, refusals, own=lambda: None)
        assert _pixels(_run(jobs, studio_of(spread), 4)) == expected
        gc.collect()
        # What the last pictures held is given back with the next forward.
        assert pool.run(slots, own=lambda: 0)[1] >= spread.arena.slots
        assert spread.arena.pages.used == 0
    assert pool.member_pids == pids


@pytest.mark.thorough
def test_a_job_that_never_fits_is_lost_alone(
    spread: Any, pool: RankPool, jobs: list[ImageJob], expected: dict[str, bytes]
) -> None:
    """Its prompt is longer than there is room for; the ranks go on with the others."""
    long = replace(jobs[0], custom_id="long", prompt="a red circle " * 60)
    on_member(pool, "mlp", most=TWO_DRAW)
    ends = _run([jobs[0], long, *jobs[1:]], studio_of(spread), 4)
    lost = ends.pop("long")
    assert isinstance(lost, Lost)
    assert "rank 1: no room for" in str(lost.error)
    assert _pixels(ends) == expected
