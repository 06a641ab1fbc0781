"""Guidance branches on ranks of their own: branch g of every denoise step runs on rank g. Or each
on all ranks at once, of which each has a part of the video's tokens.

    once a job    each rank's branch inputs (text embeddings and masks), through the pipe
    every step    rank 0 ─▶ others: latents and timestep     others ─▶ rank 0: one velocity each

The branches are separate forwards in one process too, so the velocities are equal to the bit. What
is made of them (CFG, the scheduler's step) stays on rank 0.
"""

# Legend: B batch, C channel, F latent frame, Y X latent rows and columns
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyimg_cli.parallel.ranks import Rank, RankPool, short_as_one
from hyimg_cli.parallel.tensor import spread

Velocity = Callable[[Tensor, Tensor], Tensor]


class ParallelBranches:
    """A job's branches spread over the first ranks of a pool, which hold the model as a part: its
    `branch(inputs)` is one branch of one job, (latents, timestep) to its velocity. Velocities of
    all branches have one shape and dtype.

    With fewer ranks than branches a rank takes several; with one, everything runs here.
    """

    def __init__(
        self, pool: RankPool, *, ranks: int | None = None, part: str = "transformer"
    ) -> None:
        self._pool = pool
        self._limit = pool.size if ranks is None else ranks
        self._part = part
        self._branches = 0

    @short_as_one()
    def begin(self, inputs: Sequence[Any]) -> None:
        """Start a job: the inputs of every branch, picklable, their tensors on the CPU.

        A rank that has none of them keeps its branch of an earlier job, a few MB, until it has.
        The only large thing that is sent, and only here. Raises what the model raises.
        """
        self._branches = len(inputs)
        by_rank = [tuple(inputs[rank :: self.ranks]) for rank in range(self.ranks)]
        # NOTE: every rank gets all inputs in one message; they are a few MB once a job.
        self._pool.run(begin_share, self._part, by_rank, ranks=self.ranks)

    @short_as_one()
    def velocity(self, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        """Every branch's velocity, in the order of `begin`, on rank 0's device.

        Nothing is read on the host, so rank 0 may run ahead of its GPU. Raises RankError where a
        rank dies or fails, torch.OutOfMemoryError where one has too little memory.
        """
        assert self._branches, "begin comes before velocity"
        gathered = partial(
            _gathered, self._pool.here, self._part, self._branches, self.ranks, latents_BCFYX
        )
        velocities: list[Tensor] = self._pool.run(
            step_share,
            self._part,
            _spec(latents_BCFYX),
            _spec(timestep_B),
            ranks=self.ranks,
            own=partial(gathered, timestep_B),
        )[0]
        return velocities

    @property
    def ranks(self) -> int:
        """Ranks that have a branch of the current job."""
        return min(self._limit, self._branches)


class SplitBranches:
    """A job's branches one after another, each on all of the first `ranks` of a pool: what they
    hold as a part has a `context` that splits its forwards.
    """

    def __init__(self, pool: RankPool, *, ranks: int, part: str) -> None:
        self._pool, self._part = pool, part
        self.ranks = ranks

    @short_as_one()
    def begin(self, inputs: Sequence[Any]) -> None:
        """Start a job, as `ParallelBranches.begin`."""
        self._pool.run(begin_split, self._part, tuple(inputs), self.ranks, ranks=self.ranks)

    @short_as_one()
    def velocity(self, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        """Every branch's velocity, in the order of `begin`, on rank 0's device.

        Raises RankError where a rank dies or fails, torch.OutOfMemoryError where one has too little
        memory.
        """
        inputs = latents_BCFYX.contiguous(), timestep_B.contiguous()
        velocities: list[Tensor] = self._pool.run(
            step_split,
            self._part,
            self.ranks,
            *map(_spec, inputs),
            ranks=self.ranks,
            own=partial(_split_here, self._pool.here, self._part, self.ranks, inputs),
        )[0]
        return velocities


Spec = tuple[tuple[int, ...], torch.dtype]


def begin_share(rank: Rank, part: str, by_rank: Sequence[Sequence[Any]]) -> None:
    """Task: this rank's branches of a new job. They are made anew for each job, so a step cache and
    hoisted constants in them are the job's own.
    """
    model = rank.parts[part]
    rank.parts[_held(part)] = [model.branch(inputs) for inputs in by_rank[rank.number]]


def step_share(rank: Rank, part: str, latents_spec: Spec, timestep_spec: Spec) -> None:
    """Task of ranks 1, 2, ..: take latents and timestep, send back this rank's velocities."""
    inputs = _rooms(rank, latents_spec, timestep_spec)
    for tensor in inputs:
        dist.recv(tensor, 0)
    for velocity in _own(rank, part, *inputs):
        dist.send(velocity, 0)


def begin_split(rank: Rank, part: str, inputs: Sequence[Any], ranks: int) -> None:
    """Task: every branch of a new job; whole while a branch's LoRA may change layers."""
    model = rank.parts[part]
    model.context.whole()
    rank.parts[_held(part)] = [model.branch(own) for own in inputs]
    model.context.split(ranks)


def step_split(rank: Rank, part: str, ranks: int, *specs: Spec) -> None:
    """Task of ranks 1, 2, ..: their part of every branch's forward; rank 0 has the velocities."""
    _own(rank, part, *(spread(room, ranks) for room in _rooms(rank, *specs)))


def _gathered(
    rank: Rank, part: str, branches: int, ranks: int, latents: Tensor, timestep: Tensor
) -> list[Tensor]:
    """Rank 0's side of a step: latents out, its own branches, the others' velocities in."""
    sent = [tensor.contiguous() for tensor in (latents, timestep)]
    sending = [dist.isend(tensor, other) for other in range(1, ranks) for tensor in sent]
    own = _own(rank, part, latents, timestep)
    velocities: list[Tensor | None] = [None] * branches
    velocities[::ranks] = own
    for other in range(1, ranks):
        for branch in range(other, branches, ranks):
            arriving = torch.empty_like(own[0])
            dist.recv(arriving, other)
            velocities[branch] = arriving
    for work in sending:
        assert work is not None, "this rank is in the group"
        work.wait()
    return [velocity for velocity in velocities if velocity is not None]


def _split_here(rank: Rank, part: str, ranks: int, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Rank 0's side of a step: latents and timestep out, its part of every branch's forward. One
    message to all: on GPUs each pair of ranks would need a communicator of its own.
    """
    return _own(rank, part, *(spread(tensor, ranks) for tensor in inputs))


def _rooms(rank: Rank, *specs: Spec) -> list[Tensor]:
    """Room for rank 0's tensors."""
    return [torch.empty(shape, dtype=dtype, device=rank.device) for shape, dtype in specs]


@torch.no_grad()
def _own(rank: Rank, part: str, latents: Tensor, timestep: Tensor) -> list[Tensor]:
    branches: list[Velocity] = rank.parts[_held(part)]
    return [velocity(latents, timestep).contiguous() for velocity in branches]


def _spec(tensor: Tensor) -> Spec:
    return tuple(tensor.shape), tensor.dtype


def _held(part: str) -> str:
    """The part that holds a rank's branches of the current job."""
    return f"{part}: branches"
