"""Layers split over ranks: the embedded model on 2 and 4 ranks against one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_tasks import STEPS, drawn, forwards, held, rows_at, written
from short_tasks import short, short_here

from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.errors import JobError, RankError, UsageError
from hyimg_cli.kernels.rows import invariant_multiple
from hyimg_cli.kv.buffer import Rows
from hyimg_cli.kv.tree import Host, KVTree
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.card import read_architecture
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.ranked import load_ranked
from hyimg_cli.models.hunyuan_image3.sharded import Share
from hyimg_cli.models.hunyuan_image3.split import refuse_uneven
from hyimg_cli.models.hunyuan_image3.weights import load
from hyimg_cli.models.protocols import Context, DenoiseInput, GeneratedText, Prefill
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.branches import BranchBuilder, Prefixes
from hyimg_cli.pipelines.image.prefill import prefill_together
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import Quantization
from hyimg_cli.spec.job import ImageJob

# Largest difference over the largest value; sums over ranks round in another order.
BOUND = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
FOLDER = registry.resolve_model(registry.EMBEDDED)


@pytest.fixture
def job(write_manifest: Callable[..., Path]) -> ImageJob:
    line = {"custom_id": "a", "task": "t2i", "prompt": "a red circle", "bot_task": "think"}
    manifest = read_manifest(write_manifest(line | {"seed": 3, "size": "64x64"}))
    jobs, faults = resolve_jobs(manifest, settle({}, {}, {}), registry.model_card)
    assert not faults
    return jobs[0]


def one_process(dtype: torch.dtype, quantization: Quantization = "none") -> HunyuanImage3:
    network = load(FOLDER, dtype=dtype, quantization=quantization)
    return HunyuanImage3(network, registry.sequences(registry.EMBEDDED))


def over_ranks(
    pool: RankPool, ranks: int, dtype: torch.dtype, quantization: Quantization = "none"
) -> HunyuanImage3:
    network = load_ranked(
        partial(load, FOLDER, dtype=dtype, quantization=quantization), pool, ranks
    )
    return HunyuanImage3(network, registry.sequences(registry.EMBEDDED))


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)], ids=str
)
def test_equal_to_one_process_within_rounding(
    pool: RankPool, job: ImageJob, size: int, dtype: torch.dtype
) -> None:
    expected = forwards(one_process(dtype), job)
    model = over_ranks(pool, size, dtype)
    found = forwards(model, job)
    for name, value in expected.items():
        worst = (found[name] - value).abs().max() / value.abs().max()
        assert worst < BOUND[dtype], f"{name}: {worst}"
    # What `plan` promises, to the byte; rank 0 has embeddings, heads, ViT and VAE besides.
    name = str(dtype).removeprefix("torch.")
    promised = registry.sequences(registry.EMBEDDED).rank_bytes(size, name, "none")
    assert sum(p.nbytes for p in model.network.parameters()) <= promised.first
    others = pool.run(held, ranks=size, own=lambda: (0, 0))[1:]
    assert max(weights for weights, _ in others) == promised.other


def test_experts_in_8_bits_are_as_far_from_the_released_ones(pool: RankPool, job: ImageJob) -> None:
    """Weights are the same numbers; a row that enters `down` has a scale for each rank's part."""
    dense, alone = (forwards(one_process(torch.float32, form), job) for form in ("none", "fp8"))
    found = forwards(over_ranks(pool, 2, torch.float32, "fp8"), job)
    for name, value in dense.items():
        price, other = ((one[name] - value).norm() / value.norm() for one in (alone, found))
        between = (found[name] - alone[name]).norm() / alone[name].norm()
        # As near to one process's as those are to the released: rounding alone differs by machine.
        assert 0 < between < 1.2 * price
        assert other < 1.5 * price


def test_ranks_let_go_what_rank_0_lets_go(pool: RankPool, job: ImageJob) -> None:
    model = over_ranks(pool, 2, torch.float32)
    tree: KVTree[Rows] = KVTree(10**9)
    counts = []
    for _ in range(4):
        written(model, job, tree)
        counts.append(pool.run(held, ranks=2, own=lambda: (0, 0))[1][1])
    # A page that is let go is taken again, on every rank.
    assert counts[1] == counts[3] == model.arena.slots


