"""The decoder layers split over ranks: attention by heads, every expert by its inner width.

Two sums over ranks a layer. Router and norms are whole on every rank; embeddings, heads, ViT and
VAE are rank 0's alone. `split` computes the shares.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.parallel.tensor import Summed, Sums

_MATRIX = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp)\.((experts\.\d+|shared_mlp)\.)?"
    r"(?P<matrix>qkv_proj|o_proj|gate_and_up_proj|down_proj)\.weight"
)


@dataclass(frozen=True)
class Share:
    """Part `number` of `count` equal or nearly equal parts."""

    number: int
    count: int

    def of_length(self, length: int) -> slice:
        """Return this part of `length` items; the first parts are longer if it is uneven."""
        base, longer = divmod(length, self.count)
        start = self.number * base + min(self.number, longer)
        return slice(start, start + base + (self.number < longer))


@dataclass(frozen=True, eq=False)
class WeightCut:
    """Some rows (`dim` 0) or columns (1) of a matrix: outputs, or inputs of a partial sum."""

    dim: int
    index: Tensor

    def of(self, weight_OI: Tensor) -> Tensor:
        """Return the kept part, which owns its memory; only its rows of a matrix in a file are
        read.
        """
        return weight_OI.index_select(self.dim, self.index.to(weight_OI.device))


class Cuts:
    """The rows or columns of each tensor that a rank keeps, by the tensor's name."""

    def __init__(self, arch: Architecture, share: Share) -> None:
        """For an architecture that passes `refuse_uneven`."""
        group, width, kv_heads = arch.heads_per_kv_head, arch.head_dim, arch.num_key_value_heads
        # This rank's kv heads, and which query heads of each.
        if kv_heads % share.count == 0:
            kept, queries = share.of_length(kv_heads), slice(0, group)
        else:
            sharers = share.count // kv_heads
            kv_head, place = divmod(share.number, sharers)
            kept, queries = slice(kv_head, kv_head + 1), Share(place, sharers).of_length(group)
        # Rows of the fused projection are ordered by kv head: its query heads, then k, then v.
        rows = torch.arange(kv_heads * (group + 2) * width).view(-1, group + 2, width)[kept]
        columns_KQD = torch.arange(kv_heads * group * width).view(kv_heads, group, width)
        self.heads_KQ = columns_KQD[kept, queries].shape[:2]
        # This rank's part of an expert's width: rows of `up` and the same of the gate, or the
        # columns that they enter.
        inner = torch.arange(arch.moe_intermediate_size)
        inner = inner[share.of_length(len(inner))]
        self._of = {
            "qkv_proj": WeightCut(
                0, torch.cat([rows[:, queries], rows[:, group:]], dim=1).flatten()
            ),
            "o_proj": WeightCut(1, columns_KQD[kept, queries].flatten()),
            "gate_and_up_proj": WeightCut(
                0, torch.cat([inner, inner + arch.moe_intermediate_size])
            ),
            "down_proj": WeightCut(1, inner),
        }

    def of(self, name: str) -> WeightCut | None:
        """Return the cut of a tensor; None if it is whole on every rank that has it."""
        found = _MATRIX.fullmatch(name)
        return None if found is None else self._of[found["matrix"]]


def shard(network: HunyuanImage3ForCausalMM, cuts: Cuts) -> None:
    """Cut every decoder layer in place; release the rest of its weights."""
    for number, layer in enumerate(network.model.layers):
        for name, module in layer.named_modules():
            cut = cuts.of(f"model.layers.{number}.{name}.weight")
            if cut is not None:
                assert isinstance(module, nn.Linear), "what is cut are matrices"
                assert module.bias is None, "a bias would be added once a rank"
                weight_OI = cut.of(module.weight.detach())
                module.out_features, module.in_features = weight_OI.shape
                module.weight = nn.Parameter(weight_OI, requires_grad=False)
        # From now on it counts its remaining heads.
        attention = layer.self_attn
        attention.kv_heads, attention.group = cuts.heads_KQ
        attention.heads = cuts.heads_KQ.numel()


def sum_over(network: HunyuanImage3ForCausalMM, ranks: range) -> None:
    """Add up what each rank computes of a layer.

    From now on, all ranks must make the same calls.
    """
    if len(ranks) == 1:
        return
    sums = Sums(ranks, 2 * len(network.model.layers))
    for layer in network.model.layers:
        layer.self_attn.add_module("o_proj", Summed(layer.self_attn.o_proj, sums))
        layer.add_module("mlp", Summed(layer.mlp, sums))


def sums_of(layers: Transformer) -> Sums:
    """Return the sums of layers that `sum_over` has spread; None for whole layers."""
    last: nn.Module = layers.layers[-1].mlp
    return last.sums if isinstance(last, Summed) else Sums(range(1), 0)
