"""Run guidance branches on separate ranks, or each branch on all ranks with split tokens.

    once a job    each rank's branch inputs (text embeddings and masks), through the pipe
    every step    rank 0 ─▶ others: latents and timestep     others ─▶ rank 0: one velocity each

The branches are separate forwards in one process too, so the velocities are equal to the bit.
Rank 0 combines them (CFG, the scheduler's step). With split tokens, rank 0 has whole velocities,
and nothing is sent back.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.parallel.tensor import broadcast

TRANSFORMER, BRANCHES = "transformer", "branches"
Spec = tuple[tuple[int, ...], torch.dtype]


class ParallelBranches:
    """A job's branches, spread over the first ranks of a pool.

    The ranks hold the model as their part TRANSFORMER: its `branch(inputs)` is one branch of one
    job, (step, latents, timestep) to velocity. All velocities have one shape and dtype. With fewer
    ranks than branches a rank takes several. `splits_tokens`: every branch runs on all ranks, split
    by the model's `context`.
    """

    def __init__(self, pool: RankPool, *, ranks: int, splits_tokens: bool = False) -> None:
        self._pool, self._limit, self.splits_tokens = pool, ranks, splits_tokens
        self._branches = 0

    @property
    def ranks(self) -> int:
        """Number of ranks that work for the current job."""
        return self._limit if self.splits_tokens else min(self._limit, self._branches)

    def begin(self, inputs: Sequence[Any]) -> None:
        """Start a job: the inputs of every branch, picklable, their tensors on the CPU.

        A rank without a branch in this job keeps its branch of an earlier job, a few MB. This is
        the only large message. Raises what the model raises.
        """
        self._branches = len(inputs)
        # NOTE: every rank gets all inputs in one message; they are a few MB once a job.
        told = tuple(inputs), self.ranks, self.splits_tokens
        self._pool.run(begin_branches, *told, ranks=self.ranks)

    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        """Return every branch's velocity, in the order of `begin`, on rank 0's device.

        Nothing is read on the host, so rank 0 may run ahead of its GPU. Raises RankError if a rank
        dies or fails, torch.OutOfMemoryError if one has too little memory.
        """
        assert self._branches, "begin comes before velocity"
        entering = [latents_BCFYX.contiguous(), timestep_B.contiguous()]
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in entering]
        own = self._pool.here.parts[BRANCHES]
        velocities: list[Tensor] = self._pool.run(
            step_branches, step, specs, ranks=self.ranks, own=lambda: own.velocities(step, entering)
        )[0]
        return velocities


@dataclass(frozen=True)
class RankBranches:
    """A job's branches on one of its ranks; None for a branch that only another rank has."""

    rank: int
    ranks: int
    branches: Sequence[Callable[..., Tensor] | None]

    @torch.no_grad()
    def velocities(self, step: int, entering: Sequence[Tensor]) -> list[Tensor]:
        """Return every branch's velocity on rank 0, which has latents and timestep."""
        # In one message to all: on GPUs each pair of ranks would need a communicator of its own.
        latents, timestep = (broadcast(tensor, self.ranks) for tensor in entering)
        found: list[Any] = [
            branch and branch(step, latents, timestep).contiguous() for branch in self.branches
        ]
        for number, branch in enumerate(self.branches):
            if self.rank == 0 and branch is None:
                found[number] = torch.empty_like(found[0])
                dist.recv(found[number], number % self.ranks)
            elif self.rank and branch and None in self.branches:
                dist.send(found[number], 0)
        return found


def begin_branches(rank: Rank, inputs: Sequence[Any], ranks: int, splits_tokens: bool) -> None:
    """Task: make this rank's branches for a new job.

    Made for each job, so their hoisted constants belong to it. The model is not split while they
    are made, because a LoRA may change layers.
    """
    model = rank.parts[TRANSFORMER]
    if splits_tokens:
        model.context.whole()
    branches = [
        model.branch(own) if splits_tokens or number % ranks == rank.number else None
        for number, own in enumerate(inputs)
    ]
    rank.parts[BRANCHES] = RankBranches(rank.number, ranks, branches)
    if splits_tokens:
        model.context.split(ranks)


def step_branches(rank: Rank, step: int, specs: Sequence[Spec]) -> None:
    """Task of ranks 1, 2, ..: this rank's velocities, sent to rank 0."""
    entering = [torch.empty(shape, dtype=dtype, device=rank.device) for shape, dtype in specs]
    rank.parts[BRANCHES].velocities(step, entering)
