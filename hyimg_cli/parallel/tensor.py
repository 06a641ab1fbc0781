"""Layers whose weights are split over ranks: what is split evenly, and sums over all ranks.

Every rank runs the same calls on the same rows; a layer's input is whole on each, its inner part is
the rank's own, and the ranks' partial outputs are added. Sums over ranks round in another order
than one product does, so results agree within rounding, not to the bit.
"""

# Legend: T row, M model width
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor, nn

from hyimg_cli.parallel.ranks import Rank


@dataclass(frozen=True)
class Share:
    """Part `number` of `count` equal or nearly equal parts."""

    number: int
    count: int

    @classmethod
    def of(cls, rank: Rank, ranks: int | None = None) -> "Share":
        """The rank's, among the first `ranks` of its pool or all."""
        return cls(rank.number, rank.size if ranks is None else ranks)

    def of_length(self, length: int) -> slice:
        """This part of `length` things in a row; the first parts are longer where it is uneven."""
        base, longer = divmod(length, self.count)
        start = self.number * base + min(self.number, longer)
        return slice(start, start + base + (self.number < longer))


class Summed(nn.Module):
    """A layer that computes this rank's partial sum of its output; the whole comes out.

    The first `ranks` ranks call it with the same rows.
    """

    def __init__(self, partial: nn.Module, ranks: int) -> None:
        super().__init__()
        self.partial = partial
        self.ranks = ranks

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.partial(x_TM).contiguous()
        dist.all_reduce(out_TM, group=_first(self.ranks, dist.group.WORLD))
        return out_TM


@lru_cache(maxsize=2)
def _first(ranks: int, world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of the first ranks of `world`, formed at the first sum; None for all of them.

    Asked for at each sum: a pool that had to start again has another world.
    """
    assert world is not None, "a sharded layer runs within a pool's task"
    if ranks == world.size():
        return None
    group = dist.new_group(list(range(ranks)), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def kept_rows(layer: nn.Linear, rows: Tensor) -> nn.Linear:
    """The layer with these of its outputs."""
    return _with_weight(layer, layer.weight[rows.to(layer.weight.device)])


def kept_columns(layer: nn.Linear, columns: Tensor) -> nn.Linear:
    """The layer with these of its inputs: a partial sum."""
    return _with_weight(layer, layer.weight[:, columns.to(layer.weight.device)])


def _with_weight(layer: nn.Linear, weight: Tensor) -> nn.Linear:
    assert layer.bias is None, "a bias would be added once a rank"
    kept = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    kept.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return kept
