"""Guidance branches on two ranks against two forwards in one process: the same bits."""

from pathlib import Path

import pytest
import torch
from tiny_transformer import LATENTS, LoadTransformer, branch_inputs, write_transformer
from torch import Tensor

from hyimg_cli.parallel.branches import ParallelBranches
from hyimg_cli.parallel.ranks import RankPool

STEPS = 3


def denoised(velocity: object, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Three steps of CFG from fixed noise, and every velocity on the way."""
    z = torch.randn(LATENTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen: list[Tensor] = []
    for step in range(STEPS):
        timestep = torch.tensor([900.0 - 250 * step]).to(dtype)
        conditional, unconditional = velocity(step, z, timestep)  # type: ignore[operator]
        seen += [conditional, unconditional]
        z = z - 0.2 * (unconditional + 6 * (conditional - unconditional))
    return z, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_are_one_process(pool: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    loader = LoadTransformer(write_transformer(tmp_path / "transformer", dtype), dtype)
    inputs = branch_inputs(dtype)
    alone = [loader(pool.here).branch(one) for one in inputs]

    @torch.no_grad()
    def in_one_process(step: int, z: Tensor, timestep: Tensor) -> list[Tensor]:
        return [velocity(step, z, timestep) for velocity in alone]

    expected, expected_seen = denoised(in_one_process, dtype)
    pool.load("transformer", loader)
    for ranks in (1, 2, 4):
        branches = ParallelBranches(pool, ranks=ranks)
        branches.begin(inputs)
        found, seen = denoised(branches.velocity, dtype)
        assert torch.equal(found, expected)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected_seen, strict=True))
    # The two branches are not one and the same.
    assert not torch.equal(expected_seen[0], expected_seen[1])


def test_a_job_begins_afresh(pool: RankPool, tmp_path: Path) -> None:
    dtype = torch.float32
    loader = LoadTransformer(write_transformer(tmp_path / "transformer", dtype), dtype)
    pool.load("transformer", loader)
    first, second = branch_inputs(dtype)
    branches = ParallelBranches(pool, ranks=2)
    branches.begin([first, second])
    expected, _ = denoised(branches.velocity, dtype)
    # A job of other branches between, one of three, and then the first again.
    branches.begin([second, first, second])
    z = torch.zeros(LATENTS)
    a, b, c = branches.velocity(0, z, torch.tensor([500.0]))
    assert torch.equal(a, c)
    assert not torch.equal(a, b)
    branches.begin([first, second])
    again, _ = denoised(branches.velocity, dtype)
    assert torch.equal(again, expected)