@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_prefixes_give_the_bits_of_unshared_ones(
    pool: RankPool, job: ImageJob, ranks: int
) -> None:
    """Cut, split, spilled to main memory and back, extended; and other rows beside it."""
    model = over_ranks(pool, ranks, torch.float32)
    model.network.make_batch_invariant(invariant_multiple())
    host: Host[Any] = Host(10**9, lambda rows: rows.to_host(), lambda rows: rows.to_device())
    tree: KVTree[Rows] = KVTree(10**9, host=host)
    expected = written(model, job)
    assert torch.equal(written(model, job, tree), expected)
    before = model.rows_seen
    assert torch.equal(written(model, job, tree), expected)
    assert model.rows_seen - before < 10, "the prompt came from the tree"
    other = replace(job, prompt="a red square and a circle")
    together = written(model, other, tree)
    assert torch.equal(together, written(model, other))
    spilling: KVTree[Rows] = KVTree(tree.held_bytes, host=host)
    for one in (job, other, job):
        assert torch.equal(written(model, one, spilling), expected if one is job else together)


@pytest.mark.thorough
def test_what_lost_ranks_held_is_never_used(pool: RankPool, job: ImageJob) -> None:
    model = over_ranks(pool, 2, torch.float32)
    tree: KVTree[Rows] = KVTree(10**9)
    written(model, job, tree)
    buffer = model.new_buffer()
    pool.stop()
    with pytest.raises(RankError, match="were lost with the ranks") as raised:
        written(model, job, tree)
    assert (raised.value.code, raised.value.retryable) == ("rank.lost", True)
    with pytest.raises(RankError):
        model.new_buffer().share_prefix(buffer, 0)


