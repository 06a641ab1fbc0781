"""Layers split over ranks: the embedded model on 2 and 4 ranks against one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_tasks import LoadSharded, forwards

from hyimg_cli.batch.manifest import read_manifest
from hyimg_cli.batch.recipe import resolve_jobs, settle
from hyimg_cli.errors import UsageError
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.config import architecture, read_json
from hyimg_cli.models.hunyuan_image3.sharded import refuse_uneven
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.parallel.tensor import Share
from hyimg_cli.parallel.wire import Task
from hyimg_cli.spec.job import ImageJob

# Largest difference over the largest value; sums over ranks round in another order.
BOUND = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


@pytest.fixture
def job(write_manifest: Callable[..., Path]) -> ImageJob:
    line = {"custom_id": "a", "task": "t2i", "prompt": "a red circle", "bot_task": "think"}
    manifest = read_manifest(write_manifest(line | {"seed": 3, "size": "64x64"}))
    jobs, faults = resolve_jobs(manifest, settle({}, {}, {}), registry.model_card)
    assert not faults
    return jobs[0]


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)], ids=str
)
def test_equal_to_one_process_within_rounding(
    pool: RankPool, job: ImageJob, size: int, dtype: torch.dtype
) -> None:
    pool.load("model", LoadSharded(dtype, 1), ranks=1)
    expected: dict[str, Any] = pool.run(Task(forwards, (job,)), ranks=1)[0]
    pool.load("model", LoadSharded(dtype, size), ranks=size)
    found = pool.run(Task(forwards, (job,)), ranks=size)
    for name in ("logits", "velocities", "pixels"):
        worst = np.abs(found[0][name] - expected[name]).max() / np.abs(expected[name]).max()
        assert worst < BOUND[dtype], f"{name}: {worst}"
        # Every rank goes the same way: what it would sample from is the same to the bit.
        assert all(np.array_equal(one[name], found[0][name]) for one in found[1:])
    share = found[0]["layer_parameters"] / expected["layer_parameters"]
    assert share < 1 / size + 0.08, "norms and routers are whole, the rest is split"


def test_ranks_that_heads_cannot_be_split_over_are_refused() -> None:
    folder = registry.resolve_model(registry.EMBEDDED)
    arch = replace(
        architecture(read_json(folder, "config.json")),
        num_attention_heads=32,
        num_key_value_heads=8,
        moe_intermediate_size=(3072,),
    )
    for fine in (1, 2, 4, 8, 16, 32):
        refuse_uneven(arch, fine)
    for wrong in (3, 6, 12, 64):
        with pytest.raises(UsageError, match="8 kv heads of 4 query heads cannot be split"):
            refuse_uneven(arch, wrong)
    with pytest.raises(UsageError, match="3000"):
        refuse_uneven(replace(arch, moe_intermediate_size=(3000, 3072)), 16)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_a_partition(length: int, count: int) -> None:
    parts = [list(range(length))[Share(n, count).of_length(length)] for n in range(count)]
    assert [thing for part in parts for thing in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
