"""The decoder layers split over ranks: attention by heads, every expert by its inner width.

Two sums over ranks a layer. Router and norms are whole on every rank; embeddings, heads, ViT and
VAE are rank 0's alone. Which share is whose: `split`.
"""

import re

import torch
from torch import Tensor, nn

from hyimg_cli.models.hunyuan_image3.config import Architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.transformer import Attention, Transformer
from hyimg_cli.parallel.tensor import Share, Summed, Sums, WeightCut

_MATRIX = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.(self_attn|mlp)\."
    r"((experts\.\d+|(?P<shared>shared_mlp))\.)?"
    r"(?P<matrix>qkv_proj|o_proj|gate_and_up_proj|down_proj)\.weight"
)


class Cuts:
    """The rows or columns of each tensor that a rank keeps, by the tensor's name."""

    def __init__(self, arch: Architecture, share: Share) -> None:
        """Of an architecture that can be split so: see `refuse_uneven`."""
        self._arch, self._share = arch, share
        heads = torch.arange(arch.num_attention_heads).view(
            arch.num_key_value_heads, arch.heads_per_kv_head
        )
        self._kv_heads, self._queries = self._parts()
        self._kept_KQ = heads[self._kv_heads, self._queries]
        self._rows, self._columns = self._fused_rows(), self._head_columns()

    def of(self, name: str) -> WeightCut | None:
        """The cut of a tensor; None where it is whole on every rank that has it."""
        found = _MATRIX.fullmatch(name)
        if found is None:
            return None
        if found["matrix"] == "qkv_proj":
            return self._rows
        if found["matrix"] == "o_proj":
            return self._columns
        layer = int(found["layer"])
        inner = self._arch.moe_intermediate_size[layer]
        inner *= self._arch.num_shared_expert[layer] if found["shared"] else 1
        return self._cut_inner(inner, found["matrix"] == "gate_and_up_proj")

    def set_heads(self, attention: Attention) -> None:
        """Have a layer count the heads that it was left with."""
        attention.kv_heads, attention.group = self._kept_KQ.shape
        attention.heads = self._kept_KQ.numel()

    def _parts(self) -> tuple[slice, slice]:
        """This rank's kv heads, and which query heads of each."""
        arch, share = self._arch, self._share
        if arch.num_key_value_heads % share.count == 0:
            return share.of_length(arch.num_key_value_heads), slice(0, arch.heads_per_kv_head)
        sharers = share.count // arch.num_key_value_heads
        kv_head, place = divmod(share.number, sharers)
        queries = Share(place, sharers).of_length(arch.heads_per_kv_head)
        return slice(kv_head, kv_head + 1), queries

    def _fused_rows(self) -> WeightCut:
        """Rows of the fused projection lie kv head by kv head: its query heads, then k, then v."""
        arch = self._arch
        group, width = arch.heads_per_kv_head, arch.head_dim
        count = arch.num_key_value_heads * (group + 2) * width
        rows = torch.arange(count).view(-1, group + 2, width)[self._kv_heads]
        return WeightCut(0, torch.cat([rows[:, self._queries], rows[:, group:]], dim=1).flatten())

    def _head_columns(self) -> WeightCut:
        columns = torch.arange(self._arch.num_attention_heads * self._arch.head_dim)
        return WeightCut(
            1, columns.view(-1, self._arch.head_dim)[self._kept_KQ.flatten()].flatten()
        )

    def _cut_inner(self, inner: int, is_entry: bool) -> WeightCut:
        """This rank's part of an expert's width: rows of `up` and the same of the gate, or the
        columns that they enter.
        """
        kept = torch.arange(inner)[self._share.of_length(inner)]
        return WeightCut(0, torch.cat([kept, kept + inner])) if is_entry else WeightCut(1, kept)


def shard(network: HunyuanImage3ForCausalMM, cuts: Cuts) -> None:
    """Cut every decoder layer in place; the rest of its weights, if there are any, is let go."""
    for number, layer in enumerate(network.model.layers):
        for name, module in layer.named_modules():
            cut = cuts.of(f"model.layers.{number}.{name}.weight")
            if cut is not None:
                assert isinstance(module, nn.Linear), "what is cut are matrices"
                _set_weight(module, cut.of(module.weight.detach()))
        cuts.set_heads(layer.self_attn)


def sum_over(network: HunyuanImage3ForCausalMM, ranks: range) -> None:
    """Have what each rank computes of a layer be added. From here on all make the same calls."""
    if len(ranks) == 1:
        return
    sums = Sums(ranks, 2 * len(network.model.layers))
    for layer in network.model.layers:
        layer.self_attn.add_module("o_proj", Summed(layer.self_attn.o_proj, sums))
        layer.add_module("mlp", Summed(layer.mlp, sums))


def sums_of(layers: Transformer) -> Sums:
    """The sums of layers that `sum_over` has spread; none of whole ones."""
    last: nn.Module = layers.layers[-1].mlp
    return last.sums if isinstance(last, Summed) else Sums(range(1), 0)


def _set_weight(layer: nn.Linear, weight_OI: Tensor) -> None:
    assert layer.bias is None, "a bias would be added once a rank"
    layer.out_features, layer.in_features = weight_OI.shape
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