def test_ranks_that_heads_cannot_be_split_over_are_refused() -> None:
    arch = replace(
        read_architecture(FOLDER),
        num_attention_heads=32,
        num_key_value_heads=8,
        moe_intermediate_size=3072,
    )
    for fine in (1, 2, 4, 8, 16, 32):
        refuse_uneven(arch, fine)
    for wrong in (3, 6, 12, 64):
        with pytest.raises(UsageError, match="8 kv heads with 4 query heads each cannot be split"):
            refuse_uneven(arch, wrong)
    with pytest.raises(UsageError, match="3000"):
        refuse_uneven(replace(arch, moe_intermediate_size=3000), 16)
    refuse_uneven(arch, 16, "nf4")
    with pytest.raises(UsageError, match="nf4 needs rows that are multiples of 64 weights"):
        refuse_uneven(arch, 32, "nf4")


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_a_partition(length: int, count: int) -> None:
    parts = [list(range(length))[Share(n, count).of_length(length)] for n in range(count)]
    assert [thing for part in parts for thing in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_branches_on_ranks_of_their_own(pool: RankPool, job: ImageJob, ranks: int) -> None:
    """Two sets of ranks: with whole layers to the bit, with split ones within rounding."""
    alone = one_process(torch.float32)
    network = load_ranked(partial(load, FOLDER, dtype=torch.float32), pool, ranks, branch_sets=2)
    model = HunyuanImage3(network, registry.sequences(registry.EMBEDDED))
    for each in (alone, model):
        each.network.make_batch_invariant(invariant_multiple())
    expected, before = forwards(alone, job), model.rows_seen
    found = forwards(model, job)
    for name, value in expected.items():
        if ranks == 2:
            assert torch.equal(found[name], value), name
        else:
            worst = (found[name] - value).abs().max() / value.abs().max()
            assert worst < BOUND[torch.float32], f"{name}: {worst}"
    # Rank 0 had one branch of two in each step, and all rows of all else.
    canvas = alone.canvas(job, [], GeneratedText())
    live = canvas.branches[0].live_stop - canvas.branches[0].live_start
    assert alone.rows_seen - (model.rows_seen - before) == STEPS * live
    # A set that runs out of memory, and then rank 0: nobody waits, and what follows is right.
    pids = pool.member_pids
    for rank in (1, 0):
        lift = short(model.network.model, "mlp", at=(0,)) if rank == 0 else None
        if rank == 1:  # its third forward: prompts of both branches, then a branch of its own
            pool.run(short_here, "mlp", 10**6, (2,), ranks=ranks, own=lambda: None)
        with pytest.raises(torch.OutOfMemoryError, match=f"rank {rank}: no room"):
            drawn(model, job)
        if lift is not None:
            lift()
    assert torch.equal(drawn(model, job)["pixels"], found["pixels"])
    assert pool.member_pids == pids


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_branch_is_prefilled_on_its_own_ranks(
    pool: RankPool, job: ImageJob, ranks: int
) -> None:
    """Its K/V are there alone; from the start, behind a context, and from what others left."""
    alone = one_process(torch.float32)
    network = load_ranked(partial(load, FOLDER, dtype=torch.float32), pool, ranks, branch_sets=2)
    model = HunyuanImage3(network, registry.sequences(registry.EMBEDDED))
    for each in (alone, model):
        each.network.make_batch_invariant(invariant_multiple())
    # What both branches begin with ends within a text, here where its run rounds otherwise.
    job = replace(job, use_system_prompt="custom", system_prompt="draw what " * 100)
    trees: list[KVTree[Rows] | None] = [KVTree(10**9, splits_text=False) for _ in range(2)]
    for stage in ("recomputed", "from the start", "from the tree", "behind a context"):
        has_context, own_trees = stage == "behind a context", trees
        if stage == "recomputed":
            own_trees = [None, None]
        expected, _ = branches(alone, job, own_trees[0], has_context=has_context)
        found, built = branches(model, job, own_trees[1], has_context=has_context)
        own: list[Any] = [branch.buffer for branch in built[0]]
        assert [part.home for part in own] == [0, 1]
        # A set has the last rows of its own branch alone: the others were never written there.
        for number, part in enumerate(own):
            slots = part.span(part.length - 1, part.length).index(torch.device("cpu")).tolist()
            mine = [keys_SKD[slots] for keys_SKD in model.arena.storage.keys_SKD]
            everywhere = pool.run(rows_at, slots, ranks=ranks, own=lambda mine=mine: mine)
            sets = everywhere[:: ranks // 2]
            other, right = sets[1 - number], sets[number]
            assert all(row.abs().sum() > 0 for row in right)
            assert not any(torch.equal(a, b) for a, b in zip(right, other, strict=True))
        prefix = built[0][0].query_block.spans[0].start
        for tokens in built[1]:
            assert tokens.reused + tokens.shared + tokens.computed == prefix, stage
        is_shared = stage in ("from the tree", "behind a context")
        assert (built[1][1].computed < prefix) == is_shared, stage
        if ranks == 2:
            assert torch.equal(found, expected), stage
        assert (found - expected).abs().max() < BOUND[torch.float32] * expected.abs().max()
    # Two pictures, whose branches take turns in the rows; then steps without guidance.
    pair = [DenoiseInput(noise, step, 3.0, built[0]) for noise, step in two_steps(model, job)]
    together, one_by_one = model.velocities(pair), [model.velocities([each])[0] for each in pair]
    assert all(map(torch.equal, together, one_by_one))
    unguided = [replace(each, branches=each.branches[:1]) for each in pair]
    for found, whole in zip(model.velocities(unguided), together, strict=True):
        assert torch.equal(found, whole[:1])


def branches(
    model: HunyuanImage3, job: ImageJob, tree: KVTree[Rows] | None, *, has_context: bool
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """A step's velocities of branches that a builder made."""
    context = Context([], None, None)
    if has_context:
        opening = model.opening(job, [])
        assert opening is not None
        ids, stop = list(opening.ids), len(opening.ids)
        context = Context(ids, model.new_buffer(), None)
        assert context.buffer is not None
        model.prefill([Prefill(opening.layout, ids, [], context.buffer, stop)])
    clock = PhaseClock(0.0, lambda: None)
    canvas = model.canvas(job, [], GeneratedText())
    prefixes = None if tree is None else Prefixes(tree, "test")
    builder = BranchBuilder(model, canvas, [], prefixes=prefixes, clock=clock)
    ((_, built),) = prefill_together(model, [builder.build(context)], 1000)
    assert not isinstance(built, JobError)
    noise, step = two_steps(model, job)[0]
    return model.velocities([DenoiseInput(noise, step, 3.0, built[0])])[0], built


def two_steps(model: HunyuanImage3, job: ImageJob) -> list[tuple[torch.Tensor, Step]]:
    bucket = model.canvas(job, [], GeneratedText()).bucket
    steps = list(Schedule(STEPS, 3.0).steps())
    return [(model.initial_latents(bucket, seed), steps[0]) for seed in (1, 2)]
