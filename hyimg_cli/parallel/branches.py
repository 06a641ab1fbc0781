"""Guidance branches on ranks of their own: branch g of every denoise step runs on rank g. Or each
on all ranks at once, of which each has a part of the video's tokens.

    once a job    each rank's branch inputs (text embeddings and masks), through the pipe
    every step    rank 0 ─▶ others: latents and timestep     others ─▶ rank 0: one velocity each

The branches are separate forwards in one process too, so the velocities are equal to the bit. What
is made of them (CFG, the scheduler's step) stays on rank 0. Where the tokens are split rank 0 has
whole velocities, and nothing is sent back.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyimg_cli.parallel.ranks import Rank, RankPool, short_as_one
from hyimg_cli.parallel.tensor import broadcast

Spec = tuple[tuple[int, ...], torch.dtype]


class ParallelBranches:
    """A job's branches spread over the first ranks of a pool, which hold the model as a part: its
    `branch(inputs)` is one branch of one job, (step, latents, timestep) to its velocity. Velocities
    of all branches have one shape and dtype.

    With fewer ranks than branches a rank takes several; with one, everything runs here.
    `splits_tokens`: every branch runs on all of the ranks, and the model has a `context` that
    splits its forwards.
    """

    def __init__(
        self,
        pool: RankPool,
        *,
        ranks: int,
        part: str = "transformer",
        splits_tokens: bool = False,
    ) -> None:
        self._pool = pool
        self._limit, self._part, self.splits_tokens = ranks, part, splits_tokens
        self._branches = 0

    @property
    def ranks(self) -> int:
        """Ranks that work for the current job."""
        return self._limit if self.splits_tokens else min(self._limit, self._branches)

    @short_as_one()
    def begin(self, inputs: Sequence[Any]) -> None:
        """Start a job: the inputs of every branch, picklable, their tensors on the CPU.

        A rank that has none of them keeps its branch of an earlier job, a few MB, until it has.
        The only large thing that is sent, and only here. Raises what the model raises.
        """
        self._branches = len(inputs)
        # NOTE: every rank gets all inputs in one message; they are a few MB once a job.
        self._pool.run(
            begin_branches,
            self._part,
            tuple(inputs),
            self.ranks,
            self.splits_tokens,
            ranks=self.ranks,
        )

    @short_as_one()
    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        """Every branch's velocity, in the order of `begin`, on rank 0's device.

        Nothing is read on the host, so rank 0 may run ahead of its GPU. Raises RankError where a
        rank dies or fails, torch.OutOfMemoryError where one has too little memory.
        """
        assert self._branches, "begin comes before velocity"
        inputs = latents_BCFYX.contiguous(), timestep_B.contiguous()
        velocities: list[Tensor] = self._pool.run(
            step_branches,
            self._part,
            self.ranks,
            self.splits_tokens,
            step,
            *((tuple(tensor.shape), tensor.dtype) for tensor in inputs),
            ranks=self.ranks,
            own=partial(self._step, step, *inputs),
        )[0]
        return velocities

    def _step(self, step: int, *inputs: Tensor) -> list[Tensor]:
        """Rank 0's side of a step: latents out, its own branches, the others' velocities in."""
        own = _own(self._pool.here, self._part, self.ranks, step, inputs)
        if self.splits_tokens:
            return own
        velocities = [own[0]] * self._branches
        velocities[:: self.ranks] = own
        for other in range(1, self.ranks):
            for branch in range(other, self._branches, self.ranks):
                velocities[branch] = torch.empty_like(own[0])
                dist.recv(velocities[branch], other)
        return velocities


def begin_branches(
    rank: Rank, part: str, inputs: Sequence[Any], ranks: int, splits_tokens: bool
) -> None:
    """Task: this rank's branches of a new job. They are made anew for each job, so the
    hoisted constants in them are the job's own; whole while a branch's LoRA may change layers.
    """
    model = rank.parts[part]
    if splits_tokens:
        model.context.whole()
    share = inputs if splits_tokens else inputs[rank.number :: ranks]
    rank.parts[f"{part}: branches"] = [model.branch(own) for own in share]
    if splits_tokens:
        model.context.split(ranks)


def step_branches(
    rank: Rank, part: str, ranks: int, splits_tokens: bool, step: int, *specs: Spec
) -> None:
    """Task of ranks 1, 2, ..: take latents and timestep, send back this rank's velocities."""
    buffers = [torch.empty(shape, dtype=dtype, device=rank.device) for shape, dtype in specs]
    velocities = _own(rank, part, ranks, step, buffers)
    for velocity in () if splits_tokens else velocities:
        dist.send(velocity, 0)


@torch.no_grad()
def _own(rank: Rank, part: str, ranks: int, step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Velocities of this rank's branches. Rank 0's `inputs` go to all in one message: on GPUs each
    pair of ranks would need a communicator of its own.
    """
    latents, timestep = (broadcast(tensor, ranks) for tensor in inputs)
    branches = rank.parts[f"{part}: branches"]
    return [velocity(step, latents, timestep).contiguous() for velocity in branches]
