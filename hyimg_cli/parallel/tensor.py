"""Layers whose weights are split over ranks: the sums over all ranks.

Every rank runs the same calls on the same rows; a layer's input is whole on each, its inner part is
the rank's own, and the ranks' partial outputs are added. Sums over ranks round in another order
than one product does, so results agree within rounding, not to the bit.
"""

# Legend: T row, M model width
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyimg_cli.parallel.wire import loopback


class Sums:
    """The sums over a pool's ranks in a network's forward: `count`, always in the same order.

    Every rank must take part in each sum, even after an error: on a GPU, the other ranks would hang
    and could only be killed. A rank that cannot continue adds zeros to the remaining sums.
    """

    def __init__(self, ranks: range, count: int) -> None:
        self._ranks, self._count = ranks, count
        self._done = 0

    def begin(self) -> None:
        """Begin a forward."""
        self._done = 0

    def total(self, partial_TM: Tensor) -> Tensor:
        """Return the next sum; every rank gives its part of it."""
        self._done += 1
        group = _group(self._ranks, dist.group.WORLD)
        if len(self._ranks) > 2 and partial_TM.device.type == "cpu":
            # An `all_reduce` of more than two ranks starts each part of the tensor at another rank,
            # so a row's bits would depend on the number of rows. Here every value is summed in rank
            # order, narrow dtypes in float32.
            parts = [torch.empty_like(partial_TM) for _ in self._ranks]
            dist.all_gather(parts, partial_TM, group=group)
            wide = torch.promote_types(partial_TM.dtype, torch.float32)
            total_TM = sum((part_TM.to(wide) for part_TM in parts[1:]), start=parts[0].to(wide))
            return total_TM.to(partial_TM.dtype)
        dist.all_reduce(partial_TM, group=group)
        return partial_TM

    def give_up(self, nothing_TM: Tensor) -> None:
        """Take part in the forward's remaining sums with these rows; the result is invalid."""
        while self._done < self._count:
            self.total(nothing_TM)


class Summed(nn.Module):
    """A layer that computes this rank's partial sum of its output, and returns the whole.

    The ranks of `sums` call it with the same rows.
    """

    def __init__(self, partial: nn.Module, sums: Sums) -> None:
        super().__init__()
        self.partial = partial
        self.sums = sums

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.partial(x_TM).contiguous()
        assert out_TM.dtype == x_TM.dtype, "a rank that gives up gives zeros of the rows' dtype"
        return self.sums.total(out_TM)


def broadcast(tensor: Tensor, ranks: int) -> Tensor:
    """Copy rank 0's values into the first `ranks` ranks' tensors of that shape and dtype."""
    if ranks > 1:
        dist.broadcast(tensor, 0, group=_group(range(ranks), dist.group.WORLD))
    return tensor


@lru_cache(maxsize=4)
def _group(ranks: range, world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of some ranks of `world`, formed at the first sum; None for all ranks.

    Called for each sum, because a pool that restarted has another world.
    """
    assert world is not None, "a sharded layer runs within a pool's task"
    if len(ranks) == world.size():
        return None
    with loopback():
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group
